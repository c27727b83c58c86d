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
from llmtailor.background.packing import ANY_STEP, LiveTensor, LiveTensors
from llmtailor.checkpoint.layout import BLOCK_BYTES, Copy, FileLayout
from llmtailor.errors import Problem, StorageError
from llmtailor.live.tensors import bytes_of, not_compiled, storage_of, version_of
from llmtailor.model.dtypes import numel_of, size_of

CHUNK_BYTES = 16 << 20
_WAKE_UP_S = 0.5
CHANGED = "a tensor changed outside optimizer.step() while it was being saved"
STUCK = Problem(
    "saving",
    "save aborted: no write progress within write_timeout",
    "check the disk, or the network file system",
)
"""Why a save is given up while training runs"""
CHANGE_EARLIER = "change weights and optimizer states only before a save, or set background=False"


@dataclass(frozen=True, slots=True, kw_only=True)
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

    1) Made by the training thread between two steps. 2) The saving thread calls `start`, `read` for each piece, and
    `conclude`. 3) Meanwhile the training thread calls `wait` before a step of the optimizer; any thread may `give_up`.
    4) The saving thread calls `close`.

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
        self._versions = [version_of(one.flat) for one in live.tensors]
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
        if live.written_with not in (0, ANY_STEP) and version_of(live.flat) != self._versions[number]:
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
            chunk = _Chunk(path=str(number), start=at, stop=stop, content=content, taken=taken, ready=ready)
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
    """Return whether copies of this tensor are asynchronous."""
    return tensor.is_cuda


class StepBarrier:
    """Makes optimizers wait, before they write, for the snapshot that is being taken.

    torch calls the hook before ``step`` of every optimizer of the process, also before DeepSpeed's updates: once
    per param group (ZeRO-1/2) or sub-group (ZeRO-3), each time with the masters that it is going to write. The Trainer
    has no callback there: with DeepSpeed its ``on_pre_optimizer_step`` comes after the update. Without ``waits``
    there is no hook: saves stop training anyway.

    1) `arm` with each save. 2) Steps wait by themselves; `wait_copied` and `wait_frozen_copied` do so at other times.
    3) `remove`. All on the training thread.
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
