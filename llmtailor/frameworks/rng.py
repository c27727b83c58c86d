"""A rank's random number states: what a resume reads of them (transformers 5.23, accelerate 1.15, torch 2.13).

The Trainer keeps them in ``rng_state.pth``, accelerate under other keys in ``random_states_N.pkl``.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import extent_of
from llmtailor.containers.unpickle import Call, as_tensor
from llmtailor.errors import COPY_FILE, PathIn
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.frameworks.files import rng_file
from llmtailor.frameworks.framework import Framework
from llmtailor.frameworks.stock_fields import Field, FieldType, Table, check_file
from llmtailor.storage.local import open_source

_OF_ARRAYS = frozenset(("_reconstruct", "ndarray", "dtype"))
"""The numpy names that the Trainer allows in files with random number states"""
_NUM_WORDS = 624
_TORCH_BYTES = 5056
"""The exact size of a state of torch's CPU generator"""
_TORCH_HEAD = struct.Struct("<qiiq")
"""The start of torch's state: seed, words left, whether it is seeded, next word; then the words, in 8 bytes each"""
_NUMPY_NAME = "MT19937"


def _is_python_state(value: Any) -> bool:
    """Whether ``random.setstate`` accepts this: version, 624 words and a position, and the spare value of ``gauss``."""
    if not isinstance(value, (tuple, list)) or len(value) != 3 or value[0] not in (2, 3):
        return False
    words, gauss = value[1:]
    are_words = isinstance(words, tuple) and len(words) == _NUM_WORDS + 1
    return are_words and all(isinstance(word, int) for word in words) and (gauss is None or isinstance(gauss, float))


def _is_numpy_state(value: Any) -> bool:
    """Whether ``numpy.random.set_state`` accepts this, and ``torch.load`` without unsafe globals."""
    if isinstance(value, dict):
        inner = value.get("state")
        if not isinstance(inner, dict):
            return False
        value = (value.get("bit_generator"), inner.get("key"), inner.get("pos"))
    if not isinstance(value, (tuple, list)) or len(value) not in (3, 5) or value[0] != _NUMPY_NAME:
        return False
    has_gauss, gauss = value[3:] or (0, 0.0)
    are_words = _are_numpy_words(value[1]) and type(value[2]) is int
    return are_words and isinstance(has_gauss, int) and isinstance(gauss, (int, float))


def _are_numpy_words(node: Any) -> bool:
    if isinstance(node, (list, tuple)):
        return len(node) == _NUM_WORDS and all(type(word) is int and 0 <= word < 1 << 32 for word in node)
    if not isinstance(node, Call) or getattr(node.func, "name", "") != "_reconstruct":
        return False
    state = node.state
    if not isinstance(state, tuple) or len(state) != 5 or state[1] != (_NUM_WORDS,):
        return False
    dtype, data = state[2], state[4]
    named = dtype.args[0] if isinstance(dtype, Call) and isinstance(dtype.args, tuple) and dtype.args else None
    return named == "u4" and isinstance(data, bytes) and len(data) == 4 * _NUM_WORDS


def _is_torch_state(value: Any) -> bool:
    """Whether this has the form of torch's CPU generator state; `check_rng` checks its bytes."""
    view = as_tensor(value)
    return view is not None and (view.storage.dtype, view.numel, view.is_contiguous) == ("U8", _TORCH_BYTES, True)


PYTHON = FieldType("state of Python's generator", _is_python_state)
NUMPY = FieldType("state of numpy's generator", _is_numpy_state)
TORCH = FieldType("byte tensor of torch's generator", _is_torch_state)
_STATES = {"python": PYTHON, "numpy": NUMPY, "cpu": TORCH}
RNG_TABLE: Table = tuple(Field(key, type) for key, type in _STATES.items())
ACCELERATE_KEYS = {
    "python": "random_state",
    "numpy": "numpy_random_seed",
    "cpu": "torch_manual_seed",
    "cuda": "torch_cuda_manual_seed",
}
"""The Trainer's keys -> accelerate's; it loads all of them or, with a line in the log, none"""
ACCELERATE_TABLE: Table = tuple(Field(ACCELERATE_KEYS[key], type, severity=WARNING) for key, type in _STATES.items())
"""Without them, a resume draws other random numbers"""


def to_trainer(tree: Any) -> dict[str, Any]:
    """Return accelerate's random number states in the Trainer's form."""
    own = tree if isinstance(tree, dict) else {}
    return {key: own[other] for key, other in ACCELERATE_KEYS.items() if other in own}


def to_accelerate(tree: Any) -> dict[str, Any]:
    """Return the Trainer's random number states in accelerate's form, which lists those of all GPUs."""
    own = tree if isinstance(tree, dict) else {}
    found = {other: own[key] for key, other in ACCELERATE_KEYS.items() if key in own}
    of_gpus = ACCELERATE_KEYS["cuda"]
    if as_tensor(found.get(of_gpus)) is not None:
        found[of_gpus] = [found[of_gpus]]
    return found


def check_rng(root: Path, tree: Any, where: str, *, is_accelerates: bool = False) -> Iterator[Finding]:
    """Yield findings on states that a resume rejects; accelerate then draws other numbers, others fail.

    Of tensors, only that of the CPU's generator is read.
    """
    key, table, severity = "cpu", RNG_TABLE, ERROR
    effect = "a resume fails, or reads out of bounds"
    if is_accelerates:
        key, table, severity = ACCELERATE_KEYS["cpu"], ACCELERATE_TABLE, WARNING
        effect = "a resume works, and draws other random numbers"
    for one in check_file(tree, table, "random states", where, _OF_ARRAYS):
        yield replace(one, severity=severity)
    node = tree.get(key) if isinstance(tree, dict) else None
    view = as_tensor(node)
    if view is not None and _is_torch_state(node):
        extent = extent_of(view, key, where)
        with open_source(root / extent.path, where) as file:
            is_valid = _is_valid(file.read(extent.start, extent.stop))
        if not is_valid:
            what = f"{key} does not hold a state of torch's generator"
            yield Finding(where, what, f"{effect}; {COPY_FILE}", Code.FIELD_RANGE, severity)


def _is_valid(state: bytes) -> bool:
    """Return whether torch accepts the state: it checks each counter. They add up to the words, except in a new one."""
    _, left, seeded, following = _TORCH_HEAD.unpack_from(state)
    fits = (left, following) == (1, 0) or (left + following == _NUM_WORDS + 1 and left > 0 < following)
    words = state[_TORCH_HEAD.size : _TORCH_HEAD.size + 8 * _NUM_WORDS]
    return len(state) == _TORCH_BYTES and seeded == 1 and fits and any(words)


def find_swapped(saved_as: Mapping[str, str], name: str, may_repeat: bool) -> Iterator[Finding]:
    """Yield findings on files of another rank. ``saved_as`` is the name of each when it was saved.

    With ``may_repeat``, several ranks may share one on purpose, as in a composite for more ranks.
    """
    is_mixed = saved_as.keys() != set(saved_as.values())
    if may_repeat and is_mixed:
        return
    for path, other in saved_as.items():
        if path != other and (not is_mixed or other in saved_as):
            what = f"the file was saved as {other}, so it holds the random numbers of another rank"
            fix = "rename it to its own name to repeat dropout exactly"
            yield Finding(PathIn(name, path), what, fix, Code.RNG_SWAPPED, WARNING)


def find_lost_rng(there: Collection[str], world_size: int, name: str, framework: Framework) -> list[Finding]:
    """Return findings on ranks without a random number state; ``there`` are the files that exist."""
    files = [rng_file(rank, world_size, framework.name) for rank in range(world_size)]
    if not framework.saves_rng and not set(files) & set(there):
        return []
    lost = [file for file in files if file not in there]
    where: list[str] = [PathIn(name, file) for file in lost]
    what = "the RNG state of this rank is missing"
    if len(lost) == world_size:
        what, where = "there are no RNG states", [name]
    fix = "dropout and shuffling restart from the seed; copy the files back if that matters"
    return [Finding(one, what, fix, Code.RNG_MISSING, WARNING) for one in where]
