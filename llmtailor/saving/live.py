"""Live tensors as a source of bytes besides files, so that saves use the same engine as merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llmtailor.checkpoint.layout import Copy
from llmtailor.checkpoint.placement import Extent
from llmtailor.formats.partial.trees import Entry

SOURCE = "live"
"""The name of the source in plans"""
STORE_BYTES = 32 << 20
"""Bytes read at once; for GPU tensors, the additional CPU memory"""
ANY_STEP = -1
"""`LiveTensor.written_with` of a tensor that any step of the training may change"""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""torch dtype -> its name in safetensors files"""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of a save."""

    flat: torch.Tensor
    """One dimension, on any device"""
    dtype: torch.dtype
    """Dtype in the file; elements of another dtype are cast"""
    written_with: int
    """Address of the storage of the master weights with which the optimizer writes this tensor; `ANY_STEP` for frozen
    params, which a user's code may change at each step; 0 for a copy, which nobody writes."""

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self.dtype.itemsize

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements that become a range of bytes, whose ends are multiples of the item size."""
        itemsize = self.dtype.itemsize
        return self.flat[start // itemsize : stop // itemsize]


class LiveTensors:
    """The tensors of a save. Implements `engine.streams.Store`; paths are numbers."""

    def __init__(self) -> None:
        self.tensors: list[LiveTensor] = []

    def entry(
        self,
        key: str,
        tensor: torch.Tensor,
        dtype: torch.dtype | None = None,
        written_with: int = 0,
        storage: str | None = None,
    ) -> Entry:
        """Return an entry of a partial checkpoint's file, filled from a tensor in the order of its elements.

        In its plan, `SOURCE` is the first source. ``storage`` is a name of the tensor's storage if the file is to have
        tensors as they lie there; names are in the order of the file.
        """
        flat = tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)
        live = LiveTensor(flat, dtype or flat.dtype, written_with)
        content: tuple[Copy, ...] = ()
        if num_bytes := live.num_bytes:
            content = (Copy(Extent(str(len(self.tensors)), 0, num_bytes), source=0),)
            self.tensors.append(live)
        lies = None
        if storage is not None and content and live.dtype == flat.dtype:
            begin = int(flat.storage_offset()) * flat.element_size()
            lies = Extent(storage, begin, begin + num_bytes)
        return Entry(key, DTYPES[live.dtype], tuple(tensor.shape), content, lies)

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Return bytes of a tensor, without a copy if it is on the CPU and not cast."""
        live = self.tensors[int(path)]
        elements = live.elements(start, min(stop, start + STORE_BYTES))
        return bytes_of(elements.to("cpu", live.dtype).contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
