"""Writes a planned composite, by one process or several ranks: resume or start over, execute, read back, rename.

`prove` reads back an outline of it before any state is moved. ``llmtailor.json`` records sources and checksums.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from llmtailor._version import __version__
from llmtailor.balance import deal
from llmtailor.checkpoint.index import MEGATRON, CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, Copy, FileLayout, LinkLayout, Plan, Segment
from llmtailor.codes import Code
from llmtailor.compose.plan import MergePlan, Options, plan_merge
from llmtailor.compose.report import Report, card
from llmtailor.containers.dcp import METADATA, list_data_records
from llmtailor.containers.json import MAX_BYTES
from llmtailor.containers.torch_file import ZipRecord, is_torch_file, list_records
from llmtailor.copying.copy import Context, CopyStats, FileResult, execute
from llmtailor.copying.journal import Identity, Journal, Mark, Unfinished, identify, is_another, why_not
from llmtailor.copying.moving import Upload, clear, is_unfinished
from llmtailor.copying.pool import Abandoned, Stop, stoppable
from llmtailor.copying.recheck import SourcePath, Stated, read_again
from llmtailor.copying.staging import (
    RANKS,
    Staging,
    acquire,
    check_space,
    lock_of,
    occupied_bytes,
    peek,
    rank_journal,
    release,
    staging_folder,
)
from llmtailor.documents import encode
from llmtailor.errors import (
    COPY_FILE,
    DamagedSource,
    Interrupted,
    PathIn,
    Problem,
    SourceError,
    StorageError,
    TargetError,
    Unanswered,
    UsageError,
    VerificationError,
    masked,
)
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.composite import read_merge
from llmtailor.formats.provenance import read_manifest
from llmtailor.formats.registry import BESIDE, display_name
from llmtailor.frameworks.files import CARD, MANIFEST, PARTIAL_MANIFEST
from llmtailor.frameworks.framework import FRAMEWORKS, is_resumed_from
from llmtailor.model.roles import MODULE, WEIGHT, State
from llmtailor.ranks.group import LEAVING_S, RankGroup
from llmtailor.ranks.launch import RankInfo
from llmtailor.ranks.team import check_same
from llmtailor.recipe import Recipe
from llmtailor.storage.checksums import DIGEST, Taken, combine, crc32, part_digest
from llmtailor.storage.local import FileFact, Lock, OpenFiles, disk_errors, facts_now, open_source, write_durably
from llmtailor.storage.remote import RemotePath
from llmtailor.timing import Stopwatch, unreported
from llmtailor.verify.verify import verify_checkpoint

logger = logging.getLogger(__name__)
SCHEMA_MANIFEST = "llmtailor.manifest/1"
_COMMAND = "start all ranks with the same command in the same environment"
_WAIT = "wait until the sources are complete on all nodes, then rerun the command"
_MUST_BE_SAME = {
    "version of llmtailor": (_COMMAND, UsageError),
    "recipe or options": (_COMMAND, UsageError),
    "sizes or times of the sources' files": (_WAIT, SourceError),
    "content of the sources": (_COMMAND, SourceError),
}


def make_manifest(
    composition: MergePlan,
    results: Sequence[FileResult],
    digests: Mapping[SourcePath, str],
    readme: bytes,
    merge: str,
    created: str,
) -> dict[str, Any]:
    """Return the content of ``llmtailor.json``.

    ``digests`` are those of the source files; ``readme`` is recorded to detect later edits; ``merge`` is a digest of
    what was merged, to recognize the same merge.
    """
    # Skip ZeRO's rounded masters: a digest depends neither on the stage nor on names on disk.
    rounded = (MODULE, WEIGHT) if composition.target.has_masters or composition.format == MEGATRON else (MODULE,)
    crcs: dict[str, list[tuple[State, int, int]]] = defaultdict(list)
    for state, num_bytes, crc in _state_crcs(results, rounded):
        crcs[composition.structure.part_of[state.param]].append((state, num_bytes, crc))
    of_part = composition.structure.part_of
    linked = {of_part[one.state.param] for file in composition.plan.links for one in file.copies if one.state}
    digest_of = {part: part_digest(found) for part, found in crcs.items() if part not in linked}
    report, base = composition.report, composition.indexes[composition.base]
    return {
        "schema": SCHEMA_MANIFEST,
        "llmtailor_version": __version__,
        "merge": merge,
        "created": created,
        "base": report.base,
        "global_step": report.global_step,
        "world_size": report.world_size,
        "attempt": asdict(composition.attempt) if composition.attempt else None,
        "recipe": {"name": report.recipe, "text": masked(composition.recipe.text)},
        "is_converted": (composition.format, composition.framework) != (base.form.file_format, base.framework),
        **({"unclear": sorted(base.train.unclear)} if base.train.unclear else {}),
        "sources": [
            {
                "name": index.name,
                "path": f"{index.root.absolute()}",
                "global_step": index.global_step,
                "files": [
                    {"path": path, "num_bytes": fact.num_bytes} | _digest_entry(digests.get((number, path)))
                    for path, fact in index.files.items()
                ],
            }
            for number, index in enumerate(composition.indexes)
        ],
        "parts": [{**encode(row), "digest": digest_of.get(row.part.whole)} for row in report.parts],
        "optimizer_steps": encode(report.steps),
        "files": [
            {"path": one.path, "num_bytes": one.num_bytes, **_link_or_crc(composition, one)} | _digest_entry(one.digest)
            for one in results
        ],
        "card": {"path": CARD, "num_bytes": len(readme), "crc32": f"{crc32(readme):08x}"},
        "notices": encode(report.notices),
    }


def _link_or_crc(composition: MergePlan, file: FileResult) -> dict[str, Any]:
    if not isinstance(file.plan, LinkLayout):
        return {"crc32": f"{file.crc:08x}"}
    origin = file.plan.origin
    index = composition.indexes[origin.source]
    known = {"checkpoint": index.name, "path": origin.extent.path}
    return {"linked": {**known, "checksum": f"{file.plan.checksum:08x}"}}


def _state_crcs(results: Sequence[FileResult], left_out: Container[str]) -> Iterator[tuple[State, int, int]]:
    """Yield the number of bytes and the CRC-32 of every state but those of some kinds, as written."""
    runs: dict[State, array[int]] = defaultdict(lambda: array("Q"))  # millions, for a thousand ranks
    itemsizes: dict[State, int] = {}
    for run in (run for result in results for run in result.runs()):
        if run.state.kind not in left_out:
            runs[run.state].extend((run.begin, run.num_bytes, run.skipped, run.crc))
            if run.itemsize:
                itemsizes[run.state] = run.itemsize
    for state, packed in runs.items():
        # elements may be written more than once (a buffer on every rank): count them once, in order
        written = dict(zip(packed[::4], zip(packed[1::4], packed[2::4], packed[3::4], strict=True), strict=True))
        total, crc = sum(num_bytes for num_bytes, _, _ in written.values()), 0
        for begin in sorted(written):
            num_bytes, skipped, own = written[begin]
            if itemsize := itemsizes.get(state):  # runs may lie in each other: each counts at its place
                crc ^= combine(own, 0, total - begin * itemsize - num_bytes - skipped)
            else:
                crc = combine(crc, own, num_bytes)
        yield state, total, crc


def _digest_entry(digest: str | None) -> dict[str, str]:
    return {DIGEST: digest} if digest else {}


def stated_checksums(composition: MergePlan, files: Iterable[SourcePath]) -> dict[SourcePath, list[Stated]]:
    """Return the checksums of these files that the sources state: torch in its files, llmtailor in its manifests."""
    manifests = [read_manifest(index.root, index.name) for index in composition.indexes]
    of_dcp: list[dict[str, tuple[ZipRecord, ...]]] = [
        {
            name: records
            for path in index.files
            if path.rpartition("/")[2] == METADATA
            for name, records in list_data_records(index.root, path, PathIn(index.name, path)).items()
        }
        for index in composition.indexes
    ]
    stated: dict[SourcePath, list[Stated]] = defaultdict(list)
    for number, path in files:
        index, about = composition.indexes[number], manifests[number]
        records = of_dcp[number].get(path, ())
        if is_torch_file(path):
            records = list_records(index.root, path, PathIn(index.name, path))
        for record in records:
            if record.crc is not None:
                stated[(number, path)].append(Stated(record.name, record.start, record.stop, record.crc))
        if about is not None and path in about.files and is_resumed_from(path, index):
            num_bytes, crc = about.files[path]
            if crc is not None:
                stated[(number, path)].append(Stated("the file", 0, num_bytes, crc))
    return stated


def recorded_checksums(composition: MergePlan) -> dict[SourcePath, Sequence[tuple[int, int, int]]]:
    """Return start, stop and CRC-32 of ranges of the source files, as llmtailor recorded them when it wrote these."""
    found: dict[SourcePath, Sequence[tuple[int, int, int]]] = {}
    read = composition.plan.summary.read
    for number, index in enumerate(composition.indexes) if composition.options.compare else ():
        if (about := read_manifest(index.root, index.name)) is None:
            continue
        for path, (num_bytes, crc) in about.files.items():
            if (number, path) in read and crc is not None and is_resumed_from(path, index):
                found[number, path] = about.ranges.get(path) or [(0, num_bytes, crc)]
        if number == composition.base:  # also those that are read when the output is planned
            found |= {(number, path): [(0, *fact)] for path, fact in about.carried.items() if path in index.files}
    return found


def compare_with_records(
    composition: MergePlan,
    recorded: Mapping[SourcePath, Sequence[tuple[int, int, int]]],
    taken: Taken[SourcePath],
    results: Sequence[FileResult],
    *,
    is_partly: bool,
) -> None:
    """Raise DamagedSource for what was read and is not as llmtailor wrote it. ``is_partly``: see `Taken.wrong`."""
    problems, roots, is_edited = [], set[Path](), False
    for piece, crc in (pair for result in results for pair in result.checked) if recorded else ():
        if isinstance(piece, Copy):
            taken.add((piece.source, piece.extent.path), piece.extent.start, piece.extent.stop, crc)
    for (number, path), ranges in recorded.items():
        index, where = composition.indexes[number], PathIn(composition.indexes[number].name, path)
        is_small = not is_resumed_from(path, index)
        with OpenFiles(index.root, index.files) as files, disk_errors(where, "can't read it again"):
            if is_small:
                is_wrong = files.crc_of(path, 0, index.files[path].num_bytes) != ranges[0][2]
            else:
                is_wrong = bool(taken.wrong((number, path), ranges, partial(files.crc_of, path), is_partly=is_partly))
        if is_wrong:
            what = f"it is not as it was written: its checksum differs from that in {PARTIAL_MANIFEST} or {MANIFEST}"
            fix = f"{COPY_FILE}; llmtailor verify --deep lists the damage"
            if is_small:
                fix = f"{COPY_FILE}; if you edited it on purpose, remove it from `carried` in {PARTIAL_MANIFEST}"
            problems.append(Problem(where, what, fix, Code.CHECKSUM))
            roots.add(index.root)
            is_edited = is_edited or is_small
    if problems:  # what may have been edited on purpose is for the user to decide
        raise SourceError(problems) if is_edited else DamagedSource(problems, roots)


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


def fingerprint(composition: MergePlan, identity: Identity) -> dict[str, str]:
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
    """Raise the error that ended the merge on another rank; the workers here only report that they stopped."""
    try:
        yield
    except Abandoned:
        group.check()
        raise


def write_together(
    group: RankGroup, composition: MergePlan, staging: Path, context: Context, on_progress: Callable[[int], None]
) -> list[FileResult]:
    """On rank 0, write its share; return the results of all ranks in plan order, once all files are there."""
    group.on_progress = on_progress
    group.broadcast(None)  # the staging folder is ready
    own = _write(group, composition.plan, staging, context)
    logger.info("rank 0 has written its %d of %d files", len(own), len(composition.plan.files))
    results = _collect(group, composition.plan, own)
    group.wait_for_files(staging, {one.path: one.num_bytes for one in results})
    return results


def write_share(composition: MergePlan, identity: Identity, group: RankGroup, stop: Stop) -> CopyStats:
    """On a rank other than 0, write its share, and return when rank 0 has published the output.

    Raises what ends the merge, wherever it happened.
    """
    group.attach(stop)
    folder, options = staging_folder(composition.out), composition.options
    group.collect(fingerprint(composition, identity))
    group.broadcast(None)
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
        written: list[dict[str, Any]] = group.broadcast([])
        everything = list(map(_from_json, composition.plan.files, written))
        group.collect(_read(group, composition, everything, group.count, stop))
    group.done()
    return sum((result.moved for result in results), CopyStats())


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
    composition: MergePlan,
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
        **{name: _packed(getattr(result, name)) for name in ("crcs", "spread")},
        "digest": result.digest,
        "moved": asdict(result.moved),
    }


def _from_json(file: FileLayout, one: Mapping[str, Any]) -> FileResult:
    crcs, spread = (array("I", base64.b64decode(one[name])) for name in ("crcs", "spread"))
    return FileResult(file, one["crc"], crcs, spread, one["digest"], CopyStats(**one["moved"]))


def _packed(crcs: Sequence[int]) -> str:
    return base64.b64encode(array("I", crcs).tobytes()).decode()


def merge(recipe: Recipe | str | Path, out: str | Path | None = None, options: Options | None = None) -> Report:
    """Plan a merge, write it, and return the report of what was written. See `plan_merge` and `write`.

    Args:
        recipe: a parsed recipe, or the path of a YAML file.
        out: the folder to write. It must not exist, unless ``options.replace`` or ``options.reuse`` is set.
        options: see `Options`.
    """
    composition = plan_merge(recipe, out, options)
    write(composition)
    return composition.report


def check_room(composition: MergePlan) -> None:
    """Raise StorageError if the output's file system lacks space for it, less what an unfinished merge occupies."""
    check_space(composition.out, composition.report.needed_bytes - occupied_bytes(composition.out))


def bytes_to_move(composition: MergePlan) -> int:
    """Return how many bytes `write` reports to ``on_progress``."""
    files = composition.plan.summary.read if composition.options.checksum else ()
    sources = sum(composition.indexes[number].files[path].num_bytes for number, path in files)
    uploaded = composition.plan.num_bytes if isinstance(composition.out, RemotePath) else 0
    return composition.plan.num_bytes + sources + uploaded


def write(
    composition: MergePlan,
    on_progress: Callable[[int], None] | None = None,
    notify: Callable[[str], None] | None = None,
    group: RankGroup | None = None,
) -> CopyStats:
    """Write a planned composite, verify it, and publish it by one rename; return how its bytes got there.

    The output stays absent, or the old one, until the new one is complete. After StorageError, Unanswered and
    Interrupted, make the same call again to resume.

    Args:
        composition: from `plan_merge`.
        on_progress: called with a number of bytes moved, from several threads.
        notify: called with sentences for the user.
        group: the ranks that share the merge, each of which calls this function. Rank 0 publishes; what it returns
            counts all ranks, and what another one returns its own share.

    Raises:
        TargetError: another process writes the output, or it holds an unfinished merge of another recipe.
        StorageError: there is not enough space, or the operating system refused to read or write.
        SourceError: a source is damaged, or changed in the meantime.
        VerificationError: the output does not read back as planned.
        Unanswered: a rank died or hangs.
        UsageError: the ranks have planned different merges.
        Interrupted: Ctrl-C or SIGTERM.
    """
    on_progress, notify = on_progress or unreported, notify or unreported
    identity, watch = identify_merge(composition), Stopwatch()
    if group is not None and not group.is_first:
        with stoppable() as stop:
            return write_share(composition, identity, group, stop)
    if is_unfinished(composition.out):
        clear(composition.out)
    lock = group.lock if group is not None else None
    with stoppable() as stop, Staging(composition.out, composition.replaces, lock) as staging, leading(group, stop):
        try:
            if group is not None:
                check_same(group.collect(fingerprint(composition, identity)), _MUST_BE_SAME)
            check_room(composition)
            found = (finding for index in composition.indexes for finding in index.findings)
            if not composition.plan.links and any(finding.severity == ERROR for finding in found):
                prove(composition)  # before everything is written in vain
            kept, before = resume(composition, identity, staging, notify)
            with _uploading(composition, on_progress, stop) as upload:
                recorded = recorded_checksums(composition)
                taken = Taken(recorded)
                context = Context(
                    [index.files for index in composition.indexes],
                    kept,
                    on_progress,
                    # an upload can't be resumed
                    staging.journal.add if upload is None else lambda path, mark: None,
                    digest=composition.options.checksum,
                    stop=stop,
                    clone=composition.options.clone,
                    taken=taken,
                    direct=upload is None,
                    upload=upload,
                )
                logger.info("writing in %s", staging.path)
                if group is None:
                    results = execute(composition.plan, staging.path, context)
                else:
                    results = write_together(group, composition, staging.path, context, on_progress)
                size = f"{composition.plan.num_bytes:,}"
                logger.info("wrote %d files, %s bytes, in %s", len(results), size, watch.lap())
                compare_with_records(composition, recorded, taken, results, is_partly=bool(kept))
                logger.info("compared the sources with their records in %s", watch.lap())
                digests = _check_sources(composition, results, before, on_progress, stop, group)
                logger.info("checked that the sources are unchanged, in %s", watch.lap())
                loader = FRAMEWORKS[composition.framework]
                about = card(composition.report, __version__, composition.format, composition.target.stage, loader)
                readme = about.encode()
                content = make_manifest(composition, results, digests, readme, identity.digest(), now())
                for name, data in ((MANIFEST, json.dumps(content, indent=2).encode() + b"\n"), (CARD, readme)):
                    write_durably(staging.path / name, data)
                    if upload is not None:
                        upload.take(staging.path / name, name, crc32(data))
                if upload is not None:
                    upload.show()
                check_written(composition, staging.path if upload is None else composition.out)
                logger.info("verified what was written in %s", watch.lap())
                stop.check()
                if upload is None:
                    staging.publish()
            logger.info("published %s in %s", display_name(composition.out), watch.lap())
        except (Interrupted, StorageError, Unanswered) as error:
            raise with_what_is_kept(error, composition, staging) from error
    if staging.folder.exists():
        notify(f"{staging.folder} could not be removed; its content is no longer needed")
    return sum((result.moved for result in results), CopyStats())


def _uploading(
    composition: MergePlan, on_progress: Callable[[int], None], stop: Stop
) -> AbstractContextManager[Upload | None]:
    """Return the upload of an output, a context manager around making it; None for a folder of this machine."""
    if not isinstance(composition.out, RemotePath):
        return nullcontext()
    num_bytes = {file.path: file.num_bytes for file in composition.plan.files} | {CARD: 0, MANIFEST: 0}
    return Upload(composition.out, num_bytes, on_progress, stop)


def _check_sources(
    composition: MergePlan,
    results: Sequence[FileResult],
    before: Mapping[str, FileFact],
    on_progress: Callable[[int], None],
    stop: Stop,
    group: RankGroup | None,
) -> dict[SourcePath, str]:
    """Check that no source has changed since ``before``; return the digests of the files read, if requested.

    A file whose metadata alone differ is compared by content: a hard-link backup, or a mount with new inode numbers,
    must not discard hours of work. With ``--checksum`` every file read is compared, also with the checksums stated in
    it or in a manifest next to it.
    """
    changed, doubtful = [], set()
    linked = {(file.origin.source, file.origin.extent.path) for file in composition.plan.links}
    for remote in {index.root.remote for index in composition.indexes if isinstance(index.root, RemotePath)}:
        remote.list()
    for number, index in enumerate(composition.indexes):
        for path, now in facts_now(index.root, index.files).items():
            if now is None or not now.is_like(index.files[path]):
                what, fix = "the file changed while it was read", "run the merge again"
                changed.append(Problem(PathIn(index.name, path), what, fix))
            elif (
                not isinstance(index.root, RemotePath)
                and now != before.get(f"{composition.plan.sources[number]}/{path}", now)
                and (number, path) not in linked
            ):  # whose link count, and so change time, is another one now
                doubtful.add((number, path))
    if changed:
        raise SourceError(changed)
    wanted = composition.plan.summary.read
    if composition.options.checksum:
        if group is not None:
            group.broadcast([_to_json(one) for one in results])
            shares = group.collect(_read(group, composition, results, on_progress, stop))
            return dict(sorted(((number, path), digest) for share in shares for number, path, digest in share))
        return read_again(composition.plan, results, wanted, on_progress, stop, stated_checksums(composition, wanted))
    read_again(composition.plan, results, doubtful.intersection(wanted), lambda num_bytes: None, stop)
    return {}


_INHERITED = "the output would not be resumable, because its sources have these errors"
_MEND = "mend the sources, use others, or publish the output as it is with --allow-errors"


def _kind(finding: Finding) -> tuple[object, ...]:
    """Return what the same finding of the same file has in common in a source and in the composite."""
    return finding.code, finding.severity, finding.path, finding.params


def check_written(composition: MergePlan, staging: Path) -> None:
    """Verify the output like any other checkpoint, and compare it with the plan.

    Errors that it has from its sources, which were reported as notices, are refused unless they are allowed.
    """
    wanted, out = composition.indexes[composition.base], display_name(composition.out)
    known = {_kind(notice) for notice in composition.report.notices if isinstance(notice, Finding)}
    try:
        verdict = verify_checkpoint(staging, name=out)
    except SourceError as error:
        raise VerificationError(error.problems) from error
    errors, is_allowed = verdict.of_severity(ERROR), composition.options.allow_errors
    # a loop that sets learning rates itself has saved another rate than its schedule's, and sets it again
    passed = {kind for kind in known if is_allowed or kind[0] is Code.SCHEDULER_RATE}
    if new := [finding for finding in errors if _kind(finding) not in passed]:
        inherited = [finding for finding in new if _kind(finding) in known]
        raise VerificationError([*new, *([Problem("--allow-errors", _INHERITED, _MEND)] if inherited else [])])
    written = verdict.index
    assert written is not None, "a checkpoint without an index has errors"
    wanted_groups = composition.target.sub_groups
    pairs = zip(written.groups, composition.target.groups, strict=False)
    if (
        written.params != wanted.params
        or (written.world_size, written.tp) != (composition.target.world_size, composition.target.tp)
        or [(one.params, one.step) for one in written.sub_groups] != [(one.params, one.step) for one in wanted_groups]
        or not _is_equal([one.scalars for one in written.sub_groups], [one.scalars for one in wanted_groups])
        or len(written.groups) != len(composition.target.groups)
        # a format may add hyperparameters that its loader asks for
        or any({**have.hyper, **want.hyper} != have.hyper for have, want in pairs)
        or any(written.files[file.path].num_bytes != file.num_bytes for file in composition.plan.files)
    ):
        raise VerificationError.at(
            out, "the output does not read back as planned", "this is a bug in llmtailor: please report it"
        )


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, and NaN where the other has it."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other) or (one != one and other != other)


def identify_merge(composition: MergePlan) -> Identity:
    """Return the identity of a merge, for its journal."""
    recipe, options = composition.recipe, composition.options
    asked = (recipe.base, recipe.rules, recipe.dtype, recipe.tokenizer, recipe.chat_template)
    return identify(
        composition.plan,
        [index.files for index in composition.indexes],
        tool_version=__version__,
        recipe=recipe.name,
        request=repr((asked, replace(options, replace=False, restart=False, checksum=False, clone="auto"))),
        begun=now(),
    )


def settle_output(composition: MergePlan) -> tuple[MergePlan, str | None]:
    """Return the merge under a free name, and what makes it unnecessary: its base, or an output of the same merge.

    If something else has the name of the output, a number is added to it.
    """
    if composition.is_copy:
        return composition, composition.report.base
    if composition.options.replace:
        return composition, None
    first = composition.out
    plain = first.with_name(first.name.removesuffix(BESIDE))  # what has this name may be the output of the same merge
    numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
    for out in chain([plain] if plain.exists() else [], [first], numbered):
        named = replace(composition, out=out, report=replace(composition.report, out=display_name(out)))
        if not out.exists():
            return named, None
        if is_written(named):
            return named, named.report.out
    raise AssertionError("numbers never run out")


def is_written(composition: MergePlan) -> bool:
    """Whether the output exists, written by the same merge of the same sources."""
    return read_merge(composition.out) == identify_merge(composition).digest()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def preview(composition: MergePlan) -> str:
    """Return a sentence on what a merge will do with an unfinished one in its output; empty if there is none.

    Raises TargetError if the merge will refuse.
    """
    unfinished = peek(composition.out)
    if unfinished is None or not unfinished.num_bytes:
        return ""
    return _judge(unfinished, identify_merge(composition), composition)[1]


def resume(
    composition: MergePlan, identity: Identity, staging: Staging, notify: Callable[[str], None]
) -> tuple[Mapping[str, tuple[Mark, ...]], Mapping[str, FileFact]]:
    """Resume the unfinished merge or start over; return the marks of its files, and the facts of its sources.

    Raises TargetError if the unfinished merge is of another recipe, and StorageError.
    """
    if unfinished := staging.unfinished:
        resumes, sentence = _judge(unfinished, identity, composition)
        if unfinished.num_bytes:
            notify(sentence)
        else:
            logger.info("an earlier merge into %s was interrupted before anything was durable", composition.out)
        if resumes:
            staging.resume()
            return unfinished.marks, unfinished.identity.sources
    staging.reset(identity)
    return {}, identity.sources


def _judge(unfinished: Unfinished, identity: Identity, composition: MergePlan) -> tuple[bool, str]:
    """Return whether to resume the unfinished merge, and a sentence about it."""
    there, options = unfinished.identity, composition.options
    share = f"{unfinished.num_bytes:,} of {there.num_bytes:,} bytes"
    reason = "--restart was given" if options.restart else why_not(there, identity)
    if not reason:
        return True, f"resuming the merge begun at {there.begun}: {share} are written and will be checked"
    what = f"the output holds an unfinished merge ({there.recipe}, begun at {there.begun}, {share})"
    # with --force even a complete output may go
    if is_another(there, identity) and unfinished.num_bytes and not (options.restart or options.replace):
        folder = staging_folder(composition.out)
        fix = f"rerun that command to resume it; to discard it, remove {folder}, or give merge or convert --restart"
        raise TargetError.at(composition.out, f"{what}, but {reason}", fix)
    return False, f"{what}; it is discarded, because {reason}"


def with_what_is_kept(
    error: Interrupted | StorageError | Unanswered, composition: MergePlan, staging: Staging
) -> Interrupted | StorageError | Unanswered:
    """Return the error with the bytes that a resume will keep."""
    if not (kept := staging.kept_bytes):
        return error
    then = f"it resumes with {kept:,} of {composition.plan.num_bytes:,} bytes kept in {staging.folder}"
    if isinstance(error, StorageError):  # the other errors already say so
        then = f"then rerun the same command: {then}"
    return type(error)(replace(problem, fix=f"{problem.fix}; {then}") for problem in error.problems)


def prove(composition: MergePlan) -> None:
    """Write the outline of a composite into a temporary folder, and read it back like the composite.

    The files have their full size, with holes where states will be, so they take as much space as headers and pickles
    do. Raises what `write` raises if the output does not read back, and OSError if the folder can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="llmtailor-") as name:
        folder = Path(name)
        for file in composition.plan.files:
            _outline(folder / file.path, file, composition.indexes)
        manifest = make_manifest(composition, (), {}, b"", "", "")
        (folder / MANIFEST).write_text(json.dumps(manifest))
        check_written(composition, folder)


def _outline(path: Path, file: FileLayout, sources: Sequence[CheckpointIndex]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    at = 0
    with path.open("wb") as out:
        for piece in file.pieces:
            if known := _known(piece, sources):
                out.seek(at)
                out.write(known)
            at += piece.num_bytes
        out.truncate(at)


def _known(piece: Segment, sources: Sequence[CheckpointIndex]) -> bytes:
    """Return the bytes of a piece, nothing for those of states, which a reader does not look at."""
    if isinstance(piece, Bytes):
        return piece.data
    if isinstance(piece, Copy) and piece.state is None and piece.num_bytes <= MAX_BYTES:  # files other than the states
        index, extent = sources[piece.source], piece.extent
        with open_source(index.root / extent.path, PathIn(index.name, extent.path)) as source:
            return bytes(source.read(extent.start, extent.stop))
    return b""
