"""Copies of live tensors in host memory, taken while training continues.

Masters and moments change only in the optimizer's step, so forward and backward may run while they are copied. Two
threads share a ring of host memory: one copies pieces of tensors into it, and the writer of the file takes them out in
the same order. If the ring is full, the copying waits for the writer. The optimizer's step waits for what it is about
to write and what is not copied yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from llmtailor.background.arena import Arena
from llmtailor.checkpoint.layout import BLOCK_BYTES, Copy, FileLayout
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.copying.streams import Store, huge_pages
from llmtailor.errors import Problem, StorageError
from llmtailor.formats.partial.json_trees import BundleEntry
from llmtailor.live.tensors import DTYPES, TORCH, bytes_of, not_compiled, storage_of
from llmtailor.model.dtypes import BLOCKS, D16, F24, ITEMSIZE, PACKED, Q8, Q8_ROOT, numel_of, size_of
from llmtailor.storage import casts

SOURCE = "live"
"""The name of the source in plans"""
STORE_BYTES = 32 << 20
"""Bytes read at once; for GPU tensors, the additional CPU memory"""
GPU_ELEMENTS = 1 << 22
"""Elements rounded at once on a GPU: whole blocks. 16 million took 0.5 GB of its memory, and 1 million 42 MB, but three
times as long, because Python starts the kernels."""
ANY_STEP = -1
"""`LiveTensor.written_with` of a tensor that any step of the training may change"""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of a save."""

    flat: torch.Tensor
    """One dimension, on any device"""
    dtype: torch.dtype
    """Dtype in the file; elements of another dtype are cast"""
    packed: str
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
                casts.copy(elements.view(torch.uint8).numpy(), room.numpy())
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
                device = self.flat.device if self.packed != D16 else None
                made = torch.empty(end - first * size, dtype=torch.uint8, device=device)
                self._pack(some, made)
                target.copy_(made[at - first * size :][: len(target)], non_blocking=non_blocking)
            at = until

    def _pack(self, some: slice, room: torch.Tensor, *, non_blocking: bool = False) -> None:
        if self.packed != D16 and self.flat.device.type != "cpu":
            elements, size = self.flat[some], size_of(self.packed, GPU_ELEMENTS)
            for number, begin in enumerate(range(0, len(elements), GPU_ELEMENTS)):
                made = pack_by_torch(elements[begin : begin + GPU_ELEMENTS], self.packed)
                room[number * size :][: len(made)].copy_(made, non_blocking=non_blocking)
            return
        self.round(self.flat[some].cpu().contiguous(), some.start, room)

    def round(self, elements: torch.Tensor, begin: int, room: torch.Tensor) -> None:
        """Fill ``room`` with elements in host memory, of which ``begin`` is the first, rounded."""
        values, target = elements.numpy(), room.numpy()
        if self.packed == D16:
            assert self.base is not None, "what it differs from"
            size = ITEMSIZE[F24]
            base = self.base[size * begin : size * (begin + len(values))]
            casts.pack_differences(values, base.numpy(), target)
        else:
            casts.pack(values, self.packed, target)


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

        In its plan, `SOURCE` is the first source. ``dtype`` is that in the file, or one of `dtypes.PACKED`, or, for
        tensors in host memory that go to a file of differences, `dtypes.D24`. ``storage``
        is a name of the tensor's storage if the file is to have tensors as they lie there; names are in the order of
        the file. ``base`` is that of `LiveTensor`.
        """
        flat = tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)
        packed = dtype if dtype in PACKED else ""
        live = LiveTensor(
            flat, torch.uint8 if packed else TORCH.get(dtype or "", flat.dtype), packed, written_with, base
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


def pack_by_torch(elements: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return what `casts.pack` returns, on any device."""
    if dtype == F24:
        octets = elements.contiguous().view(torch.uint8).view(-1, 4)
        kept = octets[:, 1:].clone()
        kept[:, 0] |= (octets[:, 0] != 0).to(torch.uint8)
        return kept.view(-1)
    is_root, most = dtype == Q8_ROOT, 255 if dtype == Q8_ROOT else 127
    size = BLOCKS[dtype].elements
    values = torch.nn.functional.pad(elements, (0, -elements.numel() % size)).view(-1, size)
    rows = values.double().sqrt().float() if is_root else values  # in fp32, torch rounds some roots wrongly on CPUs
    largest = rows.abs().amax(1, keepdim=True)
    unit = largest / largest.new_full((), most)  # CUDA multiplies by the reciprocal of a number that is not on the GPU
    codes = (rows / torch.where(unit > 0, unit, 1)).round_().nan_to_num_(0, 0, 0).clamp_(-most, most)
    if is_root:
        codes = torch.where(rows > 0, codes.clamp_(min=1), 0)
    unit = torch.where(unit.isfinite(), unit, torch.nan)
    records = torch.cat((unit.view(torch.uint8), codes.to(torch.int16).to(torch.uint8)), 1)
    return records.view(-1)[: size_of(dtype, elements.numel())]


class DeltaBases:
    """What masters are differences from: their `dtypes.F24` bytes as of the newest save that held them with their
    moments, in host memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._coming: dict[tuple[str, int], torch.Tensor] = {}

    def of(self, name: str, begin: int, numel: int) -> torch.Tensor | None:
        found = self._kept.get((name, begin))
        return found if found is not None and found.numel() == numel * ITEMSIZE[F24] else None

    def coming(self, name: str, begin: int, numel: int) -> torch.Tensor:
        """Return room for those of the save that is being made."""
        size = numel * ITEMSIZE[F24]
        # read at each save: with small pages, looking these up takes a while
        room = (
            torch.frombuffer(huge_pages(size), dtype=torch.uint8)
            if size >= _LARGE
            else torch.empty(size, dtype=torch.uint8)
        )
        self._coming[name, begin] = room
        return room

    def record_outcome(self, is_published: bool) -> None:
        """Keep those of that save, or drop them if it has failed."""
        self._kept |= self._coming if is_published else {}
        self._coming = {}


@dataclass(frozen=True, slots=True)
class BaseRecordingStore:
    """The tensors of a save, as they are read from another store; keeps those that later saves differ from.

    Raises StorageError for moments that 8 bits can't hold.
    """

    live: LiveTensors
    store: Store

    def read(self, path: str, start: int, stop: int) -> memoryview:
        data, live = self.store.read(path, start, stop), self.live.tensors[int(path)]
        if live.packed in (Q8, Q8_ROOT) and casts.has_lost_blocks(data, live.packed, start):
            raise StorageError(NOT_ROUNDABLE)
        if live.packed == F24 and live.base is not None:
            bytes_of(live.base)[start : start + len(data)] = data
        return data


CHUNK_BYTES = 16 << 20
_LARGE = 4 << 20
"""Bytes of two huge pages"""
_WAKE_UP_S = 0.5
CHANGED = "a tensor changed outside optimizer.step() while it was being saved"
STUCK = Problem(
    "saving",
    "save aborted: no write progress within write_timeout",
    "check the disk, or the network file system",
)
"""Why a save is given up while training runs"""
NOT_ROUNDABLE = Problem(
    "saving",
    "a moment has an element that is infinite, not a number, or a negative second moment, which 8 bits can't hold",
    "the next save holds moments exactly",
    Code.NOT_ROUNDABLE,
)
CHANGE_EARLIER = "change weights and optimizer states only before a save, or set background=False"


@dataclass(frozen=True, slots=True)
class _Chunk:
    path: str
    start: int
    stop: int
    content: torch.Tensor
    """A range of the arena"""
    taken: int
    """Bytes of the arena that it occupies, with what was left free before it"""
    ready: Any
    """The CUDA event of its copy; None on the CPU"""


class Snapshot:
    """The tensors of a save as they were when it was made. Implements `copying.streams.Store` for one reading thread.

    Args:
        live: the tensors.
        files: the layouts of the files, in the order in which they will be written, each from front to back.
        arena: not in use by another snapshot.
        stuck_after: seconds without progress of the writer after which a full ring no longer delays training. The save
            is given up then.
        began: when the save began, in seconds of the monotonic clock.
        check: called when the tensors of `ANY_STEP` are copied, before a step of the optimizer may begin; what it
            raises makes the save fail.
    """

    def __init__(
        self,
        live: LiveTensors,
        files: Iterable[FileLayout],
        arena: Arena,
        stuck_after: float,
        began: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._start = dict(_copies(files))
        self._order = [*self._start]
        self._live = live
        self.arena = arena
        self._stuck_after = stuck_after
        self._check = check
        self._last = {live.tensors[number].written_with: at for at, number in enumerate(self._order)}
        self._checked_at = self._last.get(ANY_STEP, len(self._order) - 1)
        self._versions = [_version(one.flat) for one in live.tensors]
        self._unsure = deque(
            at for at, number in enumerate(self._order) if copies_asynchronously(live.tensors[number].flat)
        )
        """Of ``_order``: those on a GPU, from when their copies are started until it is known that they did not change
        before these were made"""
        self._rounded = torch.empty(0, dtype=torch.uint8)
        """Where elements are rounded in the thread that writes them"""
        self._state = threading.Condition()
        self._ready: deque[_Chunk] = deque()
        self._reading: _Chunk | None = None
        self._head = self._tail = self._copied = 0
        self._given_up = False
        self._error: BaseException | None = None
        self._streams = _Streams({one.flat.device for one in live.tensors}, arena.streams)
        self._began = began
        self.progress = time.monotonic()
        """When the last piece was copied or taken out, in seconds of the monotonic clock"""
        self.copy_s = 0.0
        """Seconds until everything was copied"""
        self.stall_s = 0.0
        """Seconds for which the optimizer's step waited"""
        self.high_water = 0
        """The most bytes of the arena that were in use at once"""
        self._thread = threading.Thread(target=self._run, name="llmtailor-copy", daemon=True)

    def start(self) -> None:
        """Start copying."""
        self._thread.start()

    @property
    def is_copied(self) -> bool:
        return self._copied == len(self._order)

    def wait(self, written_with: Collection[int] | None = None) -> None:
        """Wait until the optimizer may write everything, or what it writes with masters in these storages.

        In both cases the tensors of `ANY_STEP` are copied then: what changes them may follow.
        """
        last = len(self._order) - 1
        if written_with is not None:
            last = max(self._last.get(storage, -1) for storage in (*written_with, ANY_STEP))
        began = time.monotonic()
        with self._state:
            while self._copied <= last and self._error is None:
                self._state.wait(_WAKE_UP_S)
                if time.monotonic() - self.progress > self._stuck_after:
                    self._give_up(STUCK)
            self._streams.wait_for_copies()
            self._check_unchanged(len(self._order) - 1 if self.is_copied else last)
        self.stall_s += time.monotonic() - began

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Return the next bytes, at most up to ``stop``; the previous ones become invalid.

        Raises StorageError if the save was given up, or what the copying raised.
        """
        with self._state:
            self._release()
            while not self._ready and self._error is None:
                self._state.wait()
            if self._error is not None:
                raise self._error
            piece = self._reading = self._ready.popleft()
        assert (piece.path, piece.start) == (path, start) and piece.stop <= stop, "files are written in order"
        if piece.ready is not None:
            piece.ready.synchronize()
        live = self._live.tensors[int(path)]
        if not live.is_rounded_later:
            return bytes_of(piece.content)
        if len(self._rounded) < piece.stop - start:
            self._rounded = torch.empty(piece.stop - start, dtype=torch.uint8)
        room = self._rounded[: piece.stop - start]
        live.round(piece.content.view(torch.float32), numel_of(live.packed, start), room)
        return bytes_of(room)

    def conclude(self) -> None:
        """Wait for the last check, once everything is read. Raises what the copying, or a check, raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self, why: Problem = STUCK) -> None:
        """Stop copying and reading."""
        with self._state:
            self._give_up(why)

    def close(self) -> None:
        """Stop copying, and free the arena. Call it when nothing is read any more."""
        self.give_up()
        if self._thread.ident is not None:
            self._thread.join()
        self._streams.finish()
        with self._state:
            self._unsure.clear()
            self._live = LiveTensors()  # whose tensors may be copies

    def _give_up(self, why: Problem) -> None:
        if self._error is None and not (self.is_copied and not self._ready):
            self._error = StorageError(why)
        self._given_up = True
        self._state.notify_all()

    def _release(self) -> None:
        if self._reading is not None:
            self._tail += self._reading.taken
            self._reading = None
            self.progress = time.monotonic()
            self._state.notify_all()

    def _check_unchanged(self, last: int) -> None:
        """Let the save fail if a tensor on a GPU, up to this one of ``_order``, has changed until now: before its copy
        was made, maybe. Called before a step of the optimizer may change it, and when all copies are made."""
        while self._unsure and self._unsure[0] <= last:
            try:
                self._check_version(self._order[self._unsure.popleft()])
            except StorageError as error:
                self._error = self._error or error
                self._state.notify_all()

    def _check_version(self, number: int) -> None:
        live = self._live.tensors[number]
        # ZeRO-3 writes to frozen params what they are already; `check` compares those
        if live.written_with not in (0, ANY_STEP) and _version(live.flat) != self._versions[number]:
            raise StorageError.at("saving", CHANGED, CHANGE_EARLIER)

    def _run(self) -> None:
        try:
            for at, number in enumerate(self._order):
                self._copy(number)
                if at == self._checked_at:
                    self._streams.finish()  # a copy that has only been started does not see a change yet
                    self._check()
                with self._state:
                    self._copied += 1
                    self._state.notify_all()
            self._streams.finish()
            with self._state:
                self._check_unchanged(len(self._order) - 1)
            self.copy_s = time.monotonic() - self._began
        except BaseException as error:
            with self._state:
                self._error = self._error or error
                self._state.notify_all()

    def _copy(self, number: int) -> None:
        live = self._live.tensors[number]
        exact = replace(live, dtype=live.flat.dtype, packed="") if live.is_rounded_later else live
        # blocks of a file lie in memory as on the disk, those that are rounded behind it need not
        inside = self._start[number] if exact is live else 0
        at = begin = 0
        while at < live.num_bytes:
            offset, length, taken = self._room(exact, begin, inside + begin)
            content = self.arena.memory[offset : offset + length]
            ready = self._streams.copy(exact, begin, content)
            begin += length
            stop = begin if exact is live else size_of(live.packed, begin // exact.dtype.itemsize)
            chunk = _Chunk(str(number), at, stop, content, taken, ready)
            with self._state:
                self._ready.append(chunk)
                self._head += chunk.taken
                self.high_water = max(self.high_water, self._head - self._tail)
                self.progress = time.monotonic()
                self._state.notify_all()
            at = chunk.stop
        self._check_version(number)

    def _wait_for(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` of the arena are free. Raises the error that ended the save."""
        with self._state:
            while self.arena.num_bytes - (self._head - self._tail) < num_bytes and not self._given_up:
                self._state.wait()
            if self._given_up:
                raise self._error or StorageError.at("saving", "save aborted", "see the log")

    def _room(self, live: LiveTensor, start: int, at: int) -> tuple[int, int, int]:
        """Return (offset, length, bytes taken) of free memory for a tensor's bytes from ``start`` on, which come next
        in a file, at byte ``at``.

        Its offset in a memory page equals its offset in a block of the file, so that the disk can take whole blocks
        from there. That also aligns it for its dtype.
        """
        left = live.num_bytes - start
        size = self.arena.num_bytes
        skipped = (at - self._head) % BLOCK_BYTES
        position = (self._head + skipped) % size
        length = min(left, CHUNK_BYTES, size // 4 // BLOCK_BYTES * BLOCK_BYTES, size - position)
        if length < left and length > (beyond := (at + length) % BLOCK_BYTES):
            length -= beyond  # so that no block is split, nor elements that are rounded together
            lengths = range(length, max(length - live.block_bytes * BLOCK_BYTES, 0), -BLOCK_BYTES)
            length = next((some for some in lengths if (start + some) % live.block_bytes == 0), length)
        self._wait_for(skipped + length)
        return position, length, skipped + length


def _copies(files: Iterable[FileLayout]) -> Iterator[tuple[int, int]]:
    """Yield (number, position in the file) of the tensors, as they follow each other in the files."""
    for file in files:
        at = 0
        for piece in file.pieces:
            if isinstance(piece, Copy):
                yield int(piece.extent.path), at
            at += piece.num_bytes


class _Streams:
    """Copies from any device: from a GPU on a stream of their own, which the next optimizer step waits for."""

    def __init__(self, devices: Iterable[torch.device], streams: dict[torch.device, torch.cuda.Stream]) -> None:
        self._of: dict[torch.device, torch.cuda.Stream] = {}
        for device in (device for device in devices if device.type == "cuda"):
            if device not in streams:
                streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._of[device] = streams[device]
            # what the calling thread started before this save, such as a step, may still be running
            streams[device].wait_stream(torch.cuda.current_stream(device))

    def copy(self, live: LiveTensor, start: int, room: torch.Tensor) -> Any:
        """Fill ``room`` from a byte on; return an event that is reached when it is done, None if it is done."""
        stream = self._of.get(live.flat.device)
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            live.fill(start, start + len(room), room, non_blocking=stream is not None)
        return stream.record_event() if stream is not None else None

    def wait_for_copies(self) -> None:
        """Let what the calling thread starts next on its streams wait for the copies so far."""
        for device, stream in self._of.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def finish(self) -> None:
        for stream in self._of.values():
            stream.synchronize()


def copies_asynchronously(tensor: torch.Tensor) -> bool:
    """Return whether a copy is made some time after it was started."""
    return tensor.is_cuda


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class StepBarrier:
    """Makes optimizers wait, before they write, for the snapshot that is being taken.

    torch calls the hook before ``step`` of every optimizer of the process, also before DeepSpeed's updates: once
    per param group (ZeRO-1/2) or sub-group (ZeRO-3), each time with the masters that it is going to write. The Trainer
    has no callback there: with DeepSpeed its ``on_pre_optimizer_step`` comes after the update. Without ``waits``
    there is no hook: saves stop training anyway.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._snapshot: Snapshot | None = None
        self._optimizers: Collection[object] = ()
        self._masters: frozenset[int] = frozenset()
        self._hook = register_optimizer_step_pre_hook(not_compiled(self._before_step)) if waits else None

    def arm(self, snapshot: Snapshot, optimizers: Collection[object], masters: frozenset[int]) -> None:
        """Delay the next steps of ``optimizers``, and of any other that writes masters in these storages, until it is
        safe."""
        self._optimizers = optimizers
        self._masters = masters
        self._snapshot = snapshot

    def wait_copied(self) -> None:
        """Wait until everything is copied."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def wait_frozen_copied(self) -> None:
        """Wait until the tensors of `ANY_STEP` are copied."""
        if self._snapshot is not None:
            self._snapshot.wait(())

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _written_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the storages of an optimizer's params; 0 for one that has none of its own, as some subclasses do."""
        written = set()
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            try:
                if isinstance(param, torch.Tensor) and param.numel():
                    written.add(storage_of(param))
            except RuntimeError:  # this is the user's training: nothing may escape here
                written.add(0)
        return written

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        written = self._written_by(optimizer)
        is_ours = any(optimizer is one for one in self._optimizers)
        if not is_ours and not written & self._masters:
            return
        is_last = snapshot.is_copied  # asked before: a GPU's stream waits only for copies that have been started
        # a storage that was not there at the save: the states may have moved, so nothing is known
        snapshot.wait(written if written <= self._masters else None)
        if is_last:
            self._snapshot = None
