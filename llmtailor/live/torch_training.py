"""A training without DeepSpeed: one process, DDP, where every rank holds everything, or FSDP2 (``fully_shard``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from llmtailor.balance import deal
from llmtailor.checkpoint.index import FSDP
from llmtailor.checkpoint.optimizer import NAME_KEYS, SAVED_NAMES
from llmtailor.checkpoint.placement import Box
from llmtailor.errors import Problem, UnsupportedCheckpoint
from llmtailor.formats.optimizer_objects import UNSAVED_FIX, flattened, is_storable, unsupported
from llmtailor.formats.partial.manifest import ParamFact, frozen_name
from llmtailor.formats.safetensors_weights import adapter_naming
from llmtailor.frameworks.files import OPTIMIZER, SCALER
from llmtailor.frameworks.stock_fields import adams_first_kinds, has_adams_options, keeps_as_adam
from llmtailor.live.model import Names, is_adapted, saved_adapter, saved_names
from llmtailor.live.tensors import DTYPES, local_of, not_compiled
from llmtailor.live.training import (
    FrozenFile,
    HasState,
    Inventory,
    LiveShard,
    TensorPlaceholder,
    dominant,
    is_plain_tensor,
    is_quantized,
    persistent_buffers,
    why_not_storable,
    with_elements,
)
from llmtailor.model.mergekit_data import on_disk
from llmtailor.model.parts import Param
from llmtailor.model.roles import BUFFER, FROZEN, KIND_OF_ROLE, MASTER
from llmtailor.ranks.team import Ranks

_PEFT, _FSDP = "PEFT", "FSDP"


class NamedTraining:
    """What a model and its optimizer hold, by the names of the model."""

    params: Mapping[str, ParamFact]
    tied: Mapping[str, str]
    inventory = Inventory()

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = unwrap(model), innermost(optimizer)
        self.is_sharded = any(isinstance(param, DTensor) for param in self.model.parameters())
        self._where = f"the optimizer {type(self.optimizer).__name__}"
        self._live: dict[str, torch.nn.Parameter] = {}
        """The params by name, as of the last `_find_groups`"""
        self._groups: list[list[str]] = []

    def _look(self) -> Inventory:
        """Return what model and optimizer are now."""
        # after a forward without backward, the model has unsharded params in their place
        for module in self.model.modules() if self.is_sharded else ():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._groups = self._find_groups()
        return Inventory.of(self.model, self._groups)

    @property
    def _options(self) -> dict[str, Mapping[str, Any]]:
        """The options of each trained param"""
        return {name: options for names, options in self.groups() for name in names}

    def _find_groups(self) -> list[list[str]]:
        """Return the params of the optimizer's groups, without `strays`."""
        self._live = dict(self.model.named_parameters())
        return [[name for name in group if name is not None] for group in self._names_in_groups()]

    def _names_in_groups(self) -> list[list[str | None]]:
        names = {param: name for name, param in self._live.items()}
        return [[names.get(param) for param in group["params"]] for group in self.optimizer.param_groups]

    def strays(self) -> int:
        return sum(name is None for group in self._names_in_groups() for name in group)

    def present(self) -> Iterator[LiveShard]:
        for name, begin in self._held(self.params):
            kind = KIND_OF_ROLE[self.params[name].role]
            if kind == BUFFER:
                yield LiveShard(name, kind, 0, self._elements(self.model.get_buffer(name)))
                continue
            yield self._fragment(name, kind, begin, self._live[name])
            for state, value in self._compared(name).items() if kind == MASTER else ():
                yield self._fragment(name, state, begin, value)

    def _compared(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the states of a param that can be compared with those of a file."""
        return {kind: one for kind, one in with_elements(self._saved(name)).items() if is_plain_tensor(one)}

    def _fragment(self, name: str, kind: str, begin: int, value: torch.Tensor) -> LiveShard:
        if value is self._live[name] or (value.shape == self._live[name].shape and value.is_floating_point()):
            return LiveShard(name, kind, begin, self._elements(value), box=self._box(name))
        return LiveShard(name, kind, 0, self._elements(value), tuple(value.shape))

    def _held(self, params: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yield the params of which this rank has elements, and the first of these."""
        for name in params:
            param: Any = self._live.get(name)
            if not isinstance(param, DTensor):
                yield name, 0
            elif (begin := _first_element(param)) is not None:
                yield name, begin

    def _box(self, name: str) -> Box | None:
        """Return the elements of a param that this rank has, if they are not adjacent."""
        param: Any = self._live[name]
        if not isinstance(param, DTensor):
            return None
        box = _box_of(param)
        cut = [at for at, size in enumerate(box.sizes) if size < param.shape[at]]
        return box if cut and any(size > 1 for size in box.sizes[: cut[-1]]) else None

    def _elements(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements that this rank has of a state, in one dimension."""
        return local_of(tensor).detach().reshape(-1)

    def _saved(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(self._live[name]) or {}
        return flattened(found)

    def weight_of(self, master: LiveShard) -> torch.Tensor | None:
        return None  # the optimizer updates the weights themselves

    def copies(self) -> Iterator[LiveShard]:
        yield from ()

    def steps(self) -> Mapping[str, float | None]:
        found = {name: self._saved(name).get("step") for name in self._names_of("trainable")}
        return {name: None if step is None else float(step) for name, step in found.items()}

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: self._saved(name) for name, _ in self._held(self._names_of("trainable"))}

    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        return list(zip(self._groups, self.optimizer.param_groups, strict=True))

    def _names_of(self, role: str) -> list[str]:
        return [name for name, fact in self.params.items() if fact.role == role]


class TorchTraining(NamedTraining):
    """Implements `live.training.Training`. Raises UnsupportedCheckpoint, with every reason, for what it can't save.

    Under FSDP2, tensor parallelism or both, a param is a DTensor, and every rank saves its own box of it. Cut along
    dimension 0 only, the elements of a rank are adjacent. Of replicas (in a hybrid mesh, HSDP, or of params that tensor
    parallelism does not cut), the first saves. Verified with torch 2.13.
    """

    stage = 0
    rounds_masters = False
    tag = "plain"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: HasState | None = None,
        *,
        is_saved: bool = True,
    ) -> None:
        super().__init__(model, optimizer)
        self._is_saved = is_saved
        problems = []
        for name, param in self.model.named_parameters():
            if isinstance(param, DTensor) and not _is_one_box(param):
                what = f"{name} is sharded as {param.placements}, so that no rank has one box of it"
                problems.append(Problem(_FSDP, what, "don't shard fused weights by tensor parallelism"))
        if problems:
            raise UnsupportedCheckpoint(problems)
        if problem := unsupported(type(self.optimizer), getattr(self.optimizer, "param_groups", ())):
            raise UnsupportedCheckpoint(problem)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UnsupportedCheckpoint.at(self._where, "it is not a torch.optim.Optimizer", UNSAVED_FIX)
        self.scaler = scaler
        self.ranks = Ranks.here()
        self.refresh()
        self.precision = dominant([param.dtype for param in self.model.parameters()])
        self._num_steps = 0
        self.optimizer.register_step_post_hook(not_compiled(self._count))

    def refresh(self) -> str:
        last, self.inventory = self.inventory, self._look()
        if self._is_saved and self.strays():
            what = "it has params that are not the model's"
            raise UnsupportedCheckpoint.at(self._where, what, "give it only the model's")
        if self.inventory == last:
            return ""
        self.params, self.tied = self.inventory.params, self.inventory.tied
        if is_adapted(self.model):  # a resume reads only the adapter, not the base model
            saved = saved_names(self.model, self.params, self.tied)
            self.params, self.tied = _check_adapter(self.model, self.params, saved), {}
        return self.inventory.differs_from(last)

    def has_stepped(self) -> bool:
        return self._num_steps > 0

    @property
    def may_skip(self) -> bool:
        return self.scaler is not None

    def has_state(self) -> bool:
        like = self._first_states()
        states = [self._state_of(name, like) for name in self._names()]
        return any(states) or (self.has_stepped() and not self._may_be_late())

    def _may_be_late(self) -> bool:
        """Return whether the optimizer is one that makes states at its first step with gradients."""
        return any(has_adams_options(group) for group in self.optimizer.param_groups)

    def _names(self) -> list[str]:
        return [name for group in self._groups for name in group]

    def optimizers(self) -> Collection[object]:
        return [self.optimizer]

    def writes_unseen(self) -> str | None:
        return None

    def fragments(self, params: Collection[str]) -> Iterator[LiveShard]:
        like = self._first_states()
        for name, begin in self._mine(params):
            yield self._fragment(name, MASTER, begin, self._live[name])
            for kind, value in with_elements(self._state_of(name, like)).items():
                yield self._fragment(name, kind, begin, value)

    def masters(self) -> Iterator[LiveShard]:
        trained = self._names_of("trainable")
        yield from (self._fragment(name, MASTER, at, self._live[name]) for name, at in self._mine(trained))

    def present(self) -> Iterator[LiveShard]:
        self.refresh()
        yield from super().present()

    def _mine(self, params: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yield the params of which this rank saves elements, and the first of these."""
        live = {name: self._live[name] for name in params}
        whole = {name: live[name].numel() for name in sorted(live) if not isinstance(live[name], DTensor)}
        shared = {*deal(whole, self.ranks.world_size)[self.ranks.rank]}
        for name, param in live.items():
            if not isinstance(param, DTensor):
                if name in shared:
                    yield name, 0
            elif _is_first_replica(param) and (begin := _first_element(param)) is not None:
                yield name, begin

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return persistent_buffers(self.model) if self.ranks.is_first else {}

    def frozen(self) -> FrozenFile | None:
        names = self._names_of("frozen")
        if any(isinstance(self._live[name], DTensor) for name in names):
            begin = {name: self._box(name) or at for name, at in self._mine(names)}
            tensors = {f"{FROZEN}/{name}": self._elements(self._live[name]) for name in begin}
            return FrozenFile(frozen_name(self.ranks.rank, self.ranks.world_size), tensors, begin)
        if not (names and self.ranks.is_first):
            return None
        return FrozenFile(frozen_name(0, 1), {name: self._live[name] for name in names})

    def trees(self) -> Mapping[str, Any]:
        if not self.ranks.is_first:
            return {}
        trees: dict[str, Any] = {OPTIMIZER: self._optimizer_tree()}
        if self.scaler is not None:
            trees[SCALER] = self.scaler.state_dict()
        return trees

    def shards(self) -> Mapping[str, Any]:
        return {"framework": FSDP} if self.is_sharded else {}  # which a composite takes the form of

    def _count(self, *_: Any) -> None:
        self._num_steps += 1

    def _first_states(self) -> dict[str, Any]:
        """Return states whose zeros a param that has had no gradient yet starts from: Adam's, if all others have these.

        Readers of the checkpoint decide by the same rule. Empty for another optimizer, and before the first step.
        """
        found = [state for name in self._names() if (state := self._saved(name))]
        options = {option for group in self.optimizer.param_groups for option in group}
        return found[0] if found and keeps_as_adam({kind for state in found for kind in state}, options) else {}

    def _state_of(self, name: str, like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a param, including ``step``; empty for one that the optimizer keeps nothing of.

        A param that has had no gradient yet has none, and gets zeros ``like`` those of others.
        """
        state, param = self._saved(name), self._live[name]
        if not state:
            zeros: dict[str, Any] = (
                {kind: torch.zeros_like(param) for kind in adams_first_kinds(self._options[name])} if like else {}
            )
            if "step" in like:
                zeros["step"] = torch.zeros_like(step) if isinstance(step := like["step"], torch.Tensor) else 0
            return zeros
        for kind, value in state.items():
            if why := why_not_storable(kind, value) or self._why_not(name, value):
                raise UnsupportedCheckpoint.at(self._where, f"its state {kind} of {name} {why}", UNSAVED_FIX)
        return state

    def _why_not(self, name: str, value: Any) -> str | None:
        """Return why a state of a param can't be saved; None if it can."""
        if not isinstance(value, torch.Tensor):
            return None if is_storable(value) else f"is neither a tensor nor a number ({type(value).__name__})"
        param = self._live[name]
        if value.dim() and isinstance(param, DTensor):
            if type(value) is not DTensor or value.shape != param.shape:
                return f"has the shape {[*value.shape]}, which can't be cut as the param is"
            if value.placements != param.placements:
                return f"is sharded as {value.placements}, the param as {param.placements}"
        if is_quantized(value):
            return None
        if not is_plain_tensor(value):
            return f"is quantized, or another form of tensor ({type(value).__name__})"
        return None if value.dtype in DTYPES else f"is {value.dtype}"

    def _optimizer_tree(self) -> dict[str, Any]:
        groups = self.optimizer.state_dict()["param_groups"]
        names = self._names() if self.has_state() else []
        numbers = [number for group in groups for number in group["params"]]
        like = self._first_states()
        states = {number: self._state_of(name, like) for number, name in zip(numbers, names, strict=False)}
        return {
            "state": {number: TensorPlaceholder.all_of(state) for number, state in states.items() if state},
            "param_groups": [
                {**self._renamed(group, names), SAVED_NAMES: list(names)}
                for group, names in zip(groups, self._groups, strict=True)
            ],
        }

    def _renamed(self, group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Return a group with the current names of its params in place of old ones: a loop may have moved params."""
        old = {key: group[key] for key in NAME_KEYS if isinstance(group.get(key), (list, tuple))}
        stale = [key for key, has in old.items() if len(has) != len(names) or not self._live.keys().isdisjoint(has)]
        return {**group, **{key: list(names) for key in stale}}


def _check_adapter(model: Any, params: Mapping[str, ParamFact], saved: Names | None) -> dict[str, ParamFact]:
    """Return the params that PEFT saves. Raises UnsupportedCheckpoint unless the file contains every trained param
    under a known name."""
    adapter = saved_adapter(model)
    if others := [name for name in model.peft_config if name != adapter]:
        what = f"a resume without DeepSpeed needs files of the adapters {', '.join(others)}, which are not written"
        raise UnsupportedCheckpoint.at(_PEFT, what, "train one adapter, or use DeepSpeed ZeRO")
    kept = {name: fact for name, fact in params.items() if saved and saved[name]}
    naming = adapter_naming(adapter)
    by_rule = {name: [*on_disk(Param(name, fact.shape, fact.role), naming)] for name, fact in kept.items()}
    if not saved or any([*saved[name]] != tensors for name, tensors in by_rule.items()):
        what = "how this kind of adapter names its params on disk is unknown"
        raise UnsupportedCheckpoint.at(_PEFT, what, "use LoRA or a variant of it, or DeepSpeed ZeRO")
    return kept


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer inside accelerate's, which is itself a torch optimizer."""
    while hasattr(optimizer, "accelerator_state"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _is_one_box(param: DTensor) -> bool:
    """Return whether what each rank has of a param is a box of it.

    `_StridedShard` says that later mesh dimensions cut the same dimension before it does, as FSDP2 does with what
    tensor parallelism has cut. Alone it says that a rank has several runs, as of a fused weight.
    """
    mesh, placements = param.device_mesh, param.placements
    for at, one in enumerate(placements):
        if type(one) in (Shard, Replicate):
            continue
        if not isinstance(one, _StridedShard):
            return False
        later = [mesh.size(more) for more in range(at + 1, mesh.ndim) if placements[more].is_shard(one.dim)]
        if one.split_factor != math.prod(later):
            return False
    return True


def _box_of(param: DTensor) -> Box:
    """Return the box of a param that this rank has."""
    sizes, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Box(tuple(offsets), tuple(sizes))


def _first_element(param: DTensor) -> int | None:
    """Return the first element that this rank has of a param; None if it has none."""
    box, first = _box_of(param), 0
    for offset, size in zip(box.offsets, param.shape, strict=True):
        first = first * size + offset
    return first if math.prod(box.sizes) else None


def _is_first_replica(param: DTensor) -> bool:
    """Return whether no rank before this one has the same elements of a param.

    The mesh of a param may be a slice of the training's. Of these slices, the one with rank 0 is the first.
    """
    place = zip(param.placements, param.device_mesh.get_coordinate() or (), strict=True)
    return all(at == 0 for how, at in place if how == Replicate()) and 0 in param.device_mesh.mesh
