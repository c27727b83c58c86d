"""Rounding of fp32 states by torch, on the device that they are on.

The caller cuts long tensors into chunks of whole blocks: intermediate results take several times their memory.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from llmtailor.model.dtypes import BLOCKS, D16, F24, Q8_ROOT, size_of

_BF16_NAN: Final = 0x7FC0
_CHUNK: Final = 1 << 15
"""Elements in host memory that are rounded at once, so that they stay in a core's cache"""


def pack(elements: torch.Tensor, dtype: str, base: torch.Tensor | None = None) -> torch.Tensor:
    """Return the bytes of fp32 elements as one of `dtypes.PACKED`, on the same device.

    ``base`` has, for ``D16``, the bytes of the same elements of the other save as ``F24``, on any device.
    """
    if not elements.numel():  # which torch can't view as bytes
        return elements.new_empty(0, dtype=torch.uint8)
    if dtype == F24:
        octets = _to_24_bits(elements.contiguous().view(torch.int32)).view(torch.uint8).view(-1, 4)
        room = octets.new_empty(len(octets), 3)
        for at in range(3):  # on a CPU faster than all at once
            room[:, at] = octets[:, at]
        return room.view(-1)
    size = BLOCKS[dtype].elements
    missing = -elements.numel() % size
    rows = torch.nn.functional.pad(elements, (0, missing)).view(-1, size)
    if dtype == D16:
        assert base is not None, "what it differs from"
        older = torch.nn.functional.pad(base.to(elements.device, non_blocking=True), (0, 3 * missing))
        before = torch.nn.functional.pad(older.view(-1, 3), (0, 1)).view(torch.int32)
        records = _to_differences(rows, before.view(-1, size))
    else:
        records = _to_8_bits(rows, dtype == Q8_ROOT)
    return records.view(-1)[: size_of(dtype, elements.numel())]


def pack_array(values: npt.NDArray[Any], dtype: str, room: npt.NDArray[np.uint8], base: npt.NDArray[np.uint8]) -> None:
    """Fill ``room`` with the bytes of fp32 elements in host memory."""
    for begin in range(0, len(values), _CHUNK):
        elements = torch.from_numpy(np.array(values[begin : begin + _CHUNK]))  # a copy: ``values`` may be read-only
        older = torch.from_numpy(np.array(base[3 * begin : 3 * (begin + _CHUNK)])) if dtype == D16 else None
        octets = pack(elements, dtype, older).numpy()
        start = size_of(dtype, begin)
        room[start : start + len(octets)] = octets


def _to_8_bits(rows: torch.Tensor, is_root: bool) -> torch.Tensor:
    most = 255 if is_root else 127
    values = rows.double().sqrt().float() if is_root else rows  # in fp32, torch rounds some roots wrongly on CPUs
    largest = values.abs().amax(1, keepdim=True)
    unit = largest / largest.new_full((), most)  # CUDA multiplies by the reciprocal of a number that is not on the GPU
    codes = (values / torch.where(unit > 0, unit, 1)).round_().clamp_(-most, most)
    if is_root:
        codes = torch.where(rows > 0, codes.clamp_(min=1), 0)
    is_sound = unit.isfinite()
    codes = torch.where(is_sound, codes, 0)
    unit = torch.where(is_sound, unit, torch.nan)
    return torch.cat((unit.view(torch.uint8), codes.to(torch.int16).to(torch.uint8)), 1)


def _to_24_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return patterns of fp32 without the last 8 bits, in the lower three bytes."""
    return (bits | ((bits & 0xFF) + 0xFF)) >> 8  # bit 8 is set if any lower one was


def _to_differences(rows: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    bits = rows.view(torch.int32)
    off = _numbers(_to_24_bits(bits), bits >> 31) - _numbers(before, -(before >> 23))
    off = torch.where(bits == -(1 << 31), 1 << 15, off)  # -0.0 has no number of its own
    fits = (off.abs() < 1 << 15).all(1, keepdim=True)
    rounded = torch.where(rows.isnan(), _BF16_NAN, rows.to(torch.bfloat16).view(torch.int16).to(torch.int32))
    codes = torch.where(fits, off, rounded).to(torch.int16)
    return torch.cat((fits.to(torch.uint8), codes.view(torch.uint8)), 1)


def _numbers(patterns: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return the numbers of 24-bit patterns in the order of the values; ``signs`` are 0 or -1."""
    return ((patterns & 0x7FFFFF) ^ signs) - signs
