"""Saves stock checkpoints in the background: what a framework would write with ``torch.save``, in its own files.

The framework builds its state dicts, which refer to live tensors; only the writing is replaced. As in a save of parts,
tensors are copied until the next optimizer step and written while training continues (`background.pending`).

All files of a checkpoint go to a hidden folder beside it, which rank 0 moves there once all ranks have written
theirs. So a checkpoint is there completely or not at all, and one of the same name stays until then.
"""

from __future__ import annotations

import inspect
import logging
import shutil
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from llmtailor.background.options import SAME_FIX, SavingOptions
from llmtailor.background.packing import LiveTensors
from llmtailor.background.pending import PendingSave, Work, save_error
from llmtailor.background.process_exit import finish_at_end
from llmtailor.background.report import SaveReport
from llmtailor.background.saver import BackgroundSaver
from llmtailor.background.writing import Share, check_written
from llmtailor.checkpoint.layout import BLOCK_BYTES, FileLayout
from llmtailor.errors import StorageError, TailorError, TargetError, UsageError
from llmtailor.formats.optimizer_objects import unsupported
from llmtailor.formats.partial.manifest import BundleFact
from llmtailor.live.tensors import DTYPES, local_of, storage_of
from llmtailor.live.torch_training import innermost
from llmtailor.patching import patch_method
from llmtailor.ranks.team import Ranks, check_same
from llmtailor.runs.folder import files_in, link_or_copy
from llmtailor.stock_saving.dcp_writer import LazyWriter
from llmtailor.stock_saving.mirror import StockMirror
from llmtailor.stock_saving.torch_save import (
    Stepped,
    lay_out_saved,
    lay_out_saved_tensors,
    masters_of,
    stepped_storages,
)
from llmtailor.storage.local import Lock, LockHeld, check_own, fsync_file, fsync_folder, replace_folder

logger = logging.getLogger("llmtailor.saving")
_LOCK = "lock"
"""In a hidden folder: held while the process lives that saves there"""
_WRITERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)
"""Module, and what writes a file in it"""
_ROOM_BYTES = 4 << 20
_savers: weakref.WeakSet[StockSaver] = weakref.WeakSet()


def finish_all() -> None:
    """Wait for the saves in progress of this process, before something is loaded."""
    for saver in list(_savers):
        saver.finish()


def finish_before(owner: Any, name: str) -> None:
    """Make a framework's way of loading wait for the saves in progress first."""

    @patch_method(owner, name)
    def loading(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        finish_all()
        return load(*args, **kwargs)


@dataclass(slots=True, kw_only=True)
class _OpenSave:
    """A save whose files are being handed over."""

    save_id: str
    began: float
    step: int
    folder: Path
    staging: Path
    stepped: Stepped
    complete: Callable[[], None]
    """On rank 0: called once the folder is in place"""
    live: LiveTensors = field(default_factory=LiveTensors)
    files: list[FileLayout] = field(default_factory=list)
    refusal: TailorError | None = None


class _Record:
    """Implements `background.pending.SaveRecord`."""

    mirror: StockMirror | None = None
    """On rank 0: where finished checkpoints are copied to"""

    def __init__(self, ranks: Ranks, options: SavingOptions) -> None:
        self.ranks, self.store, self.write_timeout = ranks, ranks.store(), options.write_timeout
        if options.mirror is not None:
            ranks.run_on_first(partial(self._open_mirror, options.mirror))
        self.locks: dict[Path, Lock] = {}
        """Hidden folder -> its lock, on rank 0"""

    def _open_mirror(self, url: str) -> None:
        self.mirror = StockMirror(url)

    def claim(self, hidden: Path) -> None:
        """Make a hidden folder anew.

        Raises StorageError if another process saves there, TargetError for a link of that name, or OSError.
        """
        check_own(hidden)
        if hidden.exists() and not _sweep(hidden):
            raise StorageError.at(hidden, "another process is saving the same checkpoint", "save to another folder")
        hidden.mkdir(parents=True)
        self.locks[hidden] = lock = Lock(hidden / _LOCK)
        lock.acquire()

    def dispose(self, hidden: Path) -> None:
        """Remove a hidden folder."""
        shutil.rmtree(hidden)
        if lock := self.locks.pop(hidden, None):
            lock.release()

    def begin(self, work: Work) -> None:
        work.folder.mkdir(parents=True, exist_ok=True)

    def remove(self, work: Work) -> None:
        self.dispose(work.folder.parent)

    def published(self, work: Work, report: SaveReport) -> None:
        if self.ranks.is_first:
            what = "%s: saved in %.2f s; training was blocked for %.3f s"
            logger.info(what, report.path, report.publish_s, report.stall_s)
        if self.mirror is not None:
            self.mirror.add(report.path)

    def log(self, line: Mapping[str, object]) -> None:
        """Nothing: a stock checkpoint has no log."""


class StockSaver(BackgroundSaver):
    """Saves what a framework hands over. All ranks make the same calls, between two optimizer steps.

    1) `saving` opens a save. 2) In it, `add`, `add_tensors` or `add_file` for each file, or `intercept_writes`. 3) At
    its end, training continues; `finish` waits for the save. 4) `close`::

        with saver.saving(folder, step) as is_saving:
            if is_saving:
                saver.add(state_dict, folder / "optimizer.pt")

    Args:
        model: its trained params are weights that only the optimizers' steps write.
        optimizers: return the optimizers that the framework holds.
        options: how to save.
        writes_unseen: see `live.training.Training.writes_unseen`.
        masters: return masters that the optimizers do not list; this decides the size of the host buffer only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Callable[[], Sequence[object]],
        options: SavingOptions,
        writes_unseen: Callable[[], str | None] = lambda: None,
        masters: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> None:
        self._model, self._held, self._masters, ranks = model, optimizers, masters, Ranks.here()
        self.record: _Record = _Record(ranks, options)
        super().__init__(options, ranks, self.record, lambda: self._why_not() or writes_unseen(), self._needed)
        self.is_closed = False
        self._open: _OpenSave | None = None
        self._swept: set[Path] = set()
        self.pending: PendingSave | None = None
        """The newest save of this process"""
        _savers.add(self)
        finish = weakref.WeakMethod(self._finish_until)  # else a training that is dropped would stay in memory
        finish_at_end(self, lambda until: call(until) if (call := finish()) is not None else None)

    @property
    def open_at(self) -> Path | None:
        """The folder in which files of the open save are written; None if there is none"""
        return self._open.staging if self._open is not None else None

    @contextmanager
    def saving(
        self, folder: Path, step: int, complete: Callable[[], None] = lambda: None, near: Path | None = None
    ) -> Iterator[bool]:
        """Save what is handed over in this context as the checkpoint ``folder``, in the background.

        ``complete`` is called on rank 0 when it is in place. ``near`` is where the hidden folder is made, on the same
        file system: by default beside ``folder``.

        Yields whether there is a save: not if the previous one is still being written and ``when_busy`` is ``skip``, or
        its disk is stuck, or if the hidden folder can't be made. Raises SaveFailed only if saves stop training.
        """
        if not self._open_save(folder.absolute(), step, complete, (near or folder.parent).absolute()):
            yield False
            return
        try:
            yield True
        except BaseException as error:
            assert self._open is not None
            self._open.refusal = save_error(error, self.ranks) if isinstance(error, Exception) else None
            self._close_save(is_refused=True)
            raise
        save = self._close_save()
        if not self._arenas and save.failure is not None:
            raise save.failure

    def place(self, path: str | Path) -> Path:
        """Return where a file or folder of the open save is written; any other path as it is."""
        path = Path(path).absolute()
        if self._open is not None and path.is_relative_to(self._open.folder):
            return self._open.staging / path.relative_to(self._open.folder)
        return path

    def add(self, value: Any, path: str | Path) -> bool:
        """Take over what ``torch.save(value, path)`` would write; return False for a path outside the open save."""
        return self.add_file(path, lambda *more: lay_out_saved(more[0], value, *more[1:]))

    def add_tensors(
        self, tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: Mapping[str, str] | None = None
    ) -> bool:
        """Take over what ``save_file`` of safetensors would write; return False for a path outside the open save, and
        for dtypes that `live.tensors.DTYPES` lacks."""
        if any(one.dtype not in DTYPES for one in tensors.values()):
            return False
        return self.add_file(path, lambda *more: lay_out_saved_tensors(more[0], tensors, metadata, *more[1:]))

    def add_file(self, path: str | Path, lay_out: Callable[[str, LiveTensors, Stepped], FileLayout]) -> bool:
        """Take over a file that is laid out by its name, with tensors that it adds; see `torch_save`."""
        found, at = self._open, self.place(path)
        if found is None or not at.is_relative_to(found.staging):
            return False
        name = at.relative_to(found.staging).as_posix()
        found.files = [one for one in found.files if one.path != name]
        found.files.append(lay_out(name, found.live, found.stepped))
        return True

    @contextmanager
    def intercept_writes(self) -> Iterator[None]:
        """Take over what this thread writes in this context into the open save with ``torch.save``, ``save_file``
        and torch.distributed.checkpoint, also under the names by which libraries have imported them."""
        thread, writers = threading.get_ident(), [(sys.modules.get(module), name) for module, name in _WRITERS]
        stock = [(module, name, getattr(module, name)) for module, name in writers if hasattr(module, name)]

        def hooked(write: Callable[..., Any], add: Callable[..., bool]) -> Callable[..., Any]:
            signature = inspect.signature(write)

            @wraps(write)
            def writing(*args: Any, **kwargs: Any) -> Any:
                value, path, *more = signature.bind(*args, **kwargs).arguments.values()
                is_empty = isinstance(value, Mapping) and not value
                is_ours = threading.get_ident() == thread and isinstance(path, (str, Path)) and not is_empty
                # with more arguments torch.save may write another format
                if not is_ours or (more and add == self.add) or not add(value, path, *more):
                    write(*args, **kwargs)

            return writing

        dcp: Any = torch.distributed.checkpoint if torch.distributed.is_available() else None
        if dcp is not None:
            stock.append((dcp, "FileSystemWriter", dcp.FileSystemWriter))
        adding = {"save": self.add, "FileSystemWriter": None}
        try:
            for module, name, write in stock:
                add = adding.get(name, self.add_tensors)
                setattr(module, name, hooked(write, add) if add is not None else partial(LazyWriter, self))
            yield
        finally:
            for module, name, write in stock:
                setattr(module, name, write)

    def close(self) -> None:
        self.finish()
        if self.record.mirror is not None and not self.is_closed:
            self.record.mirror.close(self.options.write_timeout)
        self.is_closed = True
        super().close()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return torch's optimizers."""
        return [one for one in map(innermost, self._held()) if isinstance(one, torch.optim.Optimizer)]

    def _why_not(self) -> str | None:
        """Return why the optimizers write at other times than in their steps; None if that is not known of them."""
        optimizers = self._optimizers()
        for one in optimizers:
            if problem := unsupported(type(one), one.param_groups):
                return problem.what
        return "the optimizer is not a torch.optim.Optimizer" if len(optimizers) < len(self._held()) else None

    def _needed(self) -> tuple[int, bool]:
        """Return the bytes of masters and two moments, and of the weights."""
        listed = [one for optimizer in self._optimizers() for one in masters_of(optimizer)]
        masters = {storage_of(one): local_of(one) for one in (*self._masters(), *listed)}
        weights = {storage_of(one): local_of(one) for one in self._model.parameters() if one.numel()}
        sizes = [3 * one.numel() * one.element_size() for one in masters.values()]
        sizes += [one.untyped_storage().nbytes() for at, one in weights.items() if at not in masters]
        # small tensors in between, and what is left free so that pieces begin where blocks of the disk do
        room = _ROOM_BYTES + 4 * BLOCK_BYTES * len(sizes)
        return sum(sizes) + room, any(one.is_cuda for one in (*masters.values(), *weights.values()))

    def _open_save(self, folder: Path, step: int, complete: Callable[[], None], near: Path) -> bool:
        began = time.monotonic()
        self._wait_for_room(may_wait=self.options.when_busy == "wait")
        self._collect_finished()
        votes = self.ranks.all_gather({"folder": str(folder), "busy": self._why_busy()})
        check_same(votes, {"folder": (SAME_FIX, UsageError)})
        if why := votes[0]["busy"]:
            logger.warning("step %d: save skipped: the previous save %s", step, why)
            return False
        for save in self._running:
            save.wait_unless_stuck()  # rank 0 knows already that it is published
        self._running = []
        staging = near / f".{folder.name}.llmtailor-saving" / folder.name
        try:
            save_id = self.ranks.run_on_first(lambda: self._make_room(staging))
        except (StorageError, TargetError, OSError) as error:
            logger.warning("the save at step %d failed; training continues without it: %s", step, error)
            return False
        stepped = stepped_storages(self._optimizers(), self._model)
        self._open = _OpenSave(
            save_id=save_id,
            began=began,
            step=step,
            folder=folder,
            staging=staging,
            stepped=stepped,
            complete=complete,
        )
        return True

    def _make_room(self, staging: Path) -> str:
        """Remove what killed saves have left beside this one; return the new save's id."""
        parent = staging.parent.parent
        if parent not in self._swept:
            for left in parent.glob(".*.llmtailor-saving"):
                if not left.is_symlink():
                    _sweep(left)
            self._swept.add(parent)
        self.record.claim(staging.parent)
        staging.mkdir()
        return uuid.uuid4().hex

    def _close_save(self, *, is_refused: bool = False) -> PendingSave:
        found, self._open = self._open, None
        assert found is not None
        report = SaveReport(step=found.step, path=found.folder)
        work = Work(save_id=found.save_id, began=found.began, report=report, folder=found.staging)
        if is_refused:
            unknown = StorageError.at(found.folder, "the call that saves was interrupted", "save again")
            work = replace(work, refusal=found.refusal or unknown)
        else:
            work = replace(work, share=Share(files=tuple(found.files), live=found.live))
        if self.ranks.is_first:
            dispose = partial(self.record.dispose, found.staging.parent)
            work = replace(work, publish=partial(_publish, found.staging, found.folder, found.complete, dispose))
        self.pending = self._start_save(work)
        return self.pending

    def _step_writers(self, share: Share) -> tuple[Collection[object], frozenset[int]]:
        optimizers = self._optimizers()
        return optimizers, frozenset(storage_of(one) for optimizer in optimizers for one in masters_of(optimizer))


def _sweep(hidden: Path) -> bool:
    """Remove the hidden folder of a killed save; return False for that of a process that lives."""
    lock = Lock(hidden / _LOCK)
    try:
        lock.acquire()
        shutil.rmtree(hidden)
    except LockHeld:
        return False
    finally:
        lock.release()
    return True


def _publish(
    staging: Path,
    folder: Path,
    complete: Callable[[], None],
    dispose: Callable[[], None],
    facts: Sequence[BundleFact],
) -> None:
    """Put a checkpoint in place of the one of its name, if there is one, all of whose other files stay.

    Raises OSError, or StorageError for a rank's file that is missing.
    """
    written = {staging / fact.path: fact for fact in facts}
    check_written(staging, facts)
    is_there = folder.exists()
    for old in files_in(folder) if is_there else ():
        new = staging / old.relative_to(folder)
        if not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(old, new)
    for path in files_in(staging):
        if path not in written:  # written by the framework itself
            fsync_file(path)
    for path in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
        fsync_folder(path)
    if is_there:
        replace_folder(staging, folder, staging.with_name("old"))
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(folder)
    fsync_folder(folder.parent)
    complete()
    dispose()
