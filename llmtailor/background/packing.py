"""The tensors of a save: which bytes of a file each is, and how their elements are cast or rounded to these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmtailor.checkpoint.layout import Copy
from llmtailor.checkpoint.placement import Extent
from llmtailor.formats.partial.json_trees import BundleEntry
from llmtailor.live.tensors import DTYPES, TORCH, bytes_of
from llmtailor.model.dtypes import BLOCKS, D16, F24, ITEMSIZE, PACKED, size_of
from llmtailor.storage import rounding, rounding_torch

SOURCE = "live"
"""The name of the source in plans"""
STORE_BYTES = 32 << 20
"""Bytes read at once; for GPU tensors, the additional CPU memory"""
GPU_ELEMENTS = 1 << 22
"""Elements rounded at once on a GPU: whole blocks. 16 million took 0.5 GB of its memory, and 1 million 42 MB, but three
times as long, because Python starts the kernels."""
ANY_STEP = -1
"""`LiveTensor.written_with` of a tensor that any step of the training may change"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A tensor of a save."""

    flat: torch.Tensor
    """One dimension, on any device"""
    dtype: torch.dtype
    """Dtype in the file; elements of another dtype are cast"""
    packed: str = ""
    """One of `dtypes.PACKED` that its fp32 elements are written as, empty if they are not; ``dtype`` is uint8 then"""
    written_with: int
    """Address of the storage of the master weights with which the optimizer writes this tensor; `ANY_STEP` for frozen
    params, which a user's code may change at each step; 0 for a private copy."""
    base: torch.Tensor | None = None
    """In host memory, of `dtypes.D16`: the bytes of the masters that it differs from, as `dtypes.F24`; of
    `dtypes.F24`: where to keep its bytes, see `BaseRecordingStore`"""

    @property
    def is_rounded_later(self) -> bool:
        """Whether a snapshot copies its elements as they are, and rounds them when they are written: the copy is what
        the optimizer's next step waits for. Of a GPU, fewer bytes are faster to copy."""
        return self.packed in PACKED and self.flat.device.type == "cpu"

    @property
    def block_bytes(self) -> int:
        """Bytes of the elements that are rounded together"""
        return size_of(self.packed, BLOCKS[self.packed].elements if self.packed in BLOCKS else 1) if self.packed else 1

    @property
    def num_bytes(self) -> int:
        numel = self.flat.numel()
        return size_of(self.packed, numel) if self.packed else numel * self.dtype.itemsize

    def fill(self, start: int, stop: int, room: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Fill ``room`` with a range of bytes, whose ends are multiples of the item size."""
        if not self.packed:
            itemsize = self.dtype.itemsize
            elements = self.flat[start // itemsize : stop // itemsize]
            is_alike = (elements.device.type, elements.dtype) == ("cpu", self.dtype)
            if is_alike and self.dtype.is_floating_point and elements.is_contiguous():  # complex ones may be conjugated
                np.copyto(room.numpy(), elements.view(torch.uint8).numpy())  # faster than torch's
                return
            room.view(self.dtype).copy_(elements, non_blocking=non_blocking)
            return
        block = BLOCKS.get(self.packed)
        numel, size = (block.elements, block.num_bytes) if block else (1, ITEMSIZE[self.packed])
        at = start
        while at < stop:
            first = at // size
            last = max(stop // size, first + 1) if at % size == 0 else first + 1
            end = min(last * size, self.num_bytes)
            some, until = slice(first * numel, last * numel), min(end, stop)
            target = room[at - start : until - start]
            if at % size == 0 and until == end:
                self._pack(some, target, non_blocking=non_blocking)
            else:  # the range cuts this block
                whole = torch.empty(end - first * size, dtype=torch.uint8, device=self.flat.device)
                self._pack(some, whole)
                target.copy_(whole[at - first * size :][: len(target)], non_blocking=non_blocking)
            at = until

    def _pack(self, some: slice, room: torch.Tensor, *, non_blocking: bool = False) -> None:
        if self.flat.device.type == "cpu":
            self.round(self.flat[some].contiguous(), some.start, room)
            return
        end = min(some.stop, self.flat.numel())
        for begin in range(some.start, end, GPU_ELEMENTS):
            elements = self.flat[begin : min(begin + GPU_ELEMENTS, end)]
            octets = rounding_torch.pack(elements, self.packed, self._base_of(begin, len(elements)))
            at = size_of(self.packed, begin - some.start)
            room[at : at + len(octets)].copy_(octets, non_blocking=non_blocking)

    def round(self, elements: torch.Tensor, begin: int, room: torch.Tensor) -> None:
        """Fill ``room`` with elements in host memory, of which ``begin`` is the first, rounded."""
        base = self._base_of(begin, len(elements))
        rounding.pack(elements.numpy(), self.packed, room.numpy(), None if base is None else base.numpy())

    def _base_of(self, begin: int, numel: int) -> torch.Tensor | None:
        if self.packed != D16:
            return None
        assert self.base is not None, "what it differs from"
        return self.base[ITEMSIZE[F24] * begin : ITEMSIZE[F24] * (begin + numel)]


class LiveTensors:
    """The tensors of a save. Implements `copying.streams.Store`; paths are numbers."""

    def __init__(self) -> None:
        self.tensors: list[LiveTensor] = []

    def entry(
        self,
        key: str,
        tensor: torch.Tensor,
        dtype: str | None = None,
        written_with: int = 0,
        storage: str | None = None,
        base: torch.Tensor | None = None,
    ) -> BundleEntry:
        """Return an entry of a partial checkpoint's file, filled from a tensor in the order of its elements.

        In its plan, `SOURCE` is the first source. ``dtype`` is that in the file, or one of `dtypes.PACKED`. ``storage``
        is a name of the tensor's storage if the file is to have tensors as they lie there; names are in the order of
        the file. ``base`` is that of `LiveTensor`.
        """
        flat = tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)
        packed = dtype if dtype in PACKED else ""
        live = LiveTensor(
            flat=flat,
            dtype=torch.uint8 if packed else TORCH.get(dtype or "", flat.dtype),
            packed=packed,
            written_with=written_with,
            base=base,
        )
        content = self.add(live)
        lies = None
        if storage is not None and content and live.dtype == flat.dtype:
            begin = int(flat.storage_offset()) * flat.element_size()
            lies = Extent(storage, begin, begin + live.num_bytes)
        return BundleEntry(key, packed or DTYPES[live.dtype], tuple(tensor.shape), content, lies)

    def add(self, live: LiveTensor) -> tuple[Copy, ...]:
        """Return the bytes of a tensor as pieces of a file."""
        if not live.num_bytes:
            return ()
        self.tensors.append(live)
        return (Copy(Extent(str(len(self.tensors) - 1), 0, live.num_bytes), source=0),)

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Return bytes of a tensor, without a copy if it is on the CPU and not cast."""
        live = self.tensors[int(path)]
        stop = min(stop, start + STORE_BYTES)
        if live.packed or live.flat.dtype != live.dtype or live.flat.device.type != "cpu":
            room = torch.empty(stop - start, dtype=torch.uint8)
            live.fill(start, stop, room)
        else:
            itemsize = live.dtype.itemsize
            room = live.flat[start // itemsize : stop // itemsize].contiguous()
        return bytes_of(room)
