"""A merge shared among ranks: what each of them writes, and how rank 0 gets the checksums of all files."""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import logging
import os
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.layout import Plan
from llmtailor.compose.plan import Composition
from llmtailor.compose.stated import stated_checksums
from llmtailor.engine.copy import Context, FileResult, Moved, execute
from llmtailor.engine.job import CHECKED, CHECKING, ENDED, READY, WRITING, WRITTEN, Job
from llmtailor.engine.journal import Identity, Journal
from llmtailor.engine.pool import Abandoned, Stop
from llmtailor.engine.recheck import SourceFile, read_again
from llmtailor.engine.staging import peek, rank_journal, staging_folder
from llmtailor.errors import PathIn, Problem, SourceError, StorageError, UsageError, ranges
from llmtailor.storage.local import make_folder, write_all
from llmtailor.storage.lock import Lock

logger = logging.getLogger(__name__)
RESULTS, DIGESTS = "results", "digests"
"""What ranks hand over: the checksums of the files written, and the digests of source files"""
_POLL_S = 0.1


def share_out(num_bytes: Sequence[int], world_size: int) -> list[list[int]]:
    """Return the numbers of the files that each rank writes, given the sizes of all files.

    The largest come first, each to the rank that has least so far. All ranks compute the same. A file is not split.
    """
    loads = [(0, rank) for rank in range(world_size)]
    shares: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(num_bytes)), key=lambda number: (-num_bytes[number], number)):
        load, rank = loads[0]
        shares[rank].append(number)
        heapq.heapreplace(loads, (load + num_bytes[number], rank))
    return [sorted(share) for share in shares]


_MUST_BE_SAME = {
    "version": "version of llmtailor",
    "request": "recipe or options",
    "facts": "sizes or times of the sources' files",
    "plan": "content of the sources",
}


def fingerprint(composition: Composition, identity: Identity) -> dict[str, str]:
    """Return what must be the same on all ranks."""
    facts = sorted((path, fact.num_bytes, fact.mtime_ns) for path, fact in identity.sources.items())
    options = composition.options
    how = (options.restart, options.replace, options.checksum, options.clone)
    return {
        "version": identity.tool_version,
        "request": _digest((identity.request, how)),
        "facts": _digest(facts),
        "plan": identity.plan,
    }


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def check_same(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Check that all ranks plan the same merge; ``facts`` are their fingerprints, with that of rank 0.

    Raises UsageError, or SourceError if only what the ranks see of the sources differs.
    """
    differing: dict[str, list[int]] = defaultdict(list)
    for rank, found in sorted(facts.items()):
        # what follows from the first difference is not worth a message
        for key in [key for key in _MUST_BE_SAME if found[key] != facts[0][key]][:1]:
            differing[key].append(rank)
    fixes = {"facts": "wait until the sources are complete on all nodes, then run this again"}
    problems = [
        Problem(
            f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}",
            f"not the same {_MUST_BE_SAME[key]} as on rank 0",
            fixes.get(key, "start all ranks with the same command in the same environment"),
        )
        for key, ranks in differing.items()
    ]
    if problems:
        raise (UsageError if differing.keys() & {"version", "request"} else SourceError)(problems)


@contextmanager
def leading(job: Job | None, stop: Stop) -> Iterator[None]:
    """On rank 0, end the merge on all ranks when the block ends, and before what it has written is removed."""
    if job is None:
        yield
        return
    job.attach(stop)
    try:
        with _heeding(job):
            yield
    except BaseException as error:
        job.end(error)
        raise
    job.end(None)


@contextmanager
def _heeding(job: Job) -> Iterator[None]:
    """Raise what has ended the merge elsewhere, where workers only say that they have stopped."""
    try:
        yield
    except Abandoned:
        job.check()
        raise


def gather(job: Job, composition: Composition, identity: Identity) -> None:
    """On rank 0, wait until all ranks have planned. Raises UsageError or SourceError if their plans differ."""
    posts = job.wait(READY)
    found = {rank: post["fingerprint"] for rank, post in posts.items()}
    check_same({0: fingerprint(composition, identity), **found})


def write_together(
    job: Job, composition: Composition, staging: Path, context: Context, on_progress: Callable[[int], None]
) -> list[FileResult]:
    """On rank 0, write its share; return the results of all ranks in plan order, once all files are there."""
    plan = composition.plan
    job.on_progress = on_progress
    job.needs_all = composition.options.checksum
    job.say(WRITING)
    share = _shares(job, plan)[0]
    own = _execute(job, plan, share, staging, context)
    logger.info("rank 0 has written its %d of %d files", len(share), len(plan.files))
    stated = [_hand_over(job, RESULTS, [_to_json(one) for one in own])]
    stated += [post["handed"] for _, post in sorted(job.wait(WRITTEN).items())]
    results = _collect(job, plan, stated)
    _wait_for_files(job, staging, results)
    if composition.options.checksum:
        job.say(CHECKING, results=stated)
    return results


def read_together(
    job: Job,
    composition: Composition,
    results: Sequence[FileResult],
    on_progress: Callable[[int], None],
    stop: Stop,
) -> dict[SourceFile, str]:
    """On rank 0, return the digests of all source files that were read, each read again by one of the ranks.

    Raises what `read_again` raises, on whatever rank.
    """
    shares = _read_shares(job, composition)
    found = _read_share(job, composition, results, shares[0], on_progress, stop)
    for rank, post in job.wait(CHECKED).items():
        found |= zip(shares[rank], _take_over(job, rank, DIGESTS, post["handed"]), strict=True)
    return dict(sorted(found.items()))


def write_share(composition: Composition, identity: Identity, job: Job, stop: Stop) -> Moved:
    """On a rank other than 0, write its share, and return when rank 0 has published the output.

    Raises what ends the merge, wherever it happened.
    """
    job.attach(stop)
    folder = staging_folder(composition.out)
    job.say(READY, fingerprint=fingerprint(composition, identity))
    job.wait(WRITING)
    before = peek(composition.out)
    lock = Lock(rank_journal(folder, job.member.rank))
    lock.acquire()
    try:
        journal = Journal(lock.fd)
        journal.begin(identity)
        share = _shares(job, composition.plan)[job.member.rank]
        context = Context(
            [index.files for index in composition.indexes],
            before.marks if before else {},
            job.count,
            journal.add,
            digest=composition.options.checksum,
            stop=stop,
            clone=composition.options.clone,
        )
        results = _execute(job, composition.plan, share, folder / "out", context)
    finally:
        lock.release()
    job.say(WRITTEN, handed=_hand_over(job, RESULTS, [_to_json(one) for one in results]))
    if composition.options.checksum:
        everything = _collect(job, composition.plan, job.wait(CHECKING)[0]["results"])
        mine = _read_shares(job, composition)[job.member.rank]
        found = _read_share(job, composition, everything, mine, job.count, stop)
        job.say(CHECKED, handed=_hand_over(job, DIGESTS, [found[name] for name in mine]))
    job.wait(ENDED)
    return sum((result.moved for result in results), Moved())


def _shares(job: Job, plan: Plan) -> list[list[int]]:
    return share_out([file.num_bytes for file in plan.files], job.member.world_size)


def _execute(job: Job, plan: Plan, share: Sequence[int], staging: Path, context: Context) -> list[FileResult]:
    mine = replace(plan, files=tuple(plan.files[number] for number in share))
    with _heeding(job):
        return execute(mine, staging, context)


def _read_shares(job: Job, composition: Composition) -> list[list[SourceFile]]:
    """Return which source files each rank reads again."""
    files = composition.plan.summary.read
    sizes = [composition.indexes[number].files[path].num_bytes for number, path in files]
    return [[files[number] for number in share] for share in share_out(sizes, job.member.world_size)]


def _read_share(
    job: Job,
    composition: Composition,
    results: Sequence[FileResult],
    files: Sequence[SourceFile],
    on_progress: Callable[[int], None],
    stop: Stop,
) -> dict[SourceFile, str]:
    stated = stated_checksums(composition, files)
    with _heeding(job):
        return read_again(composition.plan, results, set(files), on_progress, stop, stated)


def _collect(job: Job, plan: Plan, stated: Sequence[Sequence[int]]) -> list[FileResult]:
    """Return the results of all ranks in plan order."""
    found = {}
    for rank, share in enumerate(_shares(job, plan)):
        for number, one in zip(share, _take_over(job, rank, RESULTS, stated[rank]), strict=True):
            crcs = array("I", base64.b64decode(one["crcs"]))
            found[number] = FileResult(plan.files[number], one["crc"], crcs, one["digest"], Moved(**one["moved"]))
    return [found[number] for number in range(len(plan.files))]


def _to_json(result: FileResult) -> dict[str, Any]:
    return {
        "crc": result.crc,
        "crcs": base64.b64encode(array("I", result.crcs).tobytes()).decode(),
        "digest": result.digest,
        "moved": asdict(result.moved),
    }


def _hand_over(job: Job, name: str, content: Sequence[Any]) -> list[int]:
    """Write what other ranks need; return size and CRC-32 of the file. Raises StorageError."""
    path = job.folder / f"{job.member.rank}.{name}"
    data = json.dumps(content).encode()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError.at(path, f"can't write: {error.strerror}", "check the disk") from error
    return [len(data), zlib.crc32(data)]


def _take_over(job: Job, rank: int, name: str, stated: Sequence[int]) -> list[Any]:
    """Return what a rank has handed over, once this node sees it. Raises StorageError if it never does."""
    path = job.folder / f"{rank}.{name}"
    for _ in _until(job, path):
        with suppress(OSError):
            data = path.read_bytes()
            if [len(data), zlib.crc32(data)] == [*stated]:
                content: list[Any] = json.loads(data)
                return content
    raise AssertionError("either it is there or that is an error")


def _wait_for_files(job: Job, staging: Path, results: Sequence[FileResult]) -> None:
    """Wait until this node sees the files of the others.

    NFS remembers for up to a minute what is in a folder, unless this node changes it, and what a file is like until it
    is opened.
    """
    for folder in {(staging / one.path).parent for one in results}:
        probe = folder / ".llmtailor-probe"
        with suppress(OSError):
            make_folder(probe)
            probe.rmdir()
    for one in results:
        path = staging / one.path
        for _ in _until(job, PathIn(job.out.name, one.path)):
            with suppress(FileNotFoundError), path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == one.num_bytes:
                    break


def _until(job: Job, where: object) -> Iterator[None]:
    """Yield from time to time, up to the job's limit. Raises StorageError then, and what ends the merge."""
    until = time.monotonic() + job.limit_s
    while True:
        yield
        job.check()
        if time.monotonic() > until:
            what = f"another rank has written it, but this node does not see it after {job.limit_s:g} s"
            raise StorageError.at(where, what, "check that all nodes mount the same folder, then run this again")
        time.sleep(_POLL_S)
