"""What the generators of Python, numpy and torch take for a state."""

from __future__ import annotations

import math
from typing import Any

from llmtailor.core.findings import ERROR, WARNING
from llmtailor.formats.pickle_nodes import Call, as_tensor
from llmtailor.formats.resumed.model import Field, Kind, Says

TWISTER_WORDS = 624
TORCH_STATE_BYTES = 5056
"""What the generator of torch's CPU takes, neither more nor less"""
_NUMPY_NAME = "MT19937"


def is_python_state(value: Any) -> bool:
    """Whether ``random.setstate`` takes this: version, 624 words and a position, and what ``gauss`` has in store."""
    if not isinstance(value, (tuple, list)) or len(value) != 3 or value[0] not in (2, 3):
        return False
    words = value[1]
    return (
        isinstance(words, tuple)
        and len(words) == TWISTER_WORDS + 1
        and all(isinstance(word, int) for word in words)
        and (value[2] is None or isinstance(value[2], float))
    )


def _python_in_range(value: Any) -> bool:
    *words, position = value[1]
    return all(0 <= word < 1 << 32 for word in words) and any(words) and 0 <= position <= TWISTER_WORDS


def is_numpy_state(value: Any) -> bool:
    """Whether ``numpy.random.set_state`` takes this, and ``torch.load`` without unsafe globals."""
    if isinstance(value, dict):
        inner = value.get("state")
        if not isinstance(inner, dict):
            return False
        value = (value.get("bit_generator"), inner.get("key"), inner.get("pos"))
    if not isinstance(value, (tuple, list)) or len(value) not in (3, 5) or value[0] != _NUMPY_NAME:
        return False
    has_gauss, gauss = value[3:] or (0, 0.0)
    return (
        _numpy_words(value[1]) is not None
        and type(value[2]) is int
        and isinstance(has_gauss, int)
        and isinstance(gauss, (int, float))
    )


def _numpy_in_range(value: Any) -> bool:
    key, position = (value["state"]["key"], value["state"]["pos"]) if isinstance(value, dict) else value[1:3]
    words = _numpy_words(key)
    return bool(words) and 0 <= position <= TWISTER_WORDS


def _numpy_words(node: Any) -> bool | None:
    """Whether any of the 624 words of an array is set; None for what is no such array."""
    if isinstance(node, (list, tuple)):
        fits = len(node) == TWISTER_WORDS and all(type(word) is int and 0 <= word < 1 << 32 for word in node)
        return any(node) if fits else None
    if not isinstance(node, Call) or getattr(node.func, "name", "") != "_reconstruct":
        return None
    state = node.state
    if not isinstance(state, tuple) or len(state) != 5 or state[1] != (TWISTER_WORDS,):
        return None
    dtype, data = state[2], state[4]
    named = dtype.args[0] if isinstance(dtype, Call) and isinstance(dtype.args, tuple) and dtype.args else None
    return any(data) if named == "u4" and isinstance(data, bytes) and len(data) == 4 * TWISTER_WORDS else None


def is_torch_state(value: Any) -> bool:
    """Whether this is a tensor that torch's CPU generator takes; what it holds, `formats.rng` looks at."""
    view = as_tensor(value)
    fits = view is not None and view.storage.dtype == "U8" and view.numel == TORCH_STATE_BYTES
    return fits and view is not None and view.is_contiguous


def is_cuda_state(value: Any) -> bool:
    """Whether this is the state of one GPU, or those of several."""
    states = value if isinstance(value, (list, tuple)) else [value]
    views = [as_tensor(state) for state in states]
    return bool(views) and all(view is not None and view.storage.dtype == "U8" for view in views)


_WORDS = tuple(range(1, TWISTER_WORDS + 1))
PYTHON = Kind(
    "state of Python's generator",
    is_python_state,
    _python_in_range,
    (None, "x", (), {}, (3, [*_WORDS, 624], None), (4, (*_WORDS, 624), None), (3, _WORDS, None), (3, (*_WORDS, 624))),
    ((3, (*_WORDS, 625), None), (3, (-1, *_WORDS), None), (3, (*([0] * 624), 624), None)),
)
NUMPY = Kind(
    "state of numpy's generator",
    is_numpy_state,
    _numpy_in_range,
    (
        *(None, "x", [], {}),
        *(("PCG64", [*_WORDS], 624, 0, 0.0), (_NUMPY_NAME, [*_WORDS][:-1], 624, 0, 0.0)),
        *((_NUMPY_NAME, [*_WORDS], "x", 0, 0.0), (_NUMPY_NAME, [*_WORDS], 624, 0), (_NUMPY_NAME, [*_WORDS])),
    ),
    ((_NUMPY_NAME, [*_WORDS], 625, 0, 0.0), (_NUMPY_NAME, [0] * TWISTER_WORDS, 624, 0, 0.0)),
)
TORCH = Kind("byte tensor of torch's generator", is_torch_state, lambda value: True, (None, [], b"x", math.pi))
CUDA = Kind("byte tensor of a GPU's generator, or a list of them", is_cuda_state, lambda value: True, ("x", []))
_LOADS = "Trainer._load_rng_state"
_FAILS = Says(ERROR, "a resume fails")
_UNDEFINED = Says(ERROR, "undefined: a resume fails, reads beyond the end, or draws the same number for ever")

RNG_FIELDS = (
    Field(("python",), PYTHON, _LOADS, _FAILS, _FAILS, _UNDEFINED),
    Field(("numpy",), NUMPY, _LOADS, _FAILS, _FAILS, _UNDEFINED),
    Field(("cpu",), TORCH, _LOADS, _FAILS, _FAILS),
    Field(
        ("cuda",),
        CUDA,
        "set_rng_state_for_device",
        None,
        Says(WARNING, "a resume on a GPU logs an error, and draws other random numbers", read=True),
        only="runs on GPUs",
    ),
)
