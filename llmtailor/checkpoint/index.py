"""What a checkpoint contains and where, and the state of its training, without any tensor data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.optimizer import OptimizerLayout, ParamGroup, SubGroup, ZeroSettings
from llmtailor.checkpoint.placement import Absent, AllZero, Boxes, Bundled, Extent, Placement, Runs, Sliced, count
from llmtailor.checkpoint.tensor_parallel import TensorParallel
from llmtailor.errors import Problems
from llmtailor.findings import Finding
from llmtailor.model.dtypes import D24, ITEMSIZE, size_of
from llmtailor.model.parts import Param, Part, SavedAs, step_of
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.local import FileFact

DEEPSPEED, UNIVERSAL, TRAINER, FSDP, DCP, VERL = "deepspeed", "universal", "trainer", "fsdp", "dcp", "verl"
MEGATRON = "megatron"
"""Formats, as ``--to`` calls them: a ZeRO run of the Trainer, DeepSpeed's universal checkpoint of one, the Trainer's
run without DeepSpeed and FSDP, its FSDP run, any loop that saves with torch.distributed.checkpoint, verl's FSDP2 run,
and Megatron-core"""
ACCELERATE, LIGHTNING = "accelerate", "lightning"
"""Frameworks that resume, as ``--for`` and ``--layout`` call them, beside those that are called like their formats:
`TRAINER`, `DEEPSPEED`, `DCP`, `VERL` and `MEGATRON`; see `frameworks.framework`"""


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """A value in a folder of torch.distributed.checkpoint that belongs neither to the model nor to the optimizer."""

    path: tuple[str | int, ...]
    """The keys and positions that lead to it in nested dicts and lists"""
    content: Any
    """The decoded object; for a tensor, ``(dtype, shape, boxes)``, each box with its offsets, sizes and extent"""
    is_tensor: bool = False


FOLDERS, SHARDS, FULL, RANKS = "folders", "shards", "whole", "ranks"
"""Forms of FSDP checkpoints: model and optimizer in a DCP folder each; the weights in safetensors files of each rank
instead; both in one torch file each; both in one torch file of each rank"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """The mesh of ranks that cut the tensors of a checkpoint of the form `RANKS`."""

    device: str
    """``cuda`` or ``cpu``"""
    names: tuple[str, ...]
    shape: tuple[int, ...]
    cuts: tuple[int | None, ...]
    """For each dimension of the mesh, the dimension of the tensors that it cuts; None if it repeats them"""
    groups: tuple[tuple[str, ...], ...]
    """The names of the process groups of each rank"""
    fields: frozenset[str]
    """What the version of torch that saved it writes of a mesh, without the next"""
    preserves_order: bool | None
    """``_preserve_rank_order`` of torch 2.15; None where a version before it saved the mesh"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpKeyLayout:
    """How a folder of torch.distributed.checkpoint names and arranges its values."""

    model: tuple[str | int, ...]
    """What the paths of the model's values begin with, e.g. ``model``; empty if they begin with the param's name"""
    optimizer: tuple[str | int, ...]
    """The same for the optimizer's, e.g. ``app``, ``optim``"""
    is_flat: bool = False
    """Whether options of param groups are stored per param (``flatten_optimizer_state_dict``), so that no groups are
    known"""
    form: str = FOLDERS
    """Of an FSDP checkpoint: ``FOLDERS``, ``SHARDS``, ``FULL`` or ``RANKS``"""
    others: Mapping[str, DcpEntry] = field(default_factory=dict)
    """Everything else, by key: schedulers, counters, data loaders"""
    mesh: RankMesh | None = None
    """Of the form `RANKS`"""
    owned: tuple[tuple[str, ...], ...] = ()
    """verl: the params of each group in its order, also those without states"""

    @property
    def root(self) -> tuple[str | int, ...]:
        """What the paths of all values of the training begin with, e.g. ``app``"""
        return self.optimizer[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """What a checkpoint of Megatron-core holds, by Megatron's own keys."""

    common: Mapping[str, Any]
    """``common.pt``, without what may not be written back"""
    groups: int
    """Of queries, each with a key and a value"""
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Extent]
    """Pickles, such as random states"""
    written: Mapping[tuple[str, str], str]
    """Kind of state, and key of the weight -> key of the state"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The state of a training besides its tensors, in any format."""

    step_is_tensor: bool = True
    """torch's AdamW keeps ``step`` as a 0-dim fp32 tensor, DeepSpeedCPUAdam as an int."""
    model_order: tuple[str, ...] = ()
    """Names of the model's params, in the model's order; other names may occur among them. Empty if only the model's
    code defines the order."""
    trees: Mapping[str, Any] = field(default_factory=dict)
    """Name of a stock file in the root -> its content: the scheduler's state, the loss scale, random number states"""
    step_dtype: str = "F32"
    """Of a step that is a tensor, in a torch optimizer's state dict"""
    unclear: frozenset[str] = frozenset()
    """Tensors that are listed as frozen params, but may be buffers"""


@dataclass(frozen=True, slots=True)
class EngineTrees:
    """What DeepSpeed's files hold besides states, params and buffers; None for a file that can't be used."""

    optim: tuple[Mapping[str, Any] | None, ...] = ()
    """Each rank's ``optim_states``"""
    model: tuple[Mapping[str, Any] | None, ...] = ()
    """The ``model_states``, of each rank or of all"""

    @property
    def ds_config(self) -> Mapping[str, Any]:
        config = next((tree.get("ds_config") for tree in self.optim if tree), None)
        return config if isinstance(config, dict) else {}

    @property
    def scheduler(self) -> Any:
        """The state of the scheduler in the model states, if there is one"""
        return next((tree.get("lr_scheduler") for tree in self.model if tree), None)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A state's dtype and shape, and where the checkpoint stores its elements."""

    dtype: str
    """A safetensors dtype name, e.g. ``BF16``."""
    shape: tuple[int, ...]
    place: Placement
    rounded_from: str | None = None
    """The dtype in training, if the state was rounded when it was saved"""

    @property
    def stored_as(self) -> str:
        """The dtype, or how the elements are encoded: one of `dtypes.BLOCKS`"""
        return (self.place.encoded if isinstance(self.place, (Bundled, Boxes)) else "") or self.dtype

    @property
    def live_dtype(self) -> str:
        """The dtype in training"""
        return self.rounded_from or self.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in the file, without any padding."""
        if self.stored_as == D24 and isinstance(self.place, (Bundled, Boxes)):
            return self.place.framed_bytes
        return size_of(self.stored_as, self.numel)

    @property
    def held_bytes(self) -> int:
        """Size of the elements that the checkpoint holds"""
        return sum(size_of(self.stored_as, end - begin) for begin, end in self.runs)

    @property
    def is_here(self) -> bool:
        """Whether the checkpoint holds it, or some of it; False for what a partial checkpoint left out."""
        return not isinstance(self.place, Absent)

    @property
    def is_all_zero(self) -> bool:
        """Whether no file holds it, because all elements are zero."""
        return isinstance(self.place, AllZero)

    @property
    def runs(self) -> Runs:
        """The elements that the checkpoint holds. A partial one may hold some experts of a fused param."""
        if isinstance(self.place, Bundled):
            return self.place.runs
        return ((0, self.numel),) if self.is_here and self.numel else ()

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint holds all of it"""
        return count(self.runs) == self.numel if isinstance(self.place, Bundled) and self.place.ends else self.is_here


def buffer_on_ranks(dtype: str, shape: tuple[int, ...], copies: tuple[Extent, ...]) -> TensorEntry:
    """Return the entry of a buffer, of which each rank has one of these copies."""
    place = Sliced(copies, 0, math.prod(shape), ITEMSIZE[dtype])
    return TensorEntry(dtype, (len(copies), *shape), place)


PLAIN, BF16_OPTIMIZER, ELASTIC = "plain", "bf16_optimizer", "elastic"
"""Variants; the others are special forms of ZeRO-1/2"""
FILES, PARTIAL = "files", "partial"
"""Containers: the framework's own files, or those of llmtailor's saves"""


@dataclass(frozen=True, slots=True)
class Form:
    """What kind of checkpoint it is."""

    format: str
    """That of its run's full checkpoints, as ``--to`` calls it"""
    stage: int = 0
    """ZeRO stage, of a universal checkpoint that of the run that saved it; 0 without DeepSpeed"""
    variant: str = PLAIN
    container: str = FILES

    @property
    def is_partial(self) -> bool:
        """Whether the training-side saver wrote it, with or without every part."""
        return self.container == PARTIAL

    @property
    def file_format(self) -> str:
        """That of its files; a partial checkpoint has the object trees of DeepSpeed's or of the Trainer's."""
        if not self.is_partial:
            return self.format
        return DEEPSPEED if self.stage else TRAINER

    @property
    def has_masters(self) -> bool:
        """Whether there are masters in addition to the weights; see `OptimizerLayout.has_masters`."""
        return self.stage > 0 or self.format == MEGATRON

    @property
    def has_buffers_by_rank(self) -> bool:
        """Whether each rank has saved its own buffers; otherwise there is one copy for all."""
        return self.stage == 3

    @property
    def weights_are_whole(self) -> bool:
        """Whether the optimizer's states and the weights that it updates are not cut over the ranks."""
        return self.file_format == TRAINER

    @property
    def weights_are_states(self) -> bool:
        """Whether the weight files hold what the optimizer updates, so that the same bytes are listed twice."""
        return not (self.has_masters or self.is_partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroFacts:
    """Facts that only DeepSpeed's checkpoints record"""

    tag: str = ""
    skipped_steps: int = 0
    settings: ZeroSettings = field(default_factory=ZeroSettings)
    module: Mapping[State, TensorEntry] = field(default_factory=dict)
    """ZeRO-1/2: trainable params and tied names as stored in the model states: the rounded masters, which the first
    step after a resume uses. Never a source of states, so that the two agree."""
    tensor_parallel: TensorParallel | None = None
    """AutoTP: how its ranks have cut the params"""
    engine: EngineTrees = field(default_factory=EngineTrees)


@dataclass(frozen=True, slots=True)
class DeltaEncoding:
    """A master that is stored as differences from that of another save; it is absent from the index itself."""

    entry: TensorEntry
    base: str
    """``save_id`` of the other save"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFacts:
    """Facts that only partial checkpoints record"""

    inside: frozenset[str] = frozenset()
    """Stock files, by relative path, whose object trees its bundles hold"""
    saved_as: Mapping[str, tuple[SavedAs, ...]] | None = None
    """Param -> the tensors that the run would save it as, if the checkpoint records it without holding weights."""
    setback: Mapping[Part, tuple[int, float]] = field(default_factory=dict)
    """Part that it left out -> the step of the part's last save, and by how many steps training falls back with it, as
    the training estimated; empty if unknown"""
    save_id: str = ""
    differences: Mapping[str, DeltaEncoding] = field(default_factory=dict)
    """By param"""
    is_thinned: bool = False
    """Whether ``thin`` made it from a full checkpoint"""


@dataclass(frozen=True, slots=True)
class PartSteps:
    """Of a composite made by llmtailor: the step that each part comes from, by its manifest."""

    states: Mapping[Part, int] = field(default_factory=dict)
    """The oldest if a part's states are of several"""
    masters: Mapping[Part, int] = field(default_factory=dict)
    is_converted: bool = False
    """Whether it has another format than its base"""
    unclear: frozenset[str] = frozenset()
    """See `TrainState.unclear`: what its base left open"""


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Everything known about a checkpoint without reading its tensors."""

    root: Path
    name: str
    """Its name in messages"""
    form: Form
    world_size: int
    global_step: int
    precision: str
    """Of the weights in training: ``BF16``, ``F16`` or ``F32``"""
    params: Mapping[str, Param]
    tied: Mapping[str, str]
    """Tied name -> the name that its values are stored under"""
    held: Mapping[State, TensorEntry]
    """A partial checkpoint also lists what it left out; see `TensorEntry.is_here`. Weights have the names of the
    safetensors file, which may differ from the params' (transformers fuses the experts of a MoE in memory only)."""
    groups: tuple[ParamGroup, ...]
    sub_groups: tuple[SubGroup, ...]
    files: Mapping[str, FileFact]
    """Every regular file below root that belongs to the checkpoint, by relative path."""
    findings: tuple[Finding, ...] = ()
    """What is unusual, or prevents a stock resume, but does not prevent reading the states."""
    unreadable: frozenset[str] = frozenset()
    """Files with states that are missing, damaged or from another save than the others. Only ``salvage`` uses such an
    index. Placements still refer to these files: the element ranges are right, the bytes are not valid."""
    framework: str = TRAINER
    """The framework that resumes from it, see `frameworks.framework`: ``trainer``, ``accelerate``, ``lightning``,
    ``deepspeed`` for an engine in a loop, or ``dcp``"""
    train: TrainState = field(default_factory=TrainState)
    zero: ZeroFacts = field(default_factory=ZeroFacts)
    dcp: DcpKeyLayout | None = None
    """Of FSDP and others that save with torch.distributed.checkpoint"""
    megatron: MegatronLayout | None = None
    partial: PartialFacts = field(default_factory=PartialFacts)
    composite: PartSteps = field(default_factory=PartSteps)

    def step_of(self, part: Part) -> int:
        """Return the step at which its state of a part was saved; of a layer of several steps the oldest."""
        return step_of(self.composite.states, part, self.global_step)

    def master_step_of(self, part: Part) -> int:
        """Return the step at which its masters of a part were saved, which may be newer than the moments."""
        return step_of(self.composite.masters or self.composite.states, part, self.global_step)

    @property
    def split_layers(self) -> set[Part]:
        """The layers of a composite whose experts have steps of their own"""
        return {part.whole for part in self.composite.states if part.is_share}

    @property
    def format(self) -> str:
        """Its form in one word, e.g. ``deepspeed-zero3``"""
        name = self.form.file_format
        if name == DEEPSPEED:
            name = f"deepspeed-zero{self.form.stage}"
        elif name == TRAINER and self.framework in (ACCELERATE, LIGHTNING):
            name = self.framework
        return f"partial-{name}" if self.form.is_partial else name

    @property
    def others(self) -> Mapping[str, DcpEntry]:
        """What a DCP folder holds beside model and optimizer, by key"""
        return self.dcp.others if self.dcp else {}

    @property
    def has_weight_files(self) -> bool:
        """Whether its weights, if it has any, are in files of the whole model."""
        has_files = self.form.format in (DEEPSPEED, UNIVERSAL, TRAINER) and self.framework != LIGHTNING
        return has_files and not self.form.is_partial

    @property
    def tp(self) -> int:
        """The number of tensor-parallel ranks; 1 where tensor parallelism is none, or not in the files."""
        return self.zero.tensor_parallel.degree if self.zero.tensor_parallel else 1

    @property
    def layout(self) -> OptimizerLayout:
        return OptimizerLayout(self.form.stage, self.world_size, self.groups, self.sub_groups, self.tp)

    @property
    def group_params(self) -> tuple[tuple[str, ...], ...]:
        """The params of each group, in the optimizer's order."""
        return tuple(group.params for group in self.groups)

    def offers(self, path: str) -> bool:
        """Whether the stock file exists, on disk or inside a bundle."""
        return path in self.files or path in self.partial.inside

    def holding(self, state: State, dtype: str) -> TensorEntry:
        """Return the entry that supplies a state in a dtype.

        A weight that no safetensors file holds in this dtype is rounded from the master, or is the frozen param or
        buffer of the model states: rounding a weight twice would give another result. Raises KeyError if there is none
        of these.
        """
        kinds = {WEIGHT: (MASTER, FROZEN, BUFFER), MODULE: (MASTER,)}.get(state.kind, (state.kind,))
        names = [name for name in (state.param, self.tied.get(state.param)) if name]
        copies = [self.held.get(State(name, WEIGHT)) for name in names] if state.kind == WEIGHT else []
        originals = [self.held.get(State(name, kind)) for name in names for kind in kinds]
        alike = [held for held in copies if held and held.dtype == dtype]
        for held in (*alike, *originals, *copies):
            if held is not None and held.is_here:
                return held
        raise KeyError(state)

    def setback_with(self, part: Part, step: int) -> float | None:
        """Return by how many steps training falls back if this save is completed with the state of a part as of a step.

        Of a layer whose experts were compared one by one, the sum. None if the save did not compare with that state.
        """
        if not self.partial.setback:
            return None
        found = [known for one, known in self.partial.setback.items() if part in (one, one.whole)]
        if not found:
            return 0.0 if step == self.global_step else None
        return math.fsum(steps for _, steps in found) if all(at == step for at, _ in found) else None

    def all_held(self) -> dict[State, TensorEntry]:
        """Return every state held, including the module's weights of ZeRO-1/2."""
        return {**self.held, **self.zero.module}

    def steps(self) -> dict[str, float]:
        """Return the optimizer's ``step`` of every trainable param for which it counts steps."""
        return {param: one.step for one in self.sub_groups if one.step is not None for param in one.params}

    def scalars(self) -> dict[str, Mapping[str, Any]]:
        """Return the other single values that the optimizer keeps of each trainable param."""
        return {param: one.scalars for one in self.sub_groups for param in one.params}


@dataclass(frozen=True, slots=True)
class Survey:
    """What can be read of a checkpoint, damaged or not."""

    index: CheckpointIndex | None
    """None if damage hides where the states are stored"""
    problems: Problems
    """All reasons to refuse the checkpoint as a source"""

    @property
    def unreadable(self) -> frozenset[str]:
        """Files with states that are missing, damaged or from another save than the others, if there is an index"""
        return self.index.unreadable if self.index else frozenset()

    def sound_index(self) -> CheckpointIndex:
        """Return the index if there are no problems; raise them otherwise."""
        self.problems.raise_if_any()
        assert self.index is not None, "a checkpoint without an index has problems"
        return self.index
