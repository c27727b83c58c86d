"""Whether frozen params are still what the file of an earlier save holds, so that saves can share it.

torch's version counter, the address and a checksum of a sample are compared while training waits. They miss a change of
a few elements through ``.data``, so the whole tensors are compared in the background, before the save is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from llmtailor.background.snapshot import CHANGE_EARLIER
from llmtailor.errors import StorageError, some
from llmtailor.live.tensors import bytes_of, local_of, version_of
from llmtailor.live.training import FrozenFile
from llmtailor.storage.checksums import crc32

_SAMPLE_BYTES = 1 << 20
_CHUNK = 1 << 22
"""Elements of a GPU tensor that are multiplied at once, which takes 64 MB"""


@dataclass(frozen=True, slots=True)
class _Look:
    mark: tuple[Any, ...]
    """Changes with every write that torch sees"""
    sample: int
    digest: int | None
    """Checksum of the whole tensor; None before the first save"""


class FrozenParams:
    """What a saver knows of the frozen params of one rank.

    1) ``look(frozen)`` while training waits. 2) ``check(frozen, digests)`` once the tensors are copied, or in the
    thread that links to the file of an earlier save.
    """

    def __init__(self, frozen: FrozenFile | None) -> None:
        tensors = frozen.tensors if frozen is not None else {}
        self._known = {key: _Look(_mark(tensor), _sample(tensor), None) for key, tensor in tensors.items()}
        self._unseen: set[str] = set()
        """Those that were changed in ways that torch does not see"""

    def look(self, frozen: FrozenFile | None) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return a checksum of each tensor, by the keys of the file, and those that changed since the last call."""
        known, self._known, moving = self._known, {}, []
        for key, tensor in sorted(frozen.tensors.items()) if frozen is not None else ():
            last, mark, sample = known.get(key), _mark(tensor), _sample(tensor)
            is_same = last is not None and (last.mark, last.sample) == (mark, sample) and key not in self._unseen
            digest = last.digest if is_same and last is not None and last.digest is not None else digest_of(tensor)
            if last is not None and (last.sample != sample or last.digest not in (None, digest)):
                moving.append(key)
            self._known[key] = _Look(mark, sample, digest)
        return {key: look.digest for key, look in self._known.items() if look.digest is not None}, tuple(moving)

    def check(self, frozen: FrozenFile, digests: Mapping[str, int], *, is_copied: bool) -> None:
        """Raise StorageError for tensors that are no longer those of which `look` returned the ``digests``.

        If they were not copied but are in an older file, what torch sees of a later change is no error: then the tensor
        was the same when the save began.
        """
        unlike = []
        for key, tensor in frozen.tensors.items():
            is_known = not is_copied and (key in self._unseen or self._known[key].mark != _mark(tensor))
            if not is_known and digest_of(tensor) != digests[key]:
                unlike.append(key)
        if unlike:
            self._unseen.update(key for key in unlike if self._known[key].mark == _mark(frozen.tensors[key]))
            what = f"frozen params changed outside optimizer.step() during the save, or through .data: {some(unlike)}"
            raise StorageError.at("saving", what, CHANGE_EARLIER)


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = local_of(tensor)
    return local.data_ptr(), version_of(local), tuple(local.shape), local.dtype


def _sample(tensor: torch.Tensor) -> int:
    flat = local_of(tensor).detach().reshape(-1)
    stride = max(1, flat.numel() * flat.element_size() // _SAMPLE_BYTES)
    sample = flat[::stride].to("cpu").contiguous()
    return crc32(bytes_of(sample), crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode()))


def digest_of(tensor: torch.Tensor) -> int:
    """Return a checksum of all bytes of a tensor, and of its shape and dtype: computed where the tensor is."""
    local = local_of(tensor).detach()
    head = crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if local.device.type == "cpu":
        return crc32(bytes_of(local.reshape(-1).contiguous()), head)
    stream = _stream(local.device) if local.device.type == "cuda" else None
    if stream is not None:  # what training has started, such as a write, may still be running
        stream.wait_stream(torch.cuda.current_stream(local.device))
    with torch.cuda.stream(stream):
        content = local.reshape(-1).contiguous().view(torch.uint8)
        if content.storage_offset() % 4:
            content = content.clone()
        whole, factors, total = len(content) // 4 * 4, _factors(local.device), 0
        chunks = torch.split(content[:whole].view(torch.int32), _CHUNK)
        sums = [(chunk.long() * factors[: len(chunk)]).sum() for chunk in chunks if len(chunk)]
        for value in torch.stack(sums).tolist() if sums else ():
            total = (total * 0x9E3779B97F4A7C15 + value) % (1 << 64)
        return crc32(bytes(content[whole:].tolist()) + total.to_bytes(8, "little"), head)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all checksums: the allocator keeps memory for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return odd random numbers, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 63), (1 << 63) - 1, (_CHUNK,), generator=generator) | 1).to(device)
