"""A merge that ranks share: what each of them writes, and how rank 0 gets the checksums of all files."""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmtailor.balance import deal
from llmtailor.checkpoint.layout import FileLayout, Plan
from llmtailor.compose.manifest import stated_checksums
from llmtailor.compose.plan import Composition
from llmtailor.engine.copy import Context, FileResult, Moved, execute
from llmtailor.engine.journal import Identity, Journal
from llmtailor.engine.pool import Abandoned, Stop
from llmtailor.engine.recheck import SourceFile, read_again
from llmtailor.engine.staging import RANKS, acquire, lock_of, peek, rank_journal, release, staging_folder
from llmtailor.errors import SourceError, UsageError
from llmtailor.ranks.group import LEAVING_S, RankGroup
from llmtailor.ranks.launch import RankInfo
from llmtailor.ranks.team import check_same
from llmtailor.storage.lock import Lock

logger = logging.getLogger(__name__)
_COMMAND = "start all ranks with the same command in the same environment"
_WAIT = "wait until the sources are complete on all nodes, then rerun the command"
_MUST_BE_SAME = {
    "version of llmtailor": (_COMMAND, UsageError),
    "recipe or options": (_COMMAND, UsageError),
    "sizes or times of the sources' files": (_WAIT, SourceError),
    "content of the sources": (_COMMAND, SourceError),
}


@contextmanager
def meeting(info: RankInfo, out: Path) -> Iterator[RankGroup]:
    """Yield the ranks that make an output together, which meet in its staging folder.

    Rank 0 holds the output's lock from the beginning to the end. Raises TargetError if another process has it.
    """
    out = out.absolute()
    group = RankGroup(info, staging_folder(out) / RANKS, out, None if info.rank else lock_of(out))
    if group.lock is not None:
        # the ranks of an earlier merge may just be leaving
        acquire(group.lock, out, time.monotonic() + min(LEAVING_S[0], group.limit_s))
    try:
        with group:
            yield group
    finally:
        if group.lock is not None:
            release(group.lock, out)


def fingerprint(composition: Composition, identity: Identity) -> dict[str, str]:
    """Return what must be the same on all ranks."""
    facts = sorted((path, fact.num_bytes, fact.mtime_ns) for path, fact in identity.sources.items())
    options = composition.options
    how = (options.restart, options.replace, options.checksum, options.clone)
    return {
        "version of llmtailor": identity.tool_version,
        "recipe or options": _digest((identity.request, how)),
        "sizes or times of the sources' files": _digest(facts),
        "content of the sources": identity.plan,
    }


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


@contextmanager
def leading(group: RankGroup | None, stop: Stop) -> Iterator[None]:
    """On rank 0, end the merge on all ranks when the block ends, and before what it has written is removed."""
    if group is None:
        yield
        return
    group.attach(stop)
    try:
        with _heeding(group):
            yield
    except BaseException as error:
        group.end(error)
        raise
    group.end(None)


@contextmanager
def _heeding(group: RankGroup) -> Iterator[None]:
    """Raise what has ended the work elsewhere, where workers only show that they have stopped."""
    try:
        yield
    except Abandoned:
        group.check()
        raise


def gather(group: RankGroup, composition: Composition, identity: Identity) -> None:
    """On rank 0, wait until all ranks have planned. Raises UsageError or SourceError if their plans differ."""
    check_same(group.collect(fingerprint(composition, identity)), _MUST_BE_SAME)


def write_together(
    group: RankGroup, composition: Composition, staging: Path, context: Context, on_progress: Callable[[int], None]
) -> list[FileResult]:
    """On rank 0, write its share; return the results of all ranks in plan order, once all files are there."""
    group.on_progress = on_progress
    group.from_first(None)  # the staging folder is ready
    own = _write(group, composition.plan, staging, context)
    logger.info("rank 0 has written its %d of %d files", len(own), len(composition.plan.files))
    results = _collect(group, composition.plan, own)
    group.wait_for_files(staging, {one.path: one.num_bytes for one in results})
    return results


def read_together(
    group: RankGroup,
    composition: Composition,
    results: Sequence[FileResult],
    on_progress: Callable[[int], None],
    stop: Stop,
) -> dict[SourceFile, str]:
    """On rank 0, return the digests of all source files that were read, each read again by one of the ranks.

    Raises what `read_again` raises, on whatever rank.
    """
    group.from_first([_to_json(one) for one in results])
    found = group.collect(_read(group, composition, results, on_progress, stop))
    return dict(sorted(((number, path), digest) for share in found for number, path, digest in share))


def write_share(composition: Composition, identity: Identity, group: RankGroup, stop: Stop) -> Moved:
    """On a rank other than 0, write its share, and return when rank 0 has published the output.

    Raises what ends the merge, wherever it happened.
    """
    group.attach(stop)
    folder, options = staging_folder(composition.out), composition.options
    group.collect(fingerprint(composition, identity))
    group.from_first(None)
    before = peek(composition.out)
    lock = Lock(rank_journal(folder, group.rank))
    lock.acquire()
    try:
        journal = Journal(lock.fd)
        journal.begin(identity)
        context = Context(
            [index.files for index in composition.indexes],
            before.marks if before else {},
            group.count,
            journal.add,
            digest=options.checksum,
            stop=stop,
            clone=options.clone,
        )
        results = _write(group, composition.plan, folder / "out", context)
    finally:
        lock.release()
    _collect(group, composition.plan, results)
    if options.checksum:
        written: list[dict[str, Any]] = group.from_first([])
        everything = list(map(_from_json, composition.plan.files, written))
        group.collect(_read(group, composition, everything, group.count, stop))
    group.done()
    return sum((result.moved for result in results), Moved())


def _write(group: RankGroup, plan: Plan, staging: Path, context: Context) -> list[FileResult]:
    """Write this rank's share of the files. A file is not split."""
    share = {*deal({file.path: file.num_bytes for file in plan.files}, group.world_size)[group.rank]}
    with _heeding(group):
        return execute(replace(plan, files=tuple(file for file in plan.files if file.path in share)), staging, context)


def _collect(group: RankGroup, plan: Plan, own: Sequence[FileResult]) -> list[FileResult]:
    """Return the results of all ranks in plan order, on rank 0."""
    shares = group.collect({one.path: _to_json(one) for one in own})
    found = {path: one for share in shares for path, one in share.items()}
    return [_from_json(file, found[file.path]) for file in plan.files if found]


def _read(
    group: RankGroup,
    composition: Composition,
    results: Sequence[FileResult],
    on_progress: Callable[[int], None],
    stop: Stop,
) -> list[tuple[int, str, str]]:
    """Read this rank's share of the source files again; return their numbers, paths and digests."""
    asked = composition.plan.summary.read
    sizes = {(number, path): composition.indexes[number].files[path].num_bytes for number, path in asked}
    files = sorted(deal(sizes, group.world_size)[group.rank])
    stated = stated_checksums(composition, files)
    with _heeding(group):
        found = read_again(composition.plan, results, set(files), on_progress, stop, stated, set(asked))
    return [(number, path, found[number, path]) for number, path in files]


def _to_json(result: FileResult) -> dict[str, Any]:
    return {
        "crc": result.crc,
        "crcs": base64.b64encode(array("I", result.crcs).tobytes()).decode(),
        "digest": result.digest,
        "moved": asdict(result.moved),
    }


def _from_json(file: FileLayout, one: Mapping[str, Any]) -> FileResult:
    crcs = array("I", base64.b64decode(one["crcs"]))
    return FileResult(file, one["crc"], crcs, one["digest"], Moved(**one["moved"]))
