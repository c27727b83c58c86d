"""Tensors of a live training: the names of their dtypes in files, and where they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from llmtailor.model import dtypes

TORCH: Mapping[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in dtypes.DTYPES.items()}
DTYPES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}
"""torch dtype -> its name in safetensors files"""


def not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that is called, and not compiled, if the optimizer's step is."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call, no-any-return]


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, or another tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; of a DTensor, that of this rank's part."""
    return local_of(tensor).untyped_storage().data_ptr()


def version_of(tensor: torch.Tensor) -> int:
    """Return what grows with each write that torch sees."""
    return 0 if tensor.is_inference() else tensor._version


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
