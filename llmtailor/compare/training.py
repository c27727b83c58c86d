"""How two checkpoints differ besides the values of their states: counters, hyperparameters, schedule, files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, DcpEntry
from llmtailor.checkpoint.layout import Bytes, Copy, Piece
from llmtailor.checkpoint.optimizer import without_names
from llmtailor.containers.json import read_json
from llmtailor.containers.pickle_nodes import Call, Ordered, as_tensor
from llmtailor.errors import PathIn
from llmtailor.formats.clients import TRAINER_STATE, is_copied_unread
from llmtailor.formats.rng import is_rng_file
from llmtailor.formats.trainer import CONFIG, is_tokenizer_file
from llmtailor.model.parts import ModelStructure, condense
from llmtailor.model.states import BUFFER, FROZEN, MASTER, WEIGHT, State
from llmtailor.storage.local import open_source, read_source

_ABSENT = "absent"
_MAX_BYTES, _CHUNK_BYTES = 256 << 20, 1 << 20
_SHOWN = 40
"""Characters of a value that are shown"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that A and B have in two ways."""

    what: str
    a: str
    b: str
    matters: bool = True
    """Whether a training continues differently; the number of ranks, for one, is only how the same state is stored"""


def compare_training(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[Difference]:
    """Yield the differences between two checkpoints, but for the values of states.

    Args:
        a, b: the checkpoints.
        structure: the parts of a model with the params of both.

    Raises SourceError if a file can't be read.
    """
    yield from _stored(a, b)
    yield from _counters(a, b)
    yield from _params(a, b, structure)
    yield from _held(a, b, structure)
    yield from _optimizer(a, b, structure)
    trees_a, trees_b = a.train.trees, b.train.trees
    for path in sorted({*trees_a, *trees_b}):
        # with other ranks, some random states have no counterpart
        is_of_rank = is_rng_file(path) and a.world_size != b.world_size and not (path in trees_a and path in trees_b)
        for difference in _trees(path, a, b):
            yield replace(difference, matters=not is_of_rank)
    for key in sorted({*_others(a), *_others(b)}):
        one, two = (dict(_leaves_of(index, key)) if key in _others(index) else None for index in (a, b))
        yield from _fields(key, one, two)
    yield from _json(TRAINER_STATE, a, b)
    for path in sorted(path for path in {*a.files, *b.files} if _is_beside(path)):
        yield from _file(path, a, b)


def _stored(a: CheckpointIndex, b: CheckpointIndex) -> Iterator[Difference]:
    for what in ("format", "world_size", "stage"):
        one, two = getattr(a, what), getattr(b, what)
        if one != two:
            yield Difference(what.replace("_", " "), str(one), str(two), matters=False)


def _counters(a: CheckpointIndex, b: CheckpointIndex) -> Iterator[Difference]:
    for what in ("global_step", "skipped_steps", "precision"):
        one, two = getattr(a, what), getattr(b, what)
        if one != two:
            yield Difference(what.replace("_", " "), str(one), str(two))


def _params(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[Difference]:
    for one, two, left, right in ((a, b, "here", _ABSENT), (b, a, _ABSENT, "here")):
        if names := [name for name in one.params if name not in two.params]:
            yield Difference(f"{len(names)} params of {_parts_of(names, structure)}", left, right)
    for name, param in a.params.items():
        other = b.params.get(name)
        if other and (param.shape, param.role) != (other.shape, other.role):
            yield Difference(name, f"{param.role} {list(param.shape)}", f"{other.role} {list(other.shape)}")


def _held(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[Difference]:
    """Yield the kinds of states that only one of them holds, other shapes, and dtypes."""
    kinds = dict.fromkeys(state.kind for index in (a, b) for state in index.held)
    for kind in kinds:
        one, two = (
            {state for state, held in index.held.items() if state.kind == kind and held.is_here} for index in (a, b)
        )
        known = (a.params.keys() & b.params.keys()) | {state.param for state in one ^ two if state.kind == WEIGHT}
        for lacking, left, right, index in ((one - two, "here", _ABSENT, b), (two - one, _ABSENT, "here", a)):
            for matters in (True, False):
                names = [state.param for state in lacking if state.param in known]
                if names := [name for name in names if _is_made(index, kind, name) != matters]:
                    yield Difference(f"{kind} of {_parts_of(names, structure)}", left, right, matters)
        for state in sorted(one & two):
            shapes = a.held[state].shape, b.held[state].shape
            if shapes[0] != shapes[1] and state.param not in a.params and kind != BUFFER:
                yield Difference(f"{kind} {state.param}", str(list(shapes[0])), str(list(shapes[1])))
        for left, right in sorted({(a.held[state].dtype, b.held[state].dtype) for state in one & two}):
            if left != right:
                yield Difference(f"dtype of {kind}", left, right, matters=False)


def _is_made(index: CheckpointIndex, kind: str, name: str) -> bool:
    """Whether a checkpoint needs no such state of a param: weights are made of masters, or are the masters."""
    if kind == MASTER:
        return index.weights_are_states
    originals = (index.held.get(State(name, other)) for other in (MASTER, FROZEN, BUFFER))
    return kind == WEIGHT and any(held is not None and held.is_here for held in originals)


def _optimizer(a: CheckpointIndex, b: CheckpointIndex, structure: ModelStructure) -> Iterator[Difference]:
    """Yield the steps of Adam and the hyperparameters that differ, each with the parts concerned."""
    found: dict[tuple[str, str, str], list[str]] = {}
    steps_a, steps_b = a.steps(), b.steps()
    for name in (name for name in steps_a if name in steps_b):
        if steps_a[name] != steps_b[name]:
            found.setdefault(("Adam step", f"{steps_a[name]:g}", f"{steps_b[name]:g}"), []).append(name)
    hyper_a, hyper_b = _hyper(a), _hyper(b)
    for name in (name for name in hyper_a if name in hyper_b):
        one, two = hyper_a[name], hyper_b[name]
        for key in sorted(one.keys() & two.keys()):
            if _plain(one[key]) != _plain(two[key]):
                found.setdefault((key, str(one[key])[:_SHOWN], str(two[key])[:_SHOWN]), []).append(name)
    for (what, left, right), names in found.items():
        whose = "" if len(names) == len(steps_a) else f" of {_parts_of(names, structure)}"
        yield Difference(f"{what}{whose}", left, right)


def _parts_of(names: Iterable[str], structure: ModelStructure) -> str:
    parts = {structure.part_of[name] for name in names}
    return condense(part for part in structure.parts if part in parts)


def _hyper(index: CheckpointIndex) -> dict[str, Mapping[str, Any]]:
    return {name: without_names(group.hyper) for group in index.groups for name in group.params}


def _trees(path: str, a: CheckpointIndex, b: CheckpointIndex) -> Iterator[Difference]:
    """Compare a stock file's decoded content: the schedule, random number states, the loss scale."""
    found = [
        dict(_leaves(index.root, index.name, index.train.trees[path])) if path in index.train.trees else None
        for index in (a, b)
    ]
    yield from _fields(path, *found)


def _json(path: str, a: CheckpointIndex, b: CheckpointIndex) -> Iterator[Difference]:
    found = [
        dict(_leaves(index.root, index.name, read_json(index.root / path, PathIn(index.name, path))))
        if path in index.files
        else None
        for index in (a, b)
    ]
    yield from _fields(path, *found)


def _fields(path: str, one: dict[str, str] | None, two: dict[str, str] | None) -> Iterator[Difference]:
    if one is None or two is None:
        if one != two:
            yield Difference(path, _ABSENT if one is None else "here", _ABSENT if two is None else "here")
        return
    wrong = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
    # of a list that has grown, such as the log, the number of values is enough
    for top in sorted({key.split(".")[0] for key in wrong}):
        keys = [key for key in wrong if key.split(".")[0] == top]
        if len(keys) == 1:
            left, right = (found.get(keys[0], _ABSENT)[:_SHOWN] for found in (one, two))
            yield Difference(f"{path}: {keys[0]}", left, right)
        else:
            left, right = (f"{sum(key.split('.')[0] == top for key in found)} values" for found in (one, two))
            yield Difference(f"{path}: {top}, {len(keys)} values", left, right)


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


def _others(index: CheckpointIndex) -> Mapping[str, DcpEntry]:
    """Return what a folder of torch.distributed.checkpoint holds besides model and optimizer."""
    return index.train.dcp.others if index.train.dcp else {}


def _leaves_of(index: CheckpointIndex, key: str) -> Iterator[tuple[str, str]]:
    entry = _others(index)[key]
    if not entry.is_tensor:
        yield from _leaves(index.root, index.name, entry.content)
        return
    dtype, shape, boxes = entry.content
    for offsets, sizes, extent in boxes:
        digest = _digest(index.root, index.name, (Copy(extent),))
        yield str(offsets), f"{dtype} {list(shape)} {sizes} {digest}"


def _digest(root: Path, name: str, content: Iterable[Piece]) -> str:
    found = hashlib.sha256()
    for piece in content:
        if isinstance(piece, Copy):
            extent = piece.extent
            with open_source(root / extent.path, PathIn(name, extent.path)) as file:
                for start in range(extent.start, extent.stop, _CHUNK_BYTES):
                    found.update(file.read(start, min(start + _CHUNK_BYTES, extent.stop)))
        else:
            found.update(piece.data if isinstance(piece, Bytes) else bytes(piece.num_bytes))
    return found.hexdigest()[:12]


def _is_beside(path: str) -> bool:
    return path in (CONFIG, "generation_config.json") or is_tokenizer_file(path) or is_copied_unread(path)


def _file(path: str, a: CheckpointIndex, b: CheckpointIndex) -> Iterator[Difference]:
    one, two = (
        hashlib.sha256(read_source(index.root / path, PathIn(index.name, path), _MAX_BYTES)).hexdigest()[:12]
        if path in index.files
        else _ABSENT
        for index in (a, b)
    )
    if one != two:
        yield Difference(path, one, two)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
