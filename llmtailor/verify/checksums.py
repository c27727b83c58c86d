"""The checksums that a checkpoint states: of records in torch files, of files and parts in a manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext, suppress

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.codes import Code
from llmtailor.containers.dcp import METADATA, list_data_records
from llmtailor.containers.torch_file import ZipRecord, is_torch_file, list_records
from llmtailor.errors import COPY_OR_ANOTHER, PathIn, SourceError, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.composite import ManifestFacts
from llmtailor.formats.registry import find_structure
from llmtailor.frameworks.framework import is_resumed_from
from llmtailor.model.roles import MODULE, WEIGHT, State
from llmtailor.storage.checksums import Intervals, part_digest
from llmtailor.verify.structure import ON_PURPOSE, Spans


def stated_checksums(
    index: CheckpointIndex, manifest: ManifestFacts | None, paths: Collection[str], *, skip_damaged: bool = False
) -> dict[str, list[ZipRecord]]:
    """Return the checksums that torch files, DCP's metadata and the manifest state of some files of a checkpoint.

    A record without a name is the whole file. Raises SourceError for a damaged file. ``skip_damaged`` leaves these out,
    and the whole files that have another size than the manifest states.
    """
    sums: dict[str, list[ZipRecord]] = {}
    for path in index.files:
        where = PathIn(index.name, path)
        with suppress(SourceError) if skip_damaged else nullcontext():
            if is_torch_file(path) and path in paths:
                sums[path] = [record for record in list_records(index.root, path, where) if record.crc is not None]
            if path.rpartition("/")[2] == METADATA:
                for file, records in list_data_records(index.root, path, where).items():
                    if file in paths:
                        sums[file] = [record for record in records if record.crc is not None]
    for path, (num_bytes, crc) in manifest.files.items() if manifest else ():
        is_sound = path in index.files and (not skip_damaged or index.files[path].num_bytes == num_bytes)
        if path in paths and crc is not None and is_sound:
            sums.setdefault(path, []).append(ZipRecord("", 0, num_bytes, crc))
    return sums


def wrong_checksum(index: CheckpointIndex, path: str, record: ZipRecord, inside: Collection[State]) -> Finding:
    """Return the finding about a record that does not have the stated checksum; ``inside`` are the states in it."""
    where, severity = PathIn(index.name, path), ERROR if is_resumed_from(path, index) else WARNING
    if record.name:
        names = some(sorted({f"{state.kind} of {state.param}" for state in inside}))
        what = f"{record.name} does not match its checksum in the file{f'; it holds {names}' if names else ''}"
        return Finding(where, what, COPY_OR_ANOTHER, Code.CHECKSUM, severity)
    fix = ON_PURPOSE if severity == WARNING else COPY_OR_ANOTHER
    what = f"the file is not the one that the {'save' if index.form.is_partial else 'merge'} wrote"
    return Finding(where, what, fix, Code.MANIFEST, severity)


def compare_digests(
    index: CheckpointIndex, checksums: Intervals[State], manifest: ManifestFacts, lost: Spans
) -> Iterator[Finding]:
    """Compare the digests of the parts with the checksums of their states.

    Parts with unreadable states are skipped, because these are reported. In ZeRO-3, parts with buffers are skipped too:
    a digest counts the ranks' buffers as often as the sources had them. The files' checksums cover these.
    """
    part_of = find_structure(index).part_of
    parts: dict[str, list[tuple[State, int, int]]] = {}
    for state in checksums:
        if state.kind != MODULE and not (state.kind == WEIGHT and index.form.has_masters):
            parts.setdefault(part_of[state.param], []).append((state, *checksums.whole(state)))
    not_whole = {part_of[state.param] for state in lost}
    if index.form.has_buffers_by_rank:
        not_whole |= {part_of[param.name] for param in index.params.values() if param.role == "buffer"}
    for part, digest in manifest.digests.items():
        if part not in not_whole and part_digest(parts.get(part, ())) != digest:
            what = f"the states of {part} are not those that the merge wrote"
            yield Finding(index.name, what, "merge again, or copy the checkpoint again", Code.DIGEST, ERROR)
