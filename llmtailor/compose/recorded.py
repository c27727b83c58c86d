"""Compares the sources of a merge with what was recorded of them, and with what they were when they were indexed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from llmtailor.balance import deal
from llmtailor.checkpoint.layout import Copy
from llmtailor.codes import Code
from llmtailor.compose.plan import MergePlan
from llmtailor.copying.copy import FileResult
from llmtailor.copying.pool import Stop
from llmtailor.copying.recheck import SourcePath, Stated, read_again
from llmtailor.errors import COPY_FILE, DamagedSource, PathIn, Problem, SourceError
from llmtailor.formats.provenance import read_manifest
from llmtailor.frameworks.files import MANIFEST, PARTIAL_MANIFEST
from llmtailor.frameworks.framework import is_resumed_from
from llmtailor.ranks.team import Ranks
from llmtailor.storage.checksums import Taken
from llmtailor.storage.local import FileFact, OpenFiles, disk_errors, facts_now
from llmtailor.storage.remote import RemotePath
from llmtailor.timing import unreported
from llmtailor.verify.checksums import stated_checksums


def _stated(composition: MergePlan, files: Collection[SourcePath]) -> dict[SourcePath, list[Stated]]:
    """Return the checksums of these files that the sources state: torch in its files, llmtailor in its manifests."""
    stated: dict[SourcePath, list[Stated]] = {}
    for number, index in enumerate(composition.indexes):
        paths = {path for source, path in files if source == number}
        for path, records in stated_checksums(index, read_manifest(index.root, index.name), paths).items():
            stated[number, path] = [
                Stated(record.name or "the file", record.start, record.stop, record.crc)
                for record in records
                if record.crc is not None and (record.name or is_resumed_from(path, index))
            ]
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
    ranks: Ranks,
    stop: Stop,
    *,
    is_partly: bool,
) -> None:
    """Raise DamagedSource for what any rank has read and is not as llmtailor wrote it, or SourceError for small files
    that may have been edited on purpose. ``is_partly``: see `Taken.wrong`."""
    for piece, crc in (pair for result in results for pair in result.checked) if recorded else ():
        if isinstance(piece, Copy):
            taken.add((piece.source, piece.extent.path), piece.extent.start, piece.extent.stop, crc)
    sizes = {(number, path): composition.indexes[number].files[path].num_bytes for number, path in recorded}
    share = sorted(deal(sizes, ranks.world_size)[ranks.rank])

    def compare(_: object) -> None:
        problems, roots, is_edited = [], set[Path](), False
        for number, path in share:
            index, where = composition.indexes[number], PathIn(composition.indexes[number].name, path)
            ranges, is_small = recorded[number, path], not is_resumed_from(path, index)
            with OpenFiles(index.root, index.files) as files, disk_errors(where, "can't read it again"):
                stop.check()
                if is_small:
                    is_wrong = files.crc_of(path, 0, index.files[path].num_bytes) != ranges[0][2]
                else:
                    crc_of = partial(files.crc_of, path)
                    is_wrong = bool(taken.wrong((number, path), ranges, crc_of, is_partly=is_partly))
            if is_wrong:
                problems.append(_damage(where, is_small=is_small))
                roots.add(index.root)
                is_edited = is_edited or is_small
        if problems:  # what may have been edited on purpose is for the user to decide
            raise SourceError(problems) if is_edited else DamagedSource(problems, roots)

    ranks.run_long(compare, stop, unreported)


def _damage(where: PathIn, *, is_small: bool) -> Problem:
    what = f"it is not as it was written: its checksum differs from that in {PARTIAL_MANIFEST} or {MANIFEST}"
    fix = f"{COPY_FILE}; llmtailor verify --deep lists the damage"
    if is_small:
        fix = f"{COPY_FILE}; if you edited it on purpose, remove it from `carried` in {PARTIAL_MANIFEST}"
    return Problem(where, what, fix, Code.CHECKSUM)


def check_sources(
    composition: MergePlan,
    results: Sequence[FileResult],
    before: Mapping[str, FileFact],
    on_progress: Callable[[int], None],
    stop: Stop,
    ranks: Ranks,
) -> dict[SourcePath, str]:
    """Check that no source has changed since ``before``; return the digests of the files read, if requested.

    A file whose metadata alone differ is compared by content: a hard-link backup, or a mount with new inode numbers,
    must not discard hours of work. With ``--checksum`` every file read is compared, also with the checksums stated in
    it or in a manifest next to it.
    """
    doubtful = ranks.run_on_first(lambda: _find_changes(composition, before))
    has_digests, read = composition.options.checksum, composition.plan.summary.read
    files = {*read} if has_digests else doubtful.intersection(read)
    sizes = {(number, path): composition.indexes[number].files[path].num_bytes for number, path in files}
    share = sorted(deal(sizes, ranks.world_size)[ranks.rank])

    def read_share(report: Callable[[int], None]) -> dict[SourcePath, str]:
        stated = _stated(composition, share) if has_digests else None
        return read_again(composition.plan, results, set(share), report, stop, stated=stated, of_all=files)

    shares = ranks.run_long(read_share, stop, on_progress if has_digests else unreported)
    return {path: digest for digests in shares for path, digest in digests.items()} if has_digests else {}


def _find_changes(composition: MergePlan, before: Mapping[str, FileFact]) -> set[SourcePath]:
    """Return the files of which only the metadata differ. Raises SourceError for files that changed."""
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
    return doubtful
