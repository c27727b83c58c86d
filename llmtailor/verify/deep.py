"""The deep checks of `verify`: values, checksums and digests. Every byte is read once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.dcp import METADATA, list_data_records
from llmtailor.containers.json import read_json
from llmtailor.containers.torch_zip import list_records
from llmtailor.containers.zip import Record
from llmtailor.engine.pool import num_workers, run_all, stoppable
from llmtailor.errors import COPY_OR_ANOTHER, PathIn, SourceError, some
from llmtailor.findings import ERROR, NOTE, WARNING, Finding
from llmtailor.formats.known_files import is_resumed_from
from llmtailor.formats.manifest import ManifestFacts
from llmtailor.formats.registry import find_structure
from llmtailor.formats.trainer import CONFIG
from llmtailor.model.disk_names import naming_of, on_disk
from llmtailor.model.parts import SavedAs
from llmtailor.model.states import MODULE, WEIGHT, State
from llmtailor.storage.checksums import part_digest
from llmtailor.verify.bad_values import damaged_elements, find_bad_values, find_zeroed
from llmtailor.verify.elements import Spans, elements_in, join, lost_elements
from llmtailor.verify.read import Reading, bundle_states

_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Deep:
    """The results of reading every byte."""

    findings: tuple[Finding, ...]
    """Findings about files and checksums"""
    values: tuple[Finding, ...]
    """Findings about the values of states"""
    states: Spans
    """Elements that are lost or can't be trusted"""
    intact: Mapping[str, Sequence[Record]]
    """The records of torch files that match their checksums, by file"""


def read_everything(
    index: CheckpointIndex,
    unreadable: frozenset[str],
    manifest: ManifestFacts | None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> Deep:
    """Read a checkpoint and check its values and checksums.

    ``on_progress`` gets the number of bytes read, from several threads. Raises Interrupted on Ctrl-C.
    """
    saved_as, sums = _saved_as(index), _stated_sums(index, unreadable, manifest)
    with stoppable() as stop:
        summed = {path for path, stated in sums.items() if stated}
        sum_states = bool(manifest and manifest.digests)
        reading = Reading(index, unreadable, on_progress, stop, summed, sum_states)
        with reading.files:
            reading.read(bundle_states(index, saved_as, unreadable))
            jobs = [partial(_compare_sums, reading, path, stated) for path, stated in sorted(sums.items())]
            wrong = [found for one in run_all(jobs, num_workers(), stop) for found in one]
    is_split = manifest is not None and manifest.is_split
    lost = join(lost_elements(index, unreadable.union(reading.unreadable)))
    damaged = [
        *damaged_elements(index, reading.bad_values, saved_as, is_split),
        *((state, run) for state, spans in lost.items() for run in spans),
    ]
    about_sums = []
    for path, record in wrong:
        inside = [*elements_in(index, partial(_overlaps, path, record))] if record.name else []
        damaged += inside
        about_sums.append(_wrong_sum(index, path, record, {state for state, _ in inside}))
    findings = (
        *_unread(index, reading),
        *sorted(about_sums, key=str),
        *(_digests(index, reading, manifest, lost) if manifest else ()),
        *(find_zeroed(index, reading.not_zero) if index.has_masters and not (lost or index.is_partial) else ()),
        *_not_compared(index, saved_as),
    )
    intact = {
        path: [record for record in stated if record.name and (path, record) not in wrong]
        for path, stated in sums.items()
        if path not in reading.unreadable
    }
    return Deep(findings, tuple(find_bad_values(index, reading.bad_values, is_split)), join(damaged), intact)


def _stated_sums(
    index: CheckpointIndex, unreadable: frozenset[str], manifest: ManifestFacts | None
) -> dict[str, list[Record]]:
    """Return the checksums stated in torch files and the manifest, by path; one without a name is the whole file's."""
    sums: dict[str, list[Record]] = {}
    for path in index.files:
        if (path == "." or path.endswith(_OF_TORCH)) and path not in unreadable:
            with suppress(SourceError):  # reported by the structure checks
                records = list_records(index.root, path, PathIn(index.name, path))
                sums[path] = [record for record in records if record.crc is not None]
        if path.rpartition("/")[2] == METADATA:
            with suppress(SourceError):
                for file, listed in list_data_records(index.root, path, PathIn(index.name, path)).items():
                    if file not in unreadable:
                        sums[file] = [record for record in listed if record.crc is not None]
    for path, (num_bytes, crc) in manifest.files.items() if manifest else ():
        if path in index.files and path not in unreadable and index.files[path].num_bytes == num_bytes:
            sums.setdefault(path, []).append(Record("", 0, num_bytes, crc))
    return sums


def _compare_sums(reading: Reading, path: str, stated: list[Record]) -> list[tuple[str, Record]]:
    """Return the records that do not match; the whole file only if all of its records do."""
    wrong: list[tuple[str, Record]] = []
    try:
        for record in stated if path not in reading.unreadable else ():
            if (record.name or not wrong) and reading.crc_of(path, record.start, record.stop) != record.crc:
                wrong.append((path, record))
    except OSError as error:
        reading.unreadable[path] = error.strerror or str(error)
        return []
    return wrong


def _overlaps(path: str, record: Record, extent: Extent) -> bool:
    return extent.path == path and extent.start < record.stop and record.start < extent.stop


def _wrong_sum(index: CheckpointIndex, path: str, record: Record, inside: Collection[State]) -> Finding:
    where, severity = PathIn(index.name, path), ERROR if is_resumed_from(path, index) else WARNING
    if record.name:
        names = some(sorted({f"{state.kind} of {state.param}" for state in inside}))
        what = f"{record.name} does not match its checksum in the file{f'; it holds {names}' if names else ''}"
        return Finding(where, what, COPY_OR_ANOTHER, Code.CHECKSUM, severity)
    fix = "none needed if you changed it yourself" if severity == WARNING else COPY_OR_ANOTHER
    what = f"the file is not the one that the {'save' if index.is_partial else 'merge'} wrote"
    return Finding(where, what, fix, Code.MANIFEST, severity)


def _unread(index: CheckpointIndex, reading: Reading) -> Iterator[Finding]:
    for path, why in sorted(reading.unreadable.items()):
        severity = ERROR if is_resumed_from(path, index) else WARNING
        what = f"the file can't be read: {why}"
        yield Finding(PathIn(index.name, path), what, "check the disk", Code.FILE_UNREADABLE, severity)


def _digests(index: CheckpointIndex, reading: Reading, manifest: ManifestFacts, lost: Spans) -> Iterator[Finding]:
    """Compare the digests of the parts.

    Parts with unreadable states are skipped, because these are reported. In ZeRO-3, parts with buffers are skipped too:
    a digest counts the ranks' buffers as often as the sources had them. The files' checksums cover these.
    """
    part_of = find_structure(index).part_of
    parts: dict[str, list[tuple[State, int, int]]] = {}
    for state in reading.by_state:
        if state.kind != MODULE and not (state.kind == WEIGHT and index.has_masters):
            parts.setdefault(part_of[state.param], []).append((state, *reading.by_state.whole(state)))
    not_whole = {part_of[state.param] for state in lost}
    if index.has_buffers_by_rank:
        not_whole |= {part_of[param.name] for param in index.params.values() if param.role == "buffer"}
    for part, digest in manifest.digests.items():
        if part not in not_whole and part_digest(parts.get(part, ())) != digest:
            what = f"the states of {part} are not those that the merge wrote"
            yield Finding(index.name, what, "merge again, or copy the checkpoint again", Code.DIGEST, ERROR)


def _saved_as(index: CheckpointIndex) -> dict[str, tuple[SavedAs, ...]]:
    """Return the names and pieces under which transformers saves params, where they differ from those in memory."""
    where = PathIn(index.name, CONFIG)
    try:
        config = read_json(index.root / CONFIG, where) if CONFIG in index.files else {}
    except SourceError:
        return {}  # reported by the structure checks
    naming = naming_of(str(config["model_type"]) if "model_type" in config else None)
    renamed = [param for name, param in index.params.items() if naming and State(name, WEIGHT) not in index.held]
    return {param.name: tuple(on_disk(param, naming)) for param in renamed if naming}


def _not_compared(index: CheckpointIndex, saved_as: Mapping[str, tuple[SavedAs, ...]]) -> Iterator[Finding]:
    known = {*index.params, *index.tied, *(piece.name for pieces in saved_as.values() for piece in pieces)}
    names = [state.param for state in index.held if state.kind == WEIGHT and state.param not in known]
    if index.has_masters and names:
        what = f"the weights of {some(names)} have other names than the params, so were not compared with the masters"
        yield Finding(index.name, what, "try a resume: --resume-smoke", Code.NOT_COMPARED, NOTE)
