"""What can be addressed: a state is one kind of data of one param."""

from __future__ import annotations

from typing import NamedTuple

WEIGHT = "weight"
"""The param as stored in the safetensors file"""
MASTER = "master"
"""The fp32 copy that the optimizer updates."""
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
FROZEN = "frozen"
"""A frozen param as stored in ZeRO-3 model_states: sliced over the ranks, in the model's dtype"""
MODULE = "module"
"""A trainable param as stored in ZeRO-1/2 model_states: the rounded master. Not kept in an index; it is always made
from the master, so that the two agree."""
BUFFER = "buffer"
"""A persistent buffer as stored in the model_states: complete on every rank, and not always equal (running statistics
of local batches differ). So the state joins all ranks, in order: shape [world size, ...]."""

KIND_OF_ROLE = {"trainable": MASTER, "frozen": FROZEN, "buffer": BUFFER}
"""The role of a param -> the state whose values it has in training"""

ITEMSIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
}
"""Bytes per element, by the dtype names of the safetensors format, which llmtailor uses everywhere"""


_NO_MOMENTS = frozenset((MASTER, WEIGHT, MODULE, FROZEN, BUFFER))


def is_moment(kind: str) -> bool:
    """Return whether a kind of state is one of those that an optimizer keeps beside the master."""
    return kind not in _NO_MOMENTS


class State(NamedTuple):  # which hashes several times faster than a dataclass
    """One kind of data of one param.

    ``kind`` is one of the constants above or, for optimizers with more elementwise state than
    AdamW, the optimizer's own name for it (``max_exp_avg_sq``).
    """

    param: str
    """Fully qualified name of the param"""
    kind: str
