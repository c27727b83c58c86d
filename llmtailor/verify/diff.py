"""Compares two checkpoints: in what a training continues from, and in the values of their states.

Every state that both hold is streamed, in parallel and in flat memory. Sums are in fp64 and added up in a fixed order,
so a comparison repeats to the last digit.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmtailor.checkpoint.elements import StateReader
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, Copy, Segment
from llmtailor.checkpoint.optimizer import as_option, without_names
from llmtailor.checkpoint.placement import Runs, common
from llmtailor.containers.json import read_json
from llmtailor.containers.unpickle import Call, Ordered, as_tensor
from llmtailor.copying.pool import num_workers, run_all, stoppable
from llmtailor.copying.streams import cannot_read
from llmtailor.documents import document
from llmtailor.errors import MismatchError, PathIn, Problem, UsageError
from llmtailor.formats.registry import find_structure, index_checkpoint, with_experts
from llmtailor.frameworks.files import CONFIG, TRAINER_STATE, Holds, holds, is_rng_file, is_tokenizer_file
from llmtailor.model.dtypes import FLOATING, ITEMSIZE
from llmtailor.model.parts import ModelStructure, Part, condense, nearest
from llmtailor.model.roles import BUFFER, EXP_AVG, EXP_AVG_SQ, FROZEN, MASTER, WEIGHT, State, place_of
from llmtailor.storage.casts import cast, widen
from llmtailor.storage.local import OpenFiles, as_path, open_source, read_source
from llmtailor.timing import unreported
from llmtailor.verify.values import BLOCK_ELEMENTS, CHUNK_ELEMENTS, bits_of

_ABSENT = "absent"
_MAX_BYTES, _CHUNK_BYTES = 256 << 20, 1 << 20
_SHOWN = 40
"""Characters of a value that are shown"""
KINDS = (WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ)
"""The kinds of states of a usual training; others follow these in tables"""
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class StateDiff:
    """Something that A and B have in two ways."""

    what: str
    a: str
    b: str
    matters: bool = True
    """Whether a training continues differently; the number of ranks, for one, is only how the same state is stored"""


def compare_training(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[StateDiff]:
    """Yield the differences between two checkpoints, but for the values of states.

    Args:
        a, b: the checkpoints.
        structure: the parts of a model with the params of both.

    Raises SourceError if a file can't be read.
    """
    yield from _facts(a, b, ("format", "world_size", "tp", "form.stage"), matters=False)
    yield from _facts(a, b, ("global_step", "zero.skipped_steps", "precision"), matters=True)
    yield from _params(a, b, structure)
    yield from _held(a, b, structure)
    yield from _optimizer(a, b, structure)
    trees_a, trees_b = a.train.trees, b.train.trees
    for path in sorted({*trees_a, *trees_b}):
        # with other ranks, some random states have no counterpart
        is_of_rank = is_rng_file(path) and a.world_size != b.world_size and not (path in trees_a and path in trees_b)
        for difference in _fields(path, _trees(a, path), _trees(b, path)):
            yield replace(difference, matters=not is_of_rank)
    for key in sorted({*a.others, *b.others}):
        leaves_a, leaves_b = (dict(_leaves_of(index, key)) if key in index.others else None for index in (a, b))
        yield from _fields(key, leaves_a, leaves_b)
    yield from _fields(TRAINER_STATE, _trees(a, TRAINER_STATE), _trees(b, TRAINER_STATE))
    for path in sorted({*a.files, *b.files}):
        if path in (CONFIG, "generation_config.json") or is_tokenizer_file(path) or holds(path, Holds.OBJECTS):
            yield from _file(path, a, b)


def _facts(a: CheckpointIndex, b: CheckpointIndex, facts: Sequence[str], *, matters: bool) -> Iterator[StateDiff]:
    for fact in facts:
        value_a, value_b = attrgetter(fact)(a), attrgetter(fact)(b)
        if value_a != value_b:
            yield StateDiff(fact.rpartition(".")[2].replace("_", " "), str(value_a), str(value_b), matters=matters)


def _params(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[StateDiff]:
    for having, lacking, left, right in ((a, b, "here", _ABSENT), (b, a, _ABSENT, "here")):
        if names := [name for name in having.params if name not in lacking.params]:
            yield StateDiff(f"{len(names)} params of {_parts_of(names, structure)}", left, right)
    for name, param in a.params.items():
        param_b = b.params.get(name)
        if param_b and (param.shape, param.role) != (param_b.shape, param_b.role):
            yield StateDiff(name, f"{param.role} {list(param.shape)}", f"{param_b.role} {list(param_b.shape)}")


def _held(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[StateDiff]:
    """Yield the kinds of states that only one of them holds, other shapes, and dtypes."""
    kinds = dict.fromkeys(state.kind for index in (a, b) for state in index.held)
    for kind in kinds:
        states_a, states_b = (
            {state for state, entry in index.held.items() if state.kind == kind and entry.is_here} for index in (a, b)
        )
        only_a, only_b = states_a - states_b, states_b - states_a
        known = (a.params.keys() & b.params.keys()) | {state.param for state in only_a | only_b if kind == WEIGHT}
        for lacking, left, right, index in ((only_a, "here", _ABSENT, b), (only_b, _ABSENT, "here", a)):
            for matters in (True, False):
                names = [state.param for state in lacking if state.param in known]
                if names := [name for name in names if _is_made(index, kind, name) != matters]:
                    yield StateDiff(f"{kind} of {_parts_of(names, structure)}", left, right, matters)
        for state in sorted(states_a & states_b):
            shapes = a.held[state].shape, b.held[state].shape
            if shapes[0] != shapes[1] and state.param not in a.params and kind != BUFFER:
                yield StateDiff(f"{kind} {state.param}", str(list(shapes[0])), str(list(shapes[1])))
        for left, right in sorted({(a.held[state].dtype, b.held[state].dtype) for state in states_a & states_b}):
            if left != right:
                yield StateDiff(f"dtype of {kind}", left, right, matters=False)


def _is_made(index: CheckpointIndex, kind: str, name: str) -> bool:
    """Whether a checkpoint needs no such state of a param: weights are made of masters, or are the masters."""
    if kind == MASTER:
        return index.form.weights_are_states
    originals = (index.held.get(State(name, source_kind)) for source_kind in (MASTER, FROZEN, BUFFER))
    return kind == WEIGHT and any(entry is not None and entry.is_here for entry in originals)


def _optimizer(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[StateDiff]:
    """Yield the steps of Adam and the hyperparameters that differ, each with the parts concerned."""
    names_of: dict[tuple[str, str, str], list[str]] = {}
    steps_a, steps_b = a.steps(), b.steps()
    for name in (name for name in steps_a if name in steps_b):
        if steps_a[name] != steps_b[name]:
            names_of.setdefault(("Adam step", f"{steps_a[name]:g}", f"{steps_b[name]:g}"), []).append(name)
    hyper_a, hyper_b = _hyper(a), _hyper(b)
    for name in (name for name in hyper_a if name in hyper_b):
        options_a, options_b = hyper_a[name], hyper_b[name]
        for key in sorted(options_a.keys() & options_b.keys()):
            if as_option(options_a[key]) != as_option(options_b[key]):
                shown = (str(options[key])[:_SHOWN] for options in (options_a, options_b))
                names_of.setdefault((key, next(shown), next(shown)), []).append(name)
    for (what, left, right), names in names_of.items():
        whose = "" if len(names) == len(steps_a) else f" of {_parts_of(names, structure)}"
        yield StateDiff(f"{what}{whose}", left, right)


def _parts_of(names: Iterable[str], structure: ModelStructure) -> str:
    parts = {structure.part_of[name] for name in names}
    return condense(part for part in structure.parts if part in parts)


def _hyper(index: CheckpointIndex) -> dict[str, Mapping[str, Any]]:
    return {name: without_names(group.hyper) for group in index.groups for name in group.params}


def _trees(index: CheckpointIndex, path: str) -> dict[str, str] | None:
    """Return the values in a stock file: the schedule, random number states, the loss scale, the log."""
    if path == TRAINER_STATE:
        tree = read_json(index.root / path, PathIn(index.name, path)) if path in index.files else None
    else:
        tree = index.train.trees.get(path)
    return None if tree is None else dict(_leaves(index.root, index.name, tree))


def _fields(path: str, values_a: dict[str, str] | None, values_b: dict[str, str] | None) -> Iterator[StateDiff]:
    if values_a is None or values_b is None:
        if values_a != values_b:
            yield StateDiff(path, _ABSENT if values_a is None else "here", _ABSENT if values_b is None else "here")
        return
    wrong = sorted(key for key in values_a.keys() | values_b.keys() if values_a.get(key) != values_b.get(key))
    # of a list that has grown, such as the log, the number of values is enough
    for top in sorted({key.split(".")[0] for key in wrong}):
        keys = [key for key in wrong if key.split(".")[0] == top]
        if len(keys) == 1:
            left, right = (values.get(keys[0], _ABSENT)[:_SHOWN] for values in (values_a, values_b))
            yield StateDiff(f"{path}: {keys[0]}", left, right)
        else:
            counts = (sum(key.split(".")[0] == top for key in values) for values in (values_a, values_b))
            left, right = (f"{count} values" for count in counts)
            yield StateDiff(f"{path}: {top}, {len(keys)} values", left, right)


def _leaves(root: Path, name: str, node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield every value in a decoded tree with the path to it; of a tensor, its dtype, shape and digest."""
    view = as_tensor(node)
    if view is not None:
        digest = _digest(root, name, view.storage.content)
        yield ".".join(path), f"{view.storage.dtype} {list(view.shape)} {digest}"
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(root, name, value, (*path, str(key)))
        if isinstance(node, Ordered):
            yield from _leaves(root, name, node.attributes, (*path, "attributes"))
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _leaves(root, name, value, (*path, str(number)))
    elif isinstance(node, Call):
        yield from _leaves(root, name, [node.func, node.args, node.state, node.items, node.appends], path)
    else:
        yield ".".join(path), str(node)


def _leaves_of(index: CheckpointIndex, key: str) -> Iterator[tuple[str, str]]:
    entry = index.others[key]
    if not entry.is_tensor:
        yield from _leaves(index.root, index.name, entry.content)
        return
    dtype, shape, boxes = entry.content
    for offsets, sizes, extent in boxes:
        digest = _digest(index.root, index.name, (Copy(extent),))
        yield str(offsets), f"{dtype} {list(shape)} {sizes} {digest}"


def _digest(root: Path, name: str, content: Iterable[Segment]) -> str:
    digest = hashlib.sha256()
    for piece in content:
        if isinstance(piece, Copy):
            extent = piece.extent
            with open_source(root / extent.path, PathIn(name, extent.path)) as file:
                for start in range(extent.start, extent.stop, _CHUNK_BYTES):
                    digest.update(file.read(start, min(start + _CHUNK_BYTES, extent.stop)))
        else:
            digest.update(piece.data if isinstance(piece, Bytes) else bytes(piece.num_bytes))
    return digest.hexdigest()[:12]


def _file(path: str, a: CheckpointIndex, b: CheckpointIndex) -> Iterator[StateDiff]:
    digest_a, digest_b = (
        hashlib.sha256(read_source(index.root / path, PathIn(index.name, path), _MAX_BYTES)).hexdigest()[:12]
        if path in index.files
        else _ABSENT
        for index in (a, b)
    )
    if digest_a != digest_b:
        yield StateDiff(path, digest_a, digest_b)


@dataclass(frozen=True, slots=True)
class Change:
    """How elements of B differ from those of A. Sums run over the elements that are finite in both."""

    numel: int = 0
    changed: int = 0
    """Elements that differ in any bit"""
    not_finite: int = 0
    """Elements that are NaN or infinite in A or B"""
    largest: float = 0.0
    """The largest \\|b - a\\|"""
    of_a: float = 0.0
    """Sum of a^2"""
    of_b: float = 0.0
    """Sum of b^2"""
    of_difference: float = 0.0
    """Sum of (b - a)^2"""
    product: float = 0.0
    """Sum of a * b"""

    def __add__(self, other: Change) -> Change:
        return Change(
            self.numel + other.numel,
            self.changed + other.changed,
            self.not_finite + other.not_finite,
            max(self.largest, other.largest),
            self.of_a + other.of_a,
            self.of_b + other.of_b,
            self.of_difference + other.of_difference,
            self.product + other.product,
        )

    @property
    def relative(self) -> float:
        """\\|B - A\\| / \\|A\\|, in the L2 norm: 0 if nothing changed, infinite if A is zero and B is not"""
        if self.of_difference == 0:
            return 0.0
        return math.sqrt(self.of_difference / self.of_a) if self.of_a else math.inf

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between A and B; None if one is zero"""
        norms = math.sqrt(self.of_a) * math.sqrt(self.of_b)
        return max(-1.0, min(1.0, self.product / norms)) if norms else None

    @property
    def share(self) -> float:
        """The share of elements that differ, 0..1"""
        return self.changed / self.numel if self.numel else 0.0


def compare(a: memoryview, dtype_a: str, b: memoryview, dtype_b: str) -> Change:
    """Compare as many elements of A and B.

    Of two floating-point dtypes, the wider is rounded to the narrower first, as a training rounds its masters. Values
    of other dtypes are only compared for equality, and must have the same dtype.
    """
    dtype = min(dtype_a, dtype_b, key=lambda dtype: ITEMSIZE[dtype])
    change = Change()
    numel = len(a) // ITEMSIZE[dtype_a]
    for begin in range(0, numel, BLOCK_ELEMENTS):
        end = min(begin + BLOCK_ELEMENTS, numel)
        blocks = (
            (data[begin * ITEMSIZE[own] : end * ITEMSIZE[own]], own) for data, own in ((a, dtype_a), (b, dtype_b))
        )
        block_a, block_b = (block if own == dtype else cast(block, own, dtype) for block, own in blocks)
        change += _compare_block(block_a, block_b, dtype)
    return change


def _compare_block(a: memoryview | bytes, b: memoryview | bytes, dtype: str) -> Change:
    bits_a, bits_b = bits_of(a, dtype), bits_of(b, dtype)
    changed = int(np.count_nonzero(bits_a != bits_b))
    is_equal = not changed
    if dtype not in FLOATING:
        return Change(len(bits_a), changed)
    with np.errstate(invalid="ignore", over="ignore"):
        values_a = widen(a, dtype).astype("<f8")
        values_b = values_a if is_equal else widen(b, dtype).astype("<f8")
        of_a = _dot(values_a, values_a)
        of_b = of_a if is_equal else _dot(values_b, values_b)
    not_finite = 0
    if not math.isfinite(of_a + of_b):
        finite = np.isfinite(values_a) & np.isfinite(values_b)
        not_finite = len(finite) - int(np.count_nonzero(finite))
        values_a, values_b = values_a[finite], values_b[finite]
        of_a, of_b = _dot(values_a, values_a), _dot(values_b, values_b)
    if is_equal:
        return Change(len(bits_a), 0, not_finite, 0.0, of_a, of_b, 0.0, of_a)
    difference = values_b - values_a
    largest = float(np.abs(difference).max()) if len(difference) else 0.0
    of_difference, product = _dot(difference, difference), _dot(values_a, values_b)
    return Change(len(bits_a), changed, not_finite, largest, of_a, of_b, of_difference, product)


def _dot(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Return the sum of products. Unlike BLAS, it does not depend on the number of threads."""
    return float(np.einsum("i,i->", a, b))


@dataclass(frozen=True, slots=True)
class Compared:
    state: State
    part: Part
    layer: int | None
    """Its layer, if its part is one"""
    module: str
    """Its module inside the layer, e.g. ``self_attn.q_proj``, with ``*`` for numbers; outside of layers, its part"""
    change: Change


@dataclass(frozen=True, slots=True)
class Diff:
    """How checkpoint B differs from checkpoint A."""

    a: str
    b: str
    steps: tuple[int, int]
    """The global steps of A and B"""
    part_steps: dict[str, tuple[int, int]]
    """Part -> the steps at which its moments were saved, of a composite not always the global step"""
    training: tuple[StateDiff, ...]
    """What differs besides the values of states"""
    states: tuple[Compared, ...]
    """In the order of the model"""
    chosen: tuple[str, ...] = ()
    """The only kinds of states that were compared; empty for all"""
    master_steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Part -> the steps at which its masters were saved, which may be newer than the moments"""

    @property
    def is_equal(self) -> bool:
        """Whether a training continues from B exactly as from A, as far as the `chosen` kinds show"""
        is_changed = any(state.change.changed for state in self.states)
        return not is_changed and not any(difference.matters for difference in self.training)

    @property
    def kinds(self) -> list[str]:
        return kinds_of(self.states)

    def by(self, label: Callable[[Compared], str]) -> dict[str, dict[str, Change]]:
        """Return label -> kind -> the change of all states of that label and kind."""
        return sums_by(label, self.states)


def kinds_of(states: Iterable[Compared]) -> list[str]:
    """Return the kinds of some states: the usual ones, then others."""
    kinds = {compared.state.kind for compared in states}
    return [*(kind for kind in KINDS if kind in kinds), *sorted(kinds - {*KINDS})]


def sums_by(label: Callable[[Compared], str], states: Iterable[Compared]) -> dict[str, dict[str, Change]]:
    """Return label -> kind -> the change of all states of that label and kind."""
    changes: dict[str, dict[str, Change]] = {}
    for compared in states:
        of_label = changes.setdefault(label(compared), {})
        of_label[compared.state.kind] = of_label.get(compared.state.kind, Change()) + compared.change
    return changes


def diff(
    a: str | Path,
    b: str | Path,
    kinds: Collection[str] = (),
    on_progress: Callable[[int], None] | None = None,
) -> Diff:
    """Compare two checkpoints of any format; partial ones are compared as far as both hold a state.

    Args:
        a, b: the folders of the checkpoints.
        kinds: the kinds of states to compare, such as ``weight`` and ``exp_avg``; empty for all.
        on_progress: called from several threads with numbers of bytes read.

    Raises SourceError for a damaged checkpoint, MismatchError if no state is in both, UsageError for a kind that is not
    in both, Interrupted on Ctrl-C.
    """
    return diff_indexes(index_checkpoint(as_path(a)), index_checkpoint(as_path(b)), kinds, on_progress or unreported)


def diff_indexes(
    a: CheckpointIndex, b: CheckpointIndex, kinds: Collection[str], on_progress: Callable[[int], None]
) -> Diff:
    structure = _structure_of_both(a, b)
    common = [*_common(a, b)]
    if not common:
        what = f"{a.name} and {b.name} have no state in common"
        raise MismatchError.at(b.name, what, "compare checkpoints of the same model")
    known_kinds = list(dict.fromkeys(state.kind for state in common))
    if unknown := [kind for kind in kinds if kind not in known_kinds]:
        raise UsageError(
            Problem("--kind", f"not in both checkpoints: {kind!r}", nearest(kind, known_kinds)) for kind in unknown
        )
    states = [state for state in common if not kinds or state.kind in kinds]
    part_steps: dict[str, tuple[int, int]] = {part: (a.step_of(part), b.step_of(part)) for part in structure.parts}
    return Diff(
        a.name,
        b.name,
        (a.global_step, b.global_step),
        part_steps,
        tuple(compare_training(a, b, structure)),
        _compare_states(a, b, structure, [_Unit(state, state.param) for state in states], on_progress),
        tuple(kinds),
        {part: (a.master_step_of(part), b.master_step_of(part)) for part in structure.parts},
    )


def diff_parts(
    a: CheckpointIndex, b: CheckpointIndex, parts: Collection[Part], on_progress: Callable[[int], None]
) -> tuple[Compared, ...]:
    """Compare the states of these parts as far as both hold them; the result may be empty. Raises as `diff`."""
    structure = _structure_of_both(a, b)
    shared = {part.whole for part in parts if part.is_share}
    structure = with_experts(structure, a, shared)
    pieces_of, units = structure.pieces_of, []
    for state in _common(a, b):
        for name in pieces_of.get(state.param, [state.param]):
            if structure.part_of[name] in parts:
                piece = structure.pieces.get(name)
                units.append(_Unit(state, name, ((piece.begin, piece.end),) if piece else None))
    return _compare_states(a, b, structure, units, on_progress)


class _Unit(NamedTuple):
    """What is compared: a state, or an expert's elements of it."""

    state: State
    name: str
    """Of the param, or of its piece"""
    runs: Runs | None = None
    """None for all elements"""


def _compare_states(
    a: CheckpointIndex,
    b: CheckpointIndex,
    structure: ModelStructure,
    units: list[_Unit],
    on_progress: Callable[[int], None],
) -> tuple[Compared, ...]:
    changes = _compare_all(a, b, units, on_progress)
    order = {part: number for number, part in enumerate(structure.parts)}
    compared = [_compared(State(unit.name, unit.state.kind), structure, changes[unit]) for unit in units]
    return tuple(sorted(compared, key=lambda result: order[result.part]))


def _structure_of_both(a: CheckpointIndex, b: CheckpointIndex) -> ModelStructure:
    """Return the parts of A's model, with what only B has."""
    structure_a, structure_b = find_structure(a), find_structure(b)
    parts = (*structure_a.parts, *(part for part in structure_b.parts if part not in structure_a.parts))
    part_of = {**structure_b.part_of, **structure_a.part_of}
    return ModelStructure(part_of, parts, structure_a.num_layers, structure_a.tied)


def _common(a: CheckpointIndex, b: CheckpointIndex) -> Iterator[State]:
    """Yield the states that both hold. Without DeepSpeed, masters are the weights and not listed again."""
    left_out = {MASTER, FROZEN, BUFFER} if a.form.weights_are_states and b.form.weights_are_states else set[str]()
    for state, entry_a in a.held.items():
        entry_b = b.held.get(state)
        if entry_b is None or not (entry_a.is_here and entry_b.is_here) or state.kind in left_out:
            continue
        if entry_a.numel and entry_b.numel and not common(entry_a.runs, entry_b.runs):  # other experts of a fused param
            continue
        is_alike = entry_a.dtype == entry_b.dtype or {entry_a.dtype, entry_b.dtype} <= FLOATING
        if is_alike and (entry_a.shape == entry_b.shape or entry_a.numel == entry_b.numel or state.kind == BUFFER):
            yield state


def _compared(state: State, structure: ModelStructure, change: Change) -> Compared:
    part = structure.part_of[state.param]
    place = place_of(state.param)
    module = part if part.layer is None else ".".join(place.path[len(place.module) + 1 :])
    return Compared(state, part, part.layer, _NUMBERS.sub("*", module) or part, change)


def _compare_all(
    a: CheckpointIndex, b: CheckpointIndex, units: list[_Unit], on_progress: Callable[[int], None]
) -> dict[_Unit, Change]:
    readers = [(index, StateReader(OpenFiles(index.root, index.files), on_progress)) for index in (a, b)]

    def read(index: CheckpointIndex, reader: StateReader, state: State, begin: int, end: int) -> memoryview:
        try:
            return reader.read(index.held[state], (begin, end))
        except OSError as error:
            raise cannot_read(f"{index.name}/{error.filename}", error) from error

    def compare_chunk(unit: _Unit, begin: int, end: int) -> tuple[_Unit, Change]:
        of_a, of_b = (read(*side, unit.state, begin, end) for side in readers)
        return unit, compare(of_a, a.held[unit.state].dtype, of_b, b.held[unit.state].dtype)

    jobs = (
        partial(compare_chunk, unit, begin, min(begin + CHUNK_ELEMENTS, high))
        for unit in units
        # each rank has its own buffers: of two numbers of ranks, the first ones are compared
        for both in [common(a.held[unit.state].runs, b.held[unit.state].runs)]
        for low, high in (both if unit.runs is None else common(both, unit.runs))
        for begin in range(low, high, CHUNK_ELEMENTS)
    )
    changes = dict.fromkeys(units, Change())
    with stoppable() as stop:
        for unit, change in run_all(jobs, num_workers(), stop):
            changes[unit] += change
    return changes


def to_json(result: Diff, label: Callable[[Compared], str]) -> dict[str, object]:
    """Return the result as a `document`; ``label`` returns the group of a state. Infinite numbers are null."""
    content = {
        "a": result.a,
        "b": result.b,
        "steps": result.steps,
        "is_equal": result.is_equal,
        "kinds": result.kinds,
        "training": result.training,
        "states": [
            {"label": name, "kind": kind, **_numbers(change)}
            for name, kinds in result.by(label).items()
            for kind, change in kinds.items()
        ],
        "part_steps": result.part_steps,
        "master_steps": result.master_steps,
    }
    return document("diff/1", content)


def _numbers(change: Change) -> dict[str, float | int | None]:
    relative = change.relative
    return {
        "numel": change.numel,
        "changed": change.changed,
        "not_finite": change.not_finite,
        "relative": relative if math.isfinite(relative) else None,
        "largest": change.largest,
        "cosine": change.cosine,
    }
