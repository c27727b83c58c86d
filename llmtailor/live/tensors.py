"""Tensors of a live training: the names of their dtypes in files, and where they are in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that is called, and not compiled, if the optimizer's step is."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call, no-any-return]


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; of a DTensor, that of this rank's part."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().data_ptr()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
