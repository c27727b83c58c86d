"""A training under DeepSpeed ZeRO: where this process keeps its states.

The trees are what ``DeepSpeedEngine.save_checkpoint`` would pickle (0.19.8). The cutting rules are those of the files,
which consist of these tensors: see `formats.deepspeed.read`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from llmtailor.checkpoint.index import DEEPSPEED
from llmtailor.checkpoint.optimizer import OverlappingParams, Slices, Vector, slice_on
from llmtailor.errors import Problem, UnsupportedCheckpoint, counted, some
from llmtailor.formats.deepspeed.files import STATE_KEYS, describe_shards
from llmtailor.formats.optimizer_objects import flattened, is_storable, unsupported
from llmtailor.formats.partial.manifest import ParamFact, bundle_name, frozen_name
from llmtailor.frameworks.framework import FRAMEWORKS, Framework
from llmtailor.frameworks.stock_fields import has_adams_options, is_muons
from llmtailor.live.model import is_adapted
from llmtailor.live.tensors import DTYPES
from llmtailor.live.training import (
    Constant,
    FrozenFile,
    Inventory,
    LiveShard,
    StoredElsewhere,
    TensorPlaceholder,
    is_plain_tensor,
    persistent_buffers,
    why_not_storable,
    with_elements,
)
from llmtailor.model.roles import BUFFER, FROZEN, MASTER
from llmtailor.ranks.team import Ranks

_WHERE = "DeepSpeed"
_AT_START = "give the model all of its params before deepspeed.initialize, and keep them"
_ELEMENTWISE = "use an optimizer with elementwise states, such as AdamW, Muon or Lion, or train without DeepSpeed"


class ZeroTraining:
    """Implements `live.training.Training` for a DeepSpeedEngine.

    Raises UnsupportedCheckpoint for what it can't save.
    """

    inventory = Inventory()

    def __init__(self, engine: Any, framework: Framework = FRAMEWORKS[DEEPSPEED], *, is_saved: bool = True) -> None:
        self.engine = engine
        self._is_saved = is_saved
        self.framework = framework
        self.zero = engine.optimizer
        self.stage = int(engine.zero_optimization_stage())
        self._keys = STATE_KEYS[self.stage == 3]
        self.ranks = Ranks.here()
        refuse(engine)
        self.precision: torch.dtype = engine.get_model_dtype() if hasattr(engine, "get_model_dtype") else _dtype(engine)
        self.rounds_masters = self.precision != torch.float32
        self.model: torch.nn.Module = engine.module
        self._shapes: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in shapes.items()} for shapes in engine._get_zero_param_shapes()
        ]
        # the Trainer saves no frozen params of a model wrapped by PEFT
        self.has_frozen = not is_adapted(self.model)
        self.refresh()

        own = (self.ranks.rank, self.ranks.world_size)
        self._frozen_file = frozen_name(*own) if self.stage == 3 else frozen_name(0, 1)
        self._steps_before: int = engine.global_steps - engine.skipped_steps

    @property
    def tag(self) -> str:
        return self.framework.default_tag.format(self.engine.global_steps)

    may_skip = True

    def refresh(self) -> str:
        """DeepSpeed lays out its flat tensors once, but frozen params and buffers may change."""
        inventory, last = Inventory.of(self.model, [[*shapes] for shapes in self._shapes]), self.inventory
        if inventory == last:
            return ""
        if self._is_saved:
            self._check(inventory)
        self.inventory = inventory
        self.params: Mapping[str, ParamFact] = {
            name: fact for name, fact in inventory.params.items() if self.has_frozen or fact.role != "frozen"
        }
        self.tied: Mapping[str, str] = {
            name: stored for name, stored in inventory.tied.items() if stored in self.params
        }
        self._buffers = [*persistent_buffers(self.model)]
        for cached in ("_named", "_about_model"):
            self.__dict__.pop(cached, None)
        return inventory.differs_from(last)

    def _check(self, inventory: Inventory) -> None:
        """Raise UnsupportedCheckpoint for params that DeepSpeed does not train or partition as it did at its start."""
        problems = []
        if number := self.strays():
            problems.append(
                Problem(_WHERE, f"it trains {counted(number, 'param')} that the model has replaced", _AT_START)
            )
        if gone := [name for shapes in self._shapes for name in shapes if name not in inventory.params]:
            problems.append(Problem(_WHERE, f"it trains {some(gone)}, which the model no longer has", _AT_START))
        unlike = [
            f"{name} {list(inventory.params[name].shape)} instead of {list(shape)}"
            for shapes in self._shapes
            for name, shape in shapes.items()
            if name in inventory.params and inventory.params[name].shape != tuple(shape)
        ]
        if unlike:
            problems.append(Problem(_WHERE, f"it trains other shapes than the model has: {some(unlike)}", _AT_START))
        late = [name for name, param in self.model.named_parameters() if not hasattr(param, "ds_id")]
        if self.stage == 3 and late:
            problems.append(
                Problem(_WHERE, f"it does not partition {some(late)}, which came after its start", _AT_START)
            )
        if problems:
            raise UnsupportedCheckpoint(problems)

    def has_stepped(self) -> bool:
        return bool(self.engine.global_steps - self.engine.skipped_steps > self._steps_before)

    def has_state(self) -> bool:
        has_states = any(flat.keys() - {MASTER} for flat in self._flats(self.zero.state_dict()))
        groups = self.zero.optimizer.param_groups
        return has_states or (self.has_stepped() and not any(has_adams_options(group) for group in groups))

    def optimizers(self) -> Collection[object]:
        # ZeRO-3 steps what a partial offload leaves on the GPU with a second optimizer
        found = (self.zero.optimizer, getattr(self.zero, "backup_optimizer", None))
        return [one for one in found if one is not None]

    def writes_unseen(self) -> str | None:
        return writes_unseen(self.engine, self.optimizers())

    def fragments(self, params: Collection[str]) -> Iterator[LiveShard]:
        yield from self._fragments(self._flats(self.zero.state_dict()), set(params))

    def masters(self) -> Iterator[LiveShard]:
        flats = [{MASTER: kinds[MASTER]} for kinds in self._flats(self.zero.state_dict())]
        yield from self._fragments(flats, self.params.keys())

    def present(self) -> Iterator[LiveShard]:
        self.refresh()
        yield from self.fragments(self.params)
        params = self._named
        for name, fact in self.params.items():
            if fact.role == "buffer":
                yield LiveShard(name, BUFFER, 0, self.model.get_buffer(name).detach().reshape(-1))
            elif fact.role == "frozen":
                begin, numel = _share(params[name], self.ranks)
                if numel:
                    yield LiveShard(name, FROZEN, begin, _elements(params[name])[:numel])

    def weight_of(self, master: LiveShard) -> torch.Tensor | None:
        param = self._named.get(master.param)
        if param is None:
            return None
        begin = master.begin - _share(param, self.ranks)[0]
        return _elements(param)[begin : begin + master.tensor.numel()]

    @cached_property
    def _named(self) -> dict[str, Any]:
        return dict(self.model.named_parameters())

    def strays(self) -> int:
        present = {*self.model.parameters()}
        names = {name for param, name in self.engine.param_names.items() if param not in present}
        return sum(name in names for shapes in self._shapes for name in shapes)

    def copies(self) -> Iterator[LiveShard]:
        for name, fact in self.params.items():
            if fact.role == "trainable" and _is_whole(param := self._named[name]):
                yield LiveShard(name, MASTER, 0, _elements(param))

    def steps(self) -> Mapping[str, float | None]:
        inner = self.zero.state_dict()[self._keys[1]]
        groups, found = self._group_of_flat, dict[str, float | None]()
        for flat_id, shapes in enumerate(self._shapes):
            group = inner.get("param_groups", ({},))[groups[flat_id]] if inner.get("param_groups") else {}
            step = inner["state"].get(flat_id, {}).get("step", group.get("step"))
            found |= dict.fromkeys(shapes, None if step is None else float(step))
        return found

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        states, found = self.zero.state_dict()[self._keys[1]]["state"], dict[str, Mapping[str, Any]]()
        for flat_id, shapes in enumerate(self._shapes):
            known = flattened(states.get(flat_id, {}))
            found |= dict.fromkeys(shapes, known)
        return found

    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        live = self.zero.optimizer.param_groups
        names: list[list[str]] = [[] for _ in live]
        for flat_id, shapes in enumerate(self._shapes):
            names[self._group_of_flat[flat_id]] += shapes
        return list(zip(names, live, strict=True))

    @property
    def _group_of_flat(self) -> Sequence[int] | Mapping[int, int]:
        """Flat tensor -> its param group: sub-groups of ZeRO-3 belong to one"""
        found: Mapping[int, int] | None = getattr(self.zero, "sub_group_to_group_id", None)
        return found if self.stage == 3 and found else range(len(self._shapes))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        # ZeRO-1/2 saves only rank 0's
        names = self._buffers if self.stage == 3 or self.ranks.is_first else ()
        return {name: self.model.get_buffer(name) for name in names}

    def frozen(self) -> FrozenFile | None:
        names = [name for name, fact in self.params.items() if fact.role == "frozen"]
        if not names or (self.stage < 3 and not self.ranks.is_first):
            return None
        params = self._named
        tensors = {name: params[name].ds_tensor if self.stage == 3 else params[name] for name in names}
        return FrozenFile(self._frozen_file, tensors)

    def trees(self) -> Mapping[str, Any]:
        shards, rank = self.shards(), self.ranks.rank
        trees = {shards["optim"][rank]: self._optim_tree()}
        if self.stage == 3 or self.ranks.is_first:
            trees[shards["model"][rank]] = self._model_tree()
        return trees

    def shards(self) -> Mapping[str, Any]:
        return describe_shards(self.tag, self.stage, self.ranks.world_size, DTYPES[self.precision])

    def _flats(self, saved: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Return this rank's flat tensors by kind, for each sub-group (ZeRO-3) or param group."""
        masters, inner = self._keys
        states, flats = saved[inner]["state"], []
        for flat_id, master in enumerate(saved[masters]):
            known = flattened(states.get(flat_id, {}))
            kinds = with_elements(known)
            for kind, value in known.items():
                if why := why_not_storable(kind, value):
                    raise UnsupportedCheckpoint.at(_WHERE, f"the optimizer's state {kind} {why}", _ELEMENTWISE)
                is_flat = kind not in kinds or (
                    is_plain_tensor(value) and value.is_floating_point() and value.numel() >= master.numel()
                )
                if not is_flat or not (isinstance(value, torch.Tensor) or is_storable(value)):
                    optimizer = type(self.zero.optimizer).__name__
                    what = (
                        f"the state {kind} of the optimizer {optimizer} is not one value for each element of the "
                        "params, which DeepSpeed joins and cuts anywhere"
                    )
                    raise UnsupportedCheckpoint.at(_WHERE, what, _ELEMENTWISE)
            flats.append({kind: flat.detach() for kind, flat in {MASTER: master, **kinds}.items()})
        return flats

    def _fragments(self, flats: Sequence[Mapping[str, torch.Tensor]], wanted: Collection[str]) -> Iterator[LiveShard]:
        rank, world_size = self.ranks.rank, self.ranks.world_size
        gaps = getattr(self.zero, "round_robin_bit16_padding", None)
        for flat_id, (shapes, kinds) in enumerate(zip(self._shapes, flats, strict=True)):
            numels = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
            hyper = self.zero.optimizer.param_groups[self._group_of_flat[flat_id]]
            vector = Vector.of(numels, gaps[flat_id] if gaps else (), world_size)
            is_cut = self.stage == 3 or getattr(self.zero, "cpu_offload", False)  # also Muon's momentum
            whole = {} if is_cut else {param: at for param, _, _, at in OverlappingParams(vector).on_rank(rank)}
            for param, begin, end, offset in (Slices(numels, world_size) if self.stage == 3 else vector).on_rank(rank):
                for kind, flat in kinds.items() if param in wanted else ():
                    at = whole[param] + begin if whole and is_muons(hyper, kind) else offset
                    yield LiveShard(param, kind, begin, flat[at : at + end - begin])

    def _optim_tree(self) -> dict[str, Any]:
        outer = dict(self.zero.state_dict())
        outer.pop("param_slice_mappings", None)  # follows from the layout, and is wrong under round_robin_gradients
        masters, inner = self._keys
        outer[masters] = [TensorPlaceholder.of(flat) for flat in outer[masters]]
        states = {
            flat_id: TensorPlaceholder.all_of(flattened(kinds)) for flat_id, kinds in outer[inner]["state"].items()
        }
        outer[inner] = {**outer[inner], "state": states}
        return {"optimizer_state_dict": outer, "ds_config": self.engine.config, "ds_version": _version()}

    def _model_tree(self) -> dict[str, Any]:
        engine = self.engine
        loader = engine.training_dataloader if engine.curriculum_learning_enabled() else None
        return {
            **self._about_model,
            "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "data_sampler": loader.data_sampler.state_dict() if loader is not None else None,
            "random_ltd": None,
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "dp_world_size": self.ranks.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": engine.config,
            "ds_version": _version(),
        }

    @cached_property
    def _about_model(self) -> dict[str, Any]:
        """What follows from the model alone; collecting it takes longer than everything else of a save."""
        engine = self.engine
        frozen = {name: fact for name, fact in self.params.items() if fact.role == "frozen"}
        fragments, shapes = None, None
        if self.stage >= 2 and self.has_frozen:  # as DeepSpeed does; ZeRO-1 stores them in `module` only
            fragments = Constant(OrderedDict((name, StoredElsewhere(self._frozen_file, name)) for name in frozen))
            shapes = Constant(OrderedDict((name, torch.Size(fact.shape)) for name, fact in frozen.items()))
        again = [name for name, stored in self.tied.items() if stored in self._buffers]
        return {
            "module": Constant(self._module()),
            "buffer_names": [*dict.fromkeys((*engine._get_buffer_names(), *self._buffers, *again))],
            "optimizer": None,
            "param_shapes": [
                Constant(OrderedDict((name, torch.Size(shape)) for name, shape in group.items()))
                for group in self._shapes
            ],
            "frozen_param_shapes": shapes,
            # DeepSpeed passes over a module that is registered a second time; its state dict has it by both names
            "shared_params": {**engine._get_shared_params(), **(self.tied if self.ranks.is_first else {})},
            "frozen_param_fragments": fragments,
        }

    def _module(self) -> OrderedDict[str, Any]:
        """Return the model's state dict without the values of trained params."""
        state, bundle = self.model.state_dict(), bundle_name(self.ranks.rank, self.ranks.world_size)
        module: OrderedDict[str, Any] = OrderedDict()
        for name, tensor in state.items():
            stored = self.tied.get(name, name)
            fact = self.params.get(stored)
            if fact is None and stored not in self._buffers:  # PEFT leaves out what is frozen
                continue
            if stored in self._buffers:
                module[name] = StoredElsewhere(bundle, f"{BUFFER}/{stored}")
            elif self.stage < 3 and fact is not None and fact.role == "frozen":
                module[name] = StoredElsewhere(self._frozen_file, stored)
            else:
                module[name] = TensorPlaceholder(tensor.dtype, (0,) if self.stage == 3 else tuple(tensor.shape))
        if hasattr(state, "_metadata"):
            module._metadata = state._metadata  # type: ignore[attr-defined]
        return module


def _is_whole(param: Any) -> bool:
    """Return whether a rank has all of a param: below stage 3 always, there if it is small enough to persist, and if
    it was put into the model since. The forward pass then uses that, not the share of each rank."""
    return not hasattr(param, "ds_tensor") or param.ds_status.name == "AVAILABLE"


def _share(param: Any, ranks: Ranks) -> tuple[int, int]:
    """Return the first element that this rank has of a param outside the optimizer, and how many."""
    if _is_whole(param):
        return 0, param.numel()
    begin, end = slice_on(ranks.rank, param.ds_numel, ranks.world_size)
    return begin, end - begin


def _elements(param: Any) -> torch.Tensor:
    tensor: torch.Tensor = param if _is_whole(param) else param.ds_tensor
    return tensor.detach().reshape(-1)


def writes_unseen(engine: Any, optimizers: Collection[object]) -> str | None:
    """Return why an engine may write its states outside the steps of its optimizers; None if it does not."""
    offload = (engine.config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    signs = [
        (getattr(engine.optimizer, "zenflow", False), "ZenFlow updates states in another process"),
        (offload.get("super_offload"), "SuperOffload updates states in another process"),
        (
            not all(isinstance(one, torch.optim.Optimizer) for one in optimizers),
            "the optimizer is not a torch.optim.Optimizer",
        ),
    ]
    return next((why for is_so, why in signs if is_so), None)


def refuse(engine: Any) -> None:
    """Raise UnsupportedCheckpoint, with every reason, for a training whose states not only ZeRO partitions."""
    zero_config = engine.config.get("zero_optimization") or {}
    offload = [zero_config.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    signs = [
        (engine.zero_optimization_stage() < 1, "ZeRO stage 0", "set zero_optimization.stage to 1, 2 or 3"),
        (any(one.get("device") == "nvme" for one in offload), "states on NVMe", "offload to the CPU"),
        (engine.mp_world_size > 1, "tensor parallelism", "train data-parallel"),
        (bool(getattr(engine, "has_moe_layers", False)), "DeepSpeed's expert parallelism", "use plain expert params"),
        ((zero_config.get("mics_shard_size") or -1) > 0, "MiCS sharding", "train without mics_shard_size"),
        (bool(zero_config.get("elastic_checkpoint")), "elastic_checkpoint", "turn it off"),
        (bool(engine.random_ltd_enabled()), "random layerwise token dropping", "train without random_ltd"),
        (Ranks.here().world_size != engine.dp_world_size, "ranks that are not data-parallel", "train data-parallel"),
    ]
    problems = [Problem(_WHERE, f"{what} can't be saved in parts", fix) for is_so, what, fix in signs if is_so]
    if problem := unsupported(type(getattr(engine.optimizer, "optimizer", None))):
        problems.append(problem)
    if problems:
        raise UnsupportedCheckpoint(problems)


def _dtype(engine: Any) -> torch.dtype:
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32


def _version() -> str:
    import deepspeed

    return str(deepspeed.__version__)
