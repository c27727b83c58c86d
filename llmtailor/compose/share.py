"""A merge shared among ranks: what each of them writes, and how rank 0 gets the checksums of all files."""

from __future__ import annotations

import base64
import hashlib
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.layout import Plan
from llmtailor.compose.plan import Composition
from llmtailor.compose.stated import stated_checksums
from llmtailor.engine.copy import Context, FileResult, Moved, execute
from llmtailor.engine.job import CHECKED, CHECKING, ENDED, READY, WRITING, WRITTEN, Job
from llmtailor.engine.journal import Identity, Journal
from llmtailor.engine.linking import LinkedTo
from llmtailor.engine.pool import Stop
from llmtailor.engine.recheck import SourceFile, read_again
from llmtailor.engine.sharing import Team, check_same, hand_over, heeding, share_out, take_over, wait_for_files
from llmtailor.engine.staging import peek, rank_journal, staging_folder
from llmtailor.storage.lock import Lock

logger = logging.getLogger(__name__)
RESULTS, DIGESTS = "results", "digests"
"""What ranks hand over: the checksums of the files written, and the digests of source files"""


def fingerprint(composition: Composition, identity: Identity) -> dict[str, str]:
    """Return what must be the same on all ranks."""
    facts = sorted((path, fact.num_bytes, fact.mtime_ns) for path, fact in identity.sources.items())
    options = composition.options
    how = (options.restart, options.replace, options.checksum, options.clone, options.link)
    return {
        "version": identity.tool_version,
        "request": _digest((identity.request, how)),
        "facts": _digest(facts),
        "plan": identity.plan,
    }


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


@contextmanager
def leading(job: Job | None, stop: Stop) -> Iterator[None]:
    """On rank 0, end the merge on all ranks when the block ends, and before what it has written is removed."""
    if job is None:
        yield
        return
    job.attach(stop)
    with Team(job).leading(), heeding(job):
        yield
    job.end(None)


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
    stated = [hand_over(job, RESULTS, [_to_json(one) for one in own])]
    stated += [post["handed"] for _, post in sorted(job.wait(WRITTEN).items())]
    results = _collect(job, plan, stated)
    wait_for_files(job, staging, {one.path: one.num_bytes for one in results})
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
        found |= zip(shares[rank], take_over(job, rank, DIGESTS, post["handed"]), strict=True)
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
            link=composition.options.link,
        )
        results = _execute(job, composition.plan, share, folder / "out", context)
    finally:
        lock.release()
    job.say(WRITTEN, handed=hand_over(job, RESULTS, [_to_json(one) for one in results]))
    if composition.options.checksum:
        everything = _collect(job, composition.plan, job.wait(CHECKING)[0]["results"])
        mine = _read_shares(job, composition)[job.member.rank]
        found = _read_share(job, composition, everything, mine, job.count, stop)
        job.say(CHECKED, handed=hand_over(job, DIGESTS, [found[name] for name in mine]))
    job.wait(ENDED)
    return sum((result.moved for result in results), Moved())


def _shares(job: Job, plan: Plan) -> list[list[int]]:
    return share_out([file.num_bytes for file in plan.files], job.member.world_size)


def _execute(job: Job, plan: Plan, share: Sequence[int], staging: Path, context: Context) -> list[FileResult]:
    mine = replace(plan, files=tuple(plan.files[number] for number in share))
    with heeding(job):
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
    with heeding(job):
        asked = set(composition.plan.summary.read)
        return read_again(composition.plan, results, set(files), on_progress, stop, stated, asked)


def _collect(job: Job, plan: Plan, stated: Sequence[Sequence[int]]) -> list[FileResult]:
    """Return the results of all ranks in plan order."""
    found = {}
    for rank, share in enumerate(_shares(job, plan)):
        for number, one in zip(share, take_over(job, rank, RESULTS, stated[rank]), strict=True):
            crcs = array("I", base64.b64decode(one["crcs"]))
            moved, linked = Moved(**one["moved"]), LinkedTo.from_json(one["linked"]) if one["linked"] else None
            found[number] = FileResult(plan.files[number], one["crc"], crcs, one["digest"], moved, linked)
    return [found[number] for number in range(len(plan.files))]


def _to_json(result: FileResult) -> dict[str, Any]:
    return {
        "crc": result.crc,
        "crcs": base64.b64encode(array("I", result.crcs).tobytes()).decode(),
        "digest": result.digest,
        "moved": asdict(result.moved),
        "linked": asdict(result.linked) if result.linked else None,
    }
