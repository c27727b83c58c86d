"""Live tensors as a source of bytes besides files, so that saves use the same engine as merges."""

from __future__ import annotations

from typing import Any

import torch

from llmtailor.checkpoint.layout import Copy
from llmtailor.checkpoint.placement import Extent
from llmtailor.formats.partial.write import Entry

SOURCE = "live"
"""The name of the source in plans"""

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


class LiveTensors:
    """The tensors of a save, on any device. Implements `engine.streams.Store`; paths are numbers."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def entry(self, key: str, tensor: torch.Tensor) -> Entry:
        """Return an entry of a partial checkpoint's file, filled from a tensor in the order of its elements."""
        flat = tensor.detach().reshape(-1)
        content: tuple[Copy, ...] = ()
        if flat.numel():
            extent = Extent(str(len(self.tensors)), 0, flat.numel() * flat.element_size())
            self.tensors.append(flat)
            content = (Copy(extent),)
        return Entry(key, DTYPES[tensor.dtype], tuple(tensor.shape), content)

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Return bytes of a tensor, without a copy if it is on the CPU. Both ends are multiples of the item size."""
        flat = self.tensors[int(path)]
        itemsize = flat.element_size()
        return bytes_of(flat[start // itemsize : stop // itemsize].to("cpu").contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
