"""The deep part of `verify`: values, checksums and digests. Every byte is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.containers.torch_zip import Record, list_records
from llmtailor.errors import PathIn, SourceError, some
from llmtailor.findings import ERROR, NOTE, WARNING, Finding
from llmtailor.formats.manifest import ManifestFacts
from llmtailor.formats.registry import dissect_checkpoint
from llmtailor.formats.trainer import CONFIG
from llmtailor.model.disk_names import naming_of, on_disk
from llmtailor.model.states import MODULE, WEIGHT, State
from llmtailor.storage.checksums import part_digest
from llmtailor.verify.bad_values import (
    Spans,
    damaged_elements,
    elements_in,
    find_blemishes,
    find_zeroed,
    join,
    lost_elements,
)
from llmtailor.verify.composite import is_resumed_from
from llmtailor.verify.read import Reader, Reading, Readings, crc_of_range, run_all
from llmtailor.verify.streams import SavedNames, bundle_states

_COPY_AGAIN = "copy the file again, or take another checkpoint"


@dataclass(frozen=True, slots=True)
class Deep:
    """What reading has brought to light."""

    findings: tuple[Finding, ...]
    """About files and checksums."""
    values: tuple[Finding, ...]
    """About the values of states."""
    states: Spans
    """Elements that are lost or can't be trusted."""


def read_everything(
    index: CheckpointIndex,
    unreadable: frozenset[str],
    manifest: ManifestFacts | None,
    observe: Callable[[int], None] = lambda num_bytes: None,
) -> Deep:
    """Read a checkpoint and check its values and checksums.

    ``observe`` is told of bytes read, from several threads. Raises Interrupted on Ctrl-C.
    """
    saved_as = _saved_as(index)
    records = dict(_records(index, unreadable))
    summed = {path for path, listed in records.items() if any(record.crc is not None for record in listed)}
    whole = {
        path: crc
        for path, (num_bytes, crc) in (manifest.files if manifest else {}).items()
        if path in index.files and path not in unreadable and index.files[path].num_bytes == num_bytes
    }
    reader = Reader(index.root)
    try:
        reading = Reading(
            reader,
            index.precision,
            unreadable,
            frozenset(summed | set(whole)),
            bool(manifest and manifest.digests),
            observe,
        )
        readings = reading.read(bundle_states(index, saved_as, unreadable))
        off = _compare_checksums(index, reader, readings, records, whole, observe)
    finally:
        reader.close()
    is_split = manifest is not None and manifest.is_split
    lost = join(lost_elements(index, unreadable | frozenset(readings.unreadable)))
    findings = [
        *_unread(index, readings),
        *off.findings,
        *(_digests(index, readings, manifest, lost) if manifest else ()),
        *(find_zeroed(index, readings.not_zero) if index.stage and not (lost or index.is_partial) else ()),
        *_not_compared(index, saved_as),
    ]
    runs = [
        *damaged_elements(index, readings.blemishes, saved_as, is_split),
        *((state, run) for spans_of in (lost, off.states) for state, spans in spans_of.items() for run in spans),
    ]
    values = tuple(find_blemishes(index, readings.blemishes, is_split))
    return Deep(tuple(findings), values, join(runs))


def _records(index: CheckpointIndex, unreadable: frozenset[str]) -> Iterator[tuple[str, tuple[Record, ...]]]:
    for path in index.files:
        if path.endswith((".pt", ".pth", ".bin")) and path not in unreadable:
            try:
                yield path, list_records(index.root, path, PathIn(index.name, path))
            except SourceError:
                continue  # told by the structure checks


def _compare_checksums(
    index: CheckpointIndex,
    reader: Reader,
    readings: Readings,
    records: Mapping[str, tuple[Record, ...]],
    whole: Mapping[str, int],
    observe: Callable[[int], None],
) -> Deep:
    """Hold what was read against the zip directories and the manifest; what no state lies in is read now."""
    findings: list[Finding] = []
    runs: list[tuple[State, tuple[int, int]]] = []

    def compare(path: str) -> None:
        if path in readings.unreadable:
            return
        read = partial(crc_of_range, reader, path, observe=observe)
        where, severity = PathIn(index.name, path), ERROR if is_resumed_from(path, index) else WARNING
        try:
            wrong = [
                record
                for record in records.get(path, ())
                if record.crc is not None
                and readings.by_file.crc_of(path, record.start, record.stop, read) != record.crc
            ]
            size = index.files[path].num_bytes
            changed = not wrong and path in whole and readings.by_file.crc_of(path, 0, size, read) != whole[path]
        except OSError as error:
            readings.unreadable[path] = error.strerror or str(error)
            return
        for record in wrong:
            inside = [*elements_in(index, path, record.start, record.stop)]
            runs.extend(inside)
            holding = f", which holds {some(sorted({_label(state) for state, _ in inside}))}" if inside else ""
            what = f"{record.name} does not match its checksum in the file{holding}"
            findings.append(Finding(where, what, _COPY_AGAIN, Code.CHECKSUM, severity))
        if changed:
            fix = "nothing, if you changed it yourself" if severity == WARNING else _COPY_AGAIN
            writer = "save" if index.is_partial else "merge"
            findings.append(
                Finding(where, f"the file is not the one that the {writer} has written", fix, Code.MANIFEST, severity)
            )

    run_all(compare, sorted({*records, *whole}))
    return Deep(tuple(sorted(findings, key=str)), (), join(runs))


def _label(state: State) -> str:
    return f"{state.kind} of {state.param}"


def _unread(index: CheckpointIndex, readings: Readings) -> Iterator[Finding]:
    for path, why in sorted(readings.unreadable.items()):
        severity = ERROR if is_resumed_from(path, index) else WARNING
        yield Finding(
            PathIn(index.name, path), f"the file can't be read: {why}", "check the disk", Code.FILE_UNREADABLE, severity
        )


def _digests(index: CheckpointIndex, readings: Readings, manifest: ManifestFacts, lost: Spans) -> Iterator[Finding]:
    """Compare the digests of the parts.

    Not of those with states that could not be read, which are told of; nor, in ZeRO-3, of those with buffers: a digest
    counts the ranks' buffers as often as the sources had them. The files' checksums cover these.
    """
    part_of = dissect_checkpoint(index).part_of
    parts: dict[str, list[tuple[State, int, int]]] = {}
    for state in readings.by_state:
        if state.kind != MODULE and not (state.kind == WEIGHT and index.stage):
            num_bytes, crc = readings.by_state.whole(state)
            parts.setdefault(part_of[state.param], []).append((state, num_bytes, crc))
    not_whole = {part_of[state.param] for state in lost}
    if index.stage == 3:
        not_whole |= {part_of[param.name] for param in index.params.values() if param.role == "buffer"}
    for part, digest in manifest.digests.items():
        if part not in not_whole and part_digest(parts.get(part, ())) != digest:
            what = f"the states of {part} are not those that the merge has written"
            yield Finding(index.name, what, "merge again, or copy the checkpoint again", Code.DIGEST, ERROR)


def _saved_as(index: CheckpointIndex) -> SavedNames:
    """transformers saves some models by other names, and in other pieces, than they have in memory."""
    where = PathIn(index.name, CONFIG)
    try:
        config = read_json(index.root / CONFIG, where) if CONFIG in index.files else {}
    except SourceError:
        return {}  # told by the structure checks
    naming = naming_of(str(config["model_type"]) if "model_type" in config else None)
    renamed = [param for name, param in index.params.items() if naming and State(name, WEIGHT) not in index.held]
    return {param.name: tuple(on_disk(param, naming)) for param in renamed if naming}


def _not_compared(index: CheckpointIndex, saved_as: SavedNames) -> Iterator[Finding]:
    known = {*index.params, *index.tied, *(piece.name for pieces in saved_as.values() for piece in pieces)}
    names = [state.param for state in index.held if state.kind == WEIGHT and state.param not in known]
    if index.stage and names:
        what = f"the weights of {some(names)} go by other names than the params, and were not compared with the masters"
        yield Finding(index.name, what, "resume it for a try: --resume-smoke", Code.NOT_COMPARED, NOTE)
