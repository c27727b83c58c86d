"""Copies finished saves to a second tier of storage, in the background: from a disk of the node to a shared folder, or
from the run's folder to an object store.

The first rank of each node copies the files of that node's ranks. Every copy is read back and compared with the
checksum in the manifest, and the manifest comes last, so a save exists there completely or not at all. Saves are copied
in order, so none depends on one that is missing there.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmtailor.background.options import SavingOptions
from llmtailor.background.retrying import RetryingQueue
from llmtailor.background.writing import complete
from llmtailor.checkpoint.layout import Copy, FileLayout, Plan
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.checkpoint.placement import Extent
from llmtailor.containers.json import MAX_BYTES, parse_json
from llmtailor.copying.copy import Context, execute
from llmtailor.errors import SourceError, StorageError, UsageError
from llmtailor.formats.partial.manifest import (
    BundleFact,
    bundle_name,
    differences_name,
    frozen_name,
    read_manifest,
    step_in_name,
)
from llmtailor.frameworks.files import PARTIAL_MANIFEST
from llmtailor.ranks.store import KeyValueStore, await_messages
from llmtailor.ranks.team import Ranks
from llmtailor.runs.folder import (
    ATTEMPTS,
    RunFolder,
    Start,
    files_in,
    holds_unknown,
    read_starts,
    remove_partial,
    starts_json,
)
from llmtailor.storage.local import OpenFiles, read_source, replace_durably
from llmtailor.storage.remote import RemoteFolder


class SharedFolder:
    """A run's folder that all nodes see. Raises OSError or StorageError."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def claim(self, run: RunFolder) -> None:
        """Raise UsageError if it holds saves of another run: this is the run's own folder."""

    def has(self, step: int) -> bool:
        """Return whether a save is there."""
        return step in self.run.complete()

    def begin(self, step: int) -> None:
        """Make room for a save that is not there yet."""
        self.run.begin(step)

    def put(self, step: int, source: Path, fact: BundleFact) -> None:
        """Copy a file, and read it back."""
        folder = self.run.at(step)
        target = folder / fact.path
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.llmtailor-new")
        new.unlink(missing_ok=True)
        pieces = (Copy(Extent(source.name, 0, fact.num_bytes), source=0),) if fact.num_bytes else ()
        plan = Plan((str(source.parent),), (FileLayout(new.name, pieces),))
        (result,) = execute(plan, new.parent, Context(inline=True))
        with OpenFiles(new.parent) as files:
            files.forget(new.name)
            if not result.crc == files.crc_of(new.name, 0, fact.num_bytes) == fact.crc32:
                raise StorageError.at(new, "the copy differs from the original", "check both disks")
        new.rename(target)

    def complete(self, step: int, manifest: bytes) -> None:
        """Make all of the save durable, and then its manifest."""
        complete(self.run.at(step), manifest)

    def remove(self, step: int) -> None:
        """Nothing: this is the run's own folder, from which the saver has removed it."""


class Mirror:
    """A folder of any file system that fsspec knows, by its URL. Raises also what its library raises."""

    def __init__(self, url: str) -> None:
        self._remote = RemoteFolder(f"{url.rstrip('/')}/partial", Path())

    def claim(self, run: RunFolder) -> None:
        own, there = run.starts(), self._starts()
        known = {lineage for past, _ in own for lineage in past.lineages}
        if there and known.isdisjoint(lineage for past, _ in there for lineage in past.lineages):
            fix = "give each run a mirror of its own, or move these saves away"
            raise UsageError.at(self._remote.url, "it holds saves of another run", fix)
        self._remote.make_folder("")
        self._remote.put_bytes(ATTEMPTS, starts_json([*there, *(start for start in own if start not in there)]))

    def _starts(self) -> list[Start]:
        """Return the attempts of the run whose saves are there; without a record of them, that of the newest save."""
        where = f"{self._remote.url}/{ATTEMPTS}"
        if self._remote.exists(ATTEMPTS):
            return read_starts(parse_json(self._remote.get_bytes(ATTEMPTS, MAX_BYTES), where), where)
        for step in sorted(filter(None, map(step_in_name, self._remote.names())), reverse=True):
            if self.has(step):
                data = self._remote.get_bytes(_in_mirror(step, PARTIAL_MANIFEST), MAX_BYTES)
                ledger = Ledger.from_json(parse_json(data, where).get("ledger"), where)
                return [(ledger.past(step), "")]
        return []

    def has(self, step: int) -> bool:
        return self._remote.exists(_in_mirror(step, PARTIAL_MANIFEST))

    def begin(self, step: int) -> None:
        self._remote.make_folder(_in_mirror(step))

    def put(self, step: int, source: Path, fact: BundleFact) -> None:
        if folder := fact.path.rpartition("/")[0]:
            self._remote.make_folder(_in_mirror(step, folder))
        self._remote.put(_in_mirror(step, fact.path), source, fact.crc32)

    def complete(self, step: int, manifest: bytes) -> None:
        self._remote.put_bytes(_in_mirror(step, PARTIAL_MANIFEST), manifest)

    def remove(self, step: int) -> None:
        if self.has(step):
            self._remote.remove([_in_mirror(step, PARTIAL_MANIFEST)])
            self._remote.remove_folder(_in_mirror(step))


Tier = SharedFolder | Mirror
"""Where saves are copied to"""


def _in_mirror(step: int, *names: str) -> str:
    return "/".join((RunFolder(Path()).at(step).name, *names))


logger = logging.getLogger("llmtailor.saving")
Log = Callable[[Mapping[str, Any]], None]


def tensor_files(ranks: Collection[int], world_size: int) -> set[str]:
    """Return the names of the tensor files that these ranks write."""
    names = {frozen_name(0, 1)} if 0 in ranks else set()
    for rank in ranks:
        names |= {of(rank, world_size) for of in (bundle_name, frozen_name, differences_name)}
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A save that is complete on the first tier."""

    step: int
    save_id: str
    began: float
    """Monotonic time at which it began"""
    line: Mapping[str, Any]
    """Its entry for the log"""
    retire: Callable[[], Collection[int]]
    """On rank 0: deletes what the run no longer needs; returns the steps."""


class _LeftOver(NamedTuple):
    """A save that an earlier process has left on a node."""

    save_id: str
    lineage: str
    files: set[str]
    """Its tensor files, on all nodes"""
    here: set[str]
    """Those on this node"""


class TierCopier:
    """Copies saves from ``first`` to ``last`` in a thread of each node's first rank.

    1) `open_tier` makes one. 2) `catch_up` when an attempt begins. 3) `add` each published save, and lines of the log
    that are to follow it. 4) `close`. All ranks make the calls, `add` in the saving threads.

    Args:
        first: where saves are written. If ``is_staging``, copies there are removed once a newer save is copied.
        nodes: the ranks of each node. The first of a node copies for all of them.
        log: adds an entry to the run's log.
    """

    def __init__(
        self,
        first: RunFolder,
        last: Tier,
        ranks: Ranks,
        nodes: Sequence[Sequence[int]],
        store: KeyValueStore,
        log: Log,
        *,
        is_staging: bool,
    ) -> None:
        self.first = first
        self.last = last
        self._ranks = ranks
        self._nodes = nodes
        self._node = next(number for number, of_node in enumerate(nodes) if ranks.rank in of_node)
        self._store = store
        self._log = log
        self.is_staging = is_staging
        self._queue = RetryingQueue("llmtailor-copy-tier", self._take, lambda one: f"step {one.step}")
        self._is_claimed = False
        self._is_leader = ranks.rank == nodes[self._node][0]
        if self._is_leader:
            self._queue.start()

    @property
    def elsewhere(self) -> frozenset[str]:
        """The tensor files that this rank can't see"""
        ranks = [rank for rank in range(self._ranks.world_size) if rank not in self._nodes[self._node]]
        return frozenset(tensor_files(ranks, self._ranks.world_size)) if self.is_staging else frozenset()

    def add(self, item: Finished | Mapping[str, Any]) -> None:
        """Copy a save, or add a line to the log, after everything before it."""
        if self._is_leader:
            if isinstance(item, Finished) and len(self._nodes) > 1:
                self._share_manifest(item)
            self._queue.add(item)

    def _share_manifest(self, save: Finished) -> None:
        """Bring the manifest to each node's disk: without it, a later start would remove the files there."""
        path, key = self.first.at(save.step) / PARTIAL_MANIFEST, f"{save.save_id}/manifest"
        if self._ranks.is_first:
            # if it can't be read, the copying of that save reports why
            content = None
            with suppress(OSError, SourceError):
                content = read_source(path, path.name, MAX_BYTES).decode()
            self._store.set(key, {"content": content})
        elif not path.exists() and (content := self._await(key)["content"]) is not None:
            with suppress(StorageError):  # the copying tries again
                replace_durably(path, content.encode())

    def close(self, timeout: float) -> None:
        """Finish copying; give up after this number of seconds without progress, and say what is left."""
        if left := [one.step for one in self._queue.close(timeout) if isinstance(one, Finished)]:
            what = (
                "the saves of steps %s in %s were not copied. They will be copied when the run resumes on this node; "
                "to use them now, pass --also."
            )
            logger.warning(what, ", ".join(map(str, left)), self.first.run)

    def catch_up(self, run: RunFolder) -> None:
        """Copy what an earlier process of this run has left on the first tier. All ranks call it.

        What then remains on the nodes' disks is of no use, and is removed. A mirror that is away does not stop a
        training. Raises UsageError if either tier holds saves of another run, and what copying to the run's folder
        raises.
        """
        try:
            self._ranks.run_on_first(lambda: self._claim(run))
            copied = self._copy_left_over(run)
        except Exception as error:
            if self.is_staging or isinstance(error, UsageError):
                raise
            logger.warning("copying missing saves to the mirror failed: %s", error)
            return
        if self.is_staging and self._is_leader:
            self._tidy()
        if copied and self._ranks.is_first:
            logger.warning("copied saves left over from an earlier process: %s", ", ".join(map(str, copied)))

    def _claim(self, run: RunFolder) -> None:
        """Make sure that the last tier is this run's, before anything is written there."""
        if not self._is_claimed:
            self.last.claim(run)
            self._is_claimed = True

    def _copy_left_over(self, run: RunFolder) -> list[int]:
        ranks = self._ranks
        nodes = ranks.run_on_all(lambda: self._saves_here() if self._is_leader else {})
        known = ranks.run_on_first(lambda: {past.lineage for past in run.attempts()})
        if others := sorted({step for one in nodes for step, save in one.items() if save.lineage not in known}):
            what = f"it holds saves of another run, of steps {', '.join(map(str, others))}"
            fix = "move them to another folder, or use another folder for this run"
            raise UsageError.at("staging_dir", what, fix)
        steps = sorted({step for one in nodes for step in one})
        copied = []
        for step in ranks.run_on_first(lambda: [at for at in steps if not self.last.has(at)]):
            found = [one[step] for one in nodes if step in one]
            here = {name for save in found for name in save.here}
            is_one_save = len({save.save_id for save in found}) == 1
            # the small files are on the first node
            if is_one_save and found[0].files <= here and step in nodes[0]:
                self._copy_now(step)
                copied.append(step)
        return copied

    def _copy_now(self, step: int) -> None:
        self._ranks.run_on_first(lambda: self.last.begin(step))
        self._ranks.run_on_all(lambda: self._put(step) if self._is_leader else None)
        self._ranks.run_on_first(lambda: self._complete(step))

    def _saves_here(self) -> dict[int, _LeftOver]:
        """Return the complete saves on this node by step."""
        found = {}
        for step, folder in self.first.complete().items():
            manifest = read_manifest(folder, folder.name)
            files = {fact.path for fact in manifest.bundles}
            here = {name for name in files if (folder / name).is_file()}
            found[step] = _LeftOver(manifest.save_id, str(manifest.ledger.get("lineage")), files, here)
        return found

    def _take(self, item: Finished | Mapping[str, Any]) -> None:
        if isinstance(item, Finished):
            self._copy(item)
        elif self._ranks.is_first:
            self._log(item)

    def _copy(self, save: Finished) -> None:
        folder = self.first.at(save.step)
        if self._ranks.is_first:
            is_gone = not (folder / PARTIAL_MANIFEST).exists()
            if self._store.get(f"{save.save_id}/open") is None:
                self._claim(self.first)
                if not is_gone:
                    self._share_manifest(save)
                    self.last.begin(save.step)
                self._store.set(f"{save.save_id}/open", {"is_gone": is_gone})
            if is_gone:
                logger.warning("step %d was not copied: it was removed", save.step)
                return
        else:
            if self._await(f"{save.save_id}/open")["is_gone"]:
                return
            self._share_manifest(save)
        self._put(save.step)
        self._store.set(f"{save.save_id}/copied/{self._node}", {})
        if self._ranks.is_first:
            copied = [f"{save.save_id}/copied/{number}" for number in range(len(self._nodes))]
            self._await(*copied)
            self._complete(save.step)
            self._log({**save.line, "copied_s": round(time.monotonic() - save.began, 6)})
            self._store.set(f"{save.save_id}/shared", {})
            self._store.remove(f"{save.save_id}/manifest", *copied)
            for step in save.retire():
                try:
                    self.last.remove(step)
                except Exception as error:
                    logger.warning("step %d could not be removed from the mirror: %s", step, error)
        else:
            self._await(f"{save.save_id}/shared")
        if self.is_staging:
            self._tidy(save.step)  # the newest stays: the next one links to it

    def _put(self, step: int) -> None:
        """Copy this node's tensor files."""
        folder = self.first.at(step)
        manifest = read_manifest(folder, folder.name)
        mine = tensor_files(self._nodes[self._node], manifest.world_size)
        for fact in manifest.bundles:
            if fact.path in mine:
                self.last.put(step, folder / fact.path, fact)
                self._queue.progress = time.monotonic()

    def _complete(self, step: int) -> None:
        """Copy the small files, and the manifest last."""
        folder = self.first.at(step)
        manifest = read_source(folder / PARTIAL_MANIFEST, f"{folder.name}/{PARTIAL_MANIFEST}", MAX_BYTES)
        tensors = {fact.path for fact in read_manifest(folder, folder.name).bundles}
        with OpenFiles(folder) as files:
            for path in sorted(files_in(folder)):
                name = path.relative_to(folder).as_posix()
                if name not in (*tensors, PARTIAL_MANIFEST):
                    num_bytes = path.stat().st_size
                    crc = files.crc_of(name, 0, num_bytes)
                    self.last.put(step, path, BundleFact(name, num_bytes, crc))
        self.last.complete(step, manifest)

    def _await(self, *keys: str) -> Any:
        return await_messages(self._store, [*keys], self._check)[0]

    def _check(self) -> None:
        if self._queue.closing.is_set():
            raise StorageError.at("saving", "the process is ending", "resume the run to copy the rest")

    def _tidy(self, before: float = math.inf) -> None:
        """Remove the saves of this tier before a step, which are all copied."""
        for step, folder in self.first.complete().items():
            if step < before and not holds_unknown(folder):
                remove_partial(folder)


def open_tier(
    run: RunFolder, first: RunFolder, options: SavingOptions, ranks: Ranks, store: KeyValueStore, log: Log
) -> TierCopier | None:
    """Start copying from ``first`` to the second tier, if the options name one. All ranks call it."""
    if options.mirror is None and first is run:
        return None
    nodes: dict[tuple[str, str | None], list[int]] = {}
    for rank, name in enumerate(ranks.all_gather((socket.gethostname(), os.environ.get("GROUP_RANK")))):
        nodes.setdefault(name, []).append(rank)
    last: list[Tier] = []

    def prepare() -> None:
        last.append(SharedFolder(run) if options.mirror is None else Mirror(options.mirror))
        if first is not run and any(ranks.rank == of_node[0] for of_node in nodes.values()):
            first.lock()
            first.sweep()

    ranks.run_on_all(prepare)
    return TierCopier(first, last[0], ranks, [*nodes.values()], store, log, is_staging=first is not run)
