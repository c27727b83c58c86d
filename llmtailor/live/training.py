"""The state of a training at a save: the interface between the saver and DeepSpeed or plain torch."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from llmtailor.checkpoint.placement import Box
from llmtailor.containers.json import is_name
from llmtailor.containers.unpickle import QUANTIZED, Call
from llmtailor.errors import UnsupportedCheckpoint, some
from llmtailor.formats.partial.manifest import ParamFact
from llmtailor.live.tensors import DTYPES, local_of
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, MODULE, WEIGHT


@dataclass(frozen=True, slots=True)
class LiveShard:
    """Elements of a state that this rank has: a one-dimensional view of a live tensor, without padding.

    A state that is not elementwise is one fragment, on one rank.
    """

    param: str
    kind: str
    begin: int
    """Index of the first element in the flattened param"""
    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None
    """Shape of a state that is not elementwise; see `checkpoint.schema`"""
    box: Box | None = None
    """The elements' box in the param, if they are not adjacent in it"""


@dataclass(frozen=True, slots=True)
class StoredElsewhere:
    """A tensor in a tree that is saved as a tensor of the named file: a buffer or frozen param."""

    file: str
    key: str


@dataclass(frozen=True, slots=True)
class TensorPlaceholder:
    """A tensor in a tree that is not saved there: its elements are in fragments or can be derived from them."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, state: Any) -> Any:
        """Return what stands for an optimizer's state in a tree: a value that is no tensor stays."""
        return cls(state.dtype, tuple(state.shape)) if isinstance(state, torch.Tensor) else state

    @classmethod
    def all_of(cls, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return what stands for all states of a param, or of a flat tensor: single values stay, and of quantized
        tensors what is not an inner tensor."""
        large = with_elements(states)
        return {
            kind: cls._quantized(value) if is_quantized(value) else cls.of(value) if kind in large else value
            for kind, value in states.items()
        }

    @classmethod
    def _quantized(cls, value: Any) -> Call:
        func, (rebuild, kind, args, attributes) = value.__reduce_ex__(2)[:2]
        return Call(func, (rebuild, kind, args, {name: cls.of(one) for name, one in attributes.items()}))


@dataclass(slots=True)
class Constant:
    """A value in a tree that is the same at every save, without tensors."""

    value: Any
    json: Any = None
    """The value encoded, once that was needed"""


@dataclass(frozen=True, slots=True)
class FrozenFile:
    """The frozen params that a rank saves: a file of their own, which stays the same."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    """By the keys of the file"""
    begin: Mapping[str, int | Box] = field(default_factory=dict)
    """Under FSDP: param -> the first element, or the box, that this rank has of it"""


class HasState(Protocol):
    """A scheduler or GradScaler of any library."""

    def state_dict(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingObjects:
    """What a program holds of a training: an engine, or a model with its optimizer, and what is attested beside."""

    engine: Any = None
    """A DeepSpeedEngine"""
    model: torch.nn.Module | None = None
    optimizer: Any = None
    scheduler: HasState | None = None
    scaler: HasState | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Persistent buffers as they were before a forward pass, which may change them, if there was one"""
    not_compared: Sequence[str] = ()
    """Types of objects whose states are saved and loaded along"""
    trainer: Any = None
    """A Trainer of transformers, whose arguments and log say more of the schedule than its state"""

    @property
    def own_scheduler(self) -> HasState | None:
        """The scheduler, unless DeepSpeed saves it in the model states"""
        is_engines = self.engine is not None and self.scheduler is self.engine.lr_scheduler
        return None if is_engines else self.scheduler


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a save needs to know of a live model: it is made again at each save, and compared with the last one."""

    params: Mapping[str, ParamFact] = field(default_factory=dict)
    """Params and persistent buffers, in the order of the model; under ZeRO-3 with the shapes before partitioning"""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Additional name of a param or buffer -> the name that it is stored under"""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Trained param whose memory is also that of another param or buffer, by other means than ``tied`` -> the other"""
    groups: Sequence[Sequence[str]] = ()
    """The params of each param group of the optimizer"""

    @classmethod
    def of(cls, model: torch.nn.Module, groups: Sequence[Sequence[str]]) -> Inventory:
        """Raises UnsupportedCheckpoint for a dtype that safetensors files don't have."""
        trained = {name for group in groups for name in group}
        params = describe(model, trained)
        overlaps = find_overlaps({**dict(model.named_parameters()), **persistent_buffers(model)})
        return cls(params, tied_names(model), {a: b for a, b in overlaps.items() if a in trained}, groups)

    def differs_from(self, last: Inventory) -> str:
        """Return how it differs from an earlier one, for a message; empty if it does not."""
        both = [name for name in self.params if name in last.params]
        unlike = {
            "new": [name for name in self.params if name not in last.params],
            "gone": [name for name in last.params if name not in self.params],
            "another shape, dtype or role": [name for name in both if self.params[name] != last.params[name]],
            "tied otherwise": sorted({name for name, _ in self.tied.items() ^ last.tied.items()}),
            "sharing memory otherwise": sorted({name for name, _ in self.shared.items() ^ last.shared.items()}),
        }
        texts = [f"{what}: {some(names)}" for what, names in unlike.items() if names]
        return "; ".join(texts) or ("param groups" if self != last else "")


class Pretrained(Protocol):
    """A tokenizer, processor or config of transformers, or anything that saves itself into a folder."""

    def save_pretrained(self, save_directory: Path, /) -> object: ...


class Training(Protocol):
    """A live training, between two optimizer steps."""

    model: torch.nn.Module
    """The user's model, unwrapped"""
    stage: int
    """ZeRO stage, or 0 without DeepSpeed"""
    precision: torch.dtype
    """Dtype of the weights in the forward pass"""
    rounds_masters: bool
    """Whether these are masters rounded to ``precision``, and not the masters themselves"""
    inventory: Inventory
    params: Mapping[str, ParamFact]
    """Params and persistent buffers, in the order of the model; without what PEFT does not save"""
    tied: Mapping[str, str]

    @property
    def tag(self) -> str:
        """DeepSpeed's name for the checkpoint of this step."""

    @property
    def may_skip(self) -> bool:
        """Whether a step of the training may leave out the optimizer's: fp16 training does, if gradients overflow."""

    def refresh(self) -> str:
        """Look at the model and the optimizer again; return what has changed of the `Inventory` since the last call.

        Raises UnsupportedCheckpoint for a change that can't be saved.
        """

    def has_state(self) -> bool:
        """Return whether the optimizer has made its states. Raises UnsupportedCheckpoint if they can't be saved."""

    def has_stepped(self) -> bool:
        """Return whether the optimizer has made a step since this object was created."""

    def optimizers(self) -> Collection[object]:
        """Return torch's optimizers that write the states."""

    def writes_unseen(self) -> str | None:
        """Return why states may be written outside the steps of `optimizers`; None if they are not."""

    def fragments(self, params: Collection[str]) -> Iterator[LiveShard]:
        """Yield this rank's fragments of these params. Without DeepSpeed the params are divided among the ranks."""

    def masters(self) -> Iterator[LiveShard]:
        """Yield this rank's fragments of all masters; each element is on one rank."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers that this rank saves."""

    def frozen(self) -> FrozenFile | None:
        """Return the file of the frozen params, or of this rank's elements of them; None if this rank saves none."""

    def trees(self) -> Mapping[str, Any]:
        """Return the object trees of the stock files that this rank would write, with large tensors replaced."""

    def shards(self) -> Mapping[str, Any]:
        """Return the stock names of the shard files of all ranks; see `formats.partial.manifest.Manifest`."""

    def present(self) -> Iterator[LiveShard]:
        """Yield all that this rank has: states of trained params, frozen params and buffers, also where other ranks
        have copies of the same. What the optimizer has no state of is left out."""

    def weight_of(self, master: LiveShard) -> torch.Tensor | None:
        """Return the weight of the forward pass at the elements of a master, if it is a tensor of its own."""

    def copies(self) -> Iterator[LiveShard]:
        """Yield the weights of the forward pass that every rank has whole, if they are not the masters themselves."""

    def strays(self) -> int:
        """Return the number of params that the optimizer updates and the model does not have: it has others in their
        place, which are never updated."""

    def steps(self) -> Mapping[str, float | None]:
        """Return the optimizer's step of the trained params of which this rank has states; None for one without."""

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the optimizer's states of the trained params of which this rank has elements, or those of the flat
        tensor that a param is in."""

    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        """Return the params and the hyperparameters of each param group of the live optimizer."""


def rng_tree() -> dict[str, Any]:
    """Return this process's random number states, as the Trainer saves them in ``rng_state.pth``."""
    tree: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        tree["cuda"] = torch.cuda.random.get_rng_state_all() if distributed else torch.cuda.random.get_rng_state()
    return tree


def describe(model: torch.nn.Module, trained: Collection[str]) -> dict[str, ParamFact]:
    """Describe the params and persistent buffers of a model; under ZeRO-3 with the shapes before partitioning.

    Raises UnsupportedCheckpoint for a dtype that safetensors files don't have, and for names that are not printable.
    """
    facts = {}
    named = (*model.named_parameters(), *persistent_buffers(model).items())
    if unprintable := [name for name, _ in named if not is_name(name)]:
        what = f"names of params or buffers are not printable text: {some(map(repr, unprintable))}"
        raise UnsupportedCheckpoint.at("the model", what, "give them names without tabs and other control characters")
    for name, param in model.named_parameters():
        shape = tuple(getattr(param, "ds_shape", param.shape))
        facts[name] = ParamFact(shape, "trainable" if name in trained else "frozen", _dtype_name(name, param))
    for name, buffer in persistent_buffers(model).items():
        facts[name] = ParamFact(tuple(buffer.shape), "buffer", _dtype_name(name, buffer))
    return facts


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise UnsupportedCheckpoint.at(name, f"its dtype {tensor.dtype} can't be saved", "use a dtype such as bfloat16")
    return DTYPES[tensor.dtype]


def with_elements(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among the states of a param that are saved by element: not the step, and not those without
    dimensions if others have some; of quantized tensors the inner ones."""
    tensors: dict[str, torch.Tensor] = {}
    for kind, one in states.items():
        if is_quantized(one):
            tensors |= {f"{kind}.{name}": getattr(one, name) for name in one.__tensor_flatten__()[0]}
        elif kind != "step" and isinstance(one, torch.Tensor):
            tensors[kind] = one
    has_dims = any(one.dim() for one in tensors.values())
    return {kind: one for kind, one in tensors.items() if one.dim() or not has_dims}


_RESERVED = {MASTER, WEIGHT, MODULE, FROZEN, BUFFER, "tree", "padding"}


def why_not_storable(kind: object, value: object) -> str | None:
    """Return why no checkpoint can hold a state of this name beside llmtailor's own kinds; None if it can."""
    if kind == "step" and isinstance(value, torch.Tensor) and value.numel() != 1:
        return "is not a single number: give it another name"
    if not isinstance(kind, str) or not kind or "/" in kind or not kind.isprintable():
        return "has a name that can't be saved: it must be printable text without a slash"
    return "has a name that llmtailor uses for something else: give it another name" if kind in _RESERVED else None


def is_quantized(value: Any) -> bool:
    """Return whether a state is a tensor of torchao's with inner tensors."""
    return type(value).__name__ in QUANTIZED.get(type(value).__module__, ())


def is_plain_tensor(value: Any) -> bool:
    """Return whether a state is a tensor whose elements are what it stores.

    A quantized state, such as torchao's, is a tensor subclass with codes and scales inside, which claims the param's
    shape and dtype.
    """
    return type(local_of(value)) in (torch.Tensor, torch.nn.Parameter)


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model's state dict, each by its first name there."""
    tied = tied_names(model)
    return {name: buffer for name, buffer in _buffers_by_name(model) if name not in tied}


def _buffers_by_name(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    yield from (one for one in model.named_buffers(remove_duplicate=False) if one[0] not in transient)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the additional names of params and persistent buffers, and the names they are stored under."""
    first: dict[int, str] = {}
    tied = {}
    with_elements = (one for one in _buffers_by_name(model) if one[1].numel())  # as safetensors sees it
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *with_elements):
        stored = first.setdefault(id(tensor), name)
        if stored != name:
            tied[name] = stored
    return tied


def find_overlaps(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return each tensor that has bytes of memory in common with another one, and the name of such another one.

    Of a tensor with gaps between its elements, the bytes in the gaps count, too.
    """
    spans = []
    for name, tensor in tensors.items():
        local: Any = local_of(tensor)
        if is_traceable_wrapper_subclass(local):  # quantized, without memory of its own
            continue
        if local.numel() and local.layout == torch.strided and (begin := local.data_ptr()):
            steps = zip(local.shape, local.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            spans.append((str(local.device), begin, begin + (last + 1) * local.element_size(), name))
    overlaps: dict[str, str] = {}
    reaching = ("", 0, 0, "")
    """The one of those before that ends last"""
    for span in sorted(spans):
        device, begin, end, name = span
        if device == reaching[0] and begin < reaching[2]:
            overlaps[name] = reaching[3]
            overlaps.setdefault(reaching[3], name)
        if device != reaching[0] or end > reaching[2]:
            reaching = span
    return overlaps


def dominant(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the most frequent of the dtypes that weights are trained in."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return max(known, key=dtypes.count)
