"""Rounding of fp32 elements to the encodings of partial checkpoints, in host memory.

numba does it if it is installed, else torch, in chunks; for elements on a GPU there is `storage.rounding_torch`. All
give the same bytes, on which `storage.casts` says more.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.dtypes import BLOCKS, D16, F24, ITEMSIZE, Q8_ROOT, Block, size_of

_FOUR: Final = Block(4, 0, ITEMSIZE[F24])
"""The elements of ``F24`` that numba rounds together"""


@lru_cache
def loops() -> ModuleType | None:
    """Return the loops that numba compiles, if it is installed. The first call takes a second or two."""
    try:
        from llmtailor.storage import rounding_numba
    except ImportError:  # also what it raises for a version of numpy that it does not know
        return None
    return rounding_numba


def pack(
    values: npt.NDArray[Any],
    target: str,
    room: npt.NDArray[np.uint8] | None = None,
    base: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return the bytes of fp32 elements as one of `dtypes.PACKED`, in ``room`` if there is any.

    ``base`` has, for ``D16``, the bytes of the same elements of the other save as ``F24``.
    """
    room = np.empty(size_of(target, len(values)), np.uint8) if room is None else room
    base = np.empty(0, np.uint8) if base is None else base
    assert target != D16 or len(base) == size_of(F24, len(values)), "compiled loops check no bounds"
    if loops() is None:
        from llmtailor.storage import rounding_torch  # takes a second, and moving bytes needs torch for nothing else

        rounding_torch.pack_array(values, target, room, base)
        return room
    block = BLOCKS.get(target, _FOUR)
    end = len(values) // block.elements * block.elements
    packed = end // block.elements * block.num_bytes
    _by_numba(values[:end], target, room[:packed], base[: 3 * end])
    if missing := -len(values) % block.elements:
        last = np.empty(block.num_bytes, np.uint8)
        _by_numba(np.pad(values[end:], (0, missing)), target, last, np.pad(base[3 * end :], (0, 3 * missing)))
        room[packed:] = last[: len(room) - packed]
    return room


def _by_numba(values: npt.NDArray[Any], target: str, room: npt.NDArray[np.uint8], base: npt.NDArray[np.uint8]) -> None:
    compiled = loops()
    assert compiled is not None, "numba is installed"
    if target == F24:
        compiled.to_24_bits(values.view("<u4"), room.view("<u4"))
    elif target == D16:
        records = room.reshape(-1, BLOCKS[D16].num_bytes)
        compiled.to_differences(values.view("<u4"), base, records[:, 0], records[:, 1:].view("<u8"))
    else:
        compiled.to_8_bits(values, room, target == Q8_ROOT)
