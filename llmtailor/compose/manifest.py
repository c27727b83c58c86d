"""Makes ``llmtailor.json``, the record of a composite's sources, and reads the checksums that sources state."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmtailor import __version__
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.compose.plan import Composition
from llmtailor.containers.dcp import METADATA, list_data_records
from llmtailor.containers.torch_zip import list_records
from llmtailor.containers.zip import Record
from llmtailor.documents import encode
from llmtailor.engine.copy import FileResult
from llmtailor.engine.recheck import SourceFile, Stated
from llmtailor.errors import PathIn
from llmtailor.formats.manifest import read_manifest
from llmtailor.loaders.files import CARD
from llmtailor.loaders.known_files import is_resumed_from
from llmtailor.model.parts import layer_of
from llmtailor.model.states import MODULE, WEIGHT, State
from llmtailor.storage.checksums import DIGEST, combine, crc32, part_digest
from llmtailor.storage.stand_in import location_of

SCHEMA_MANIFEST = "llmtailor.manifest/1"


def make_manifest(
    composition: Composition,
    results: Sequence[FileResult],
    digests: Mapping[SourceFile, str],
    readme: bytes,
    merge: str,
    created: str,
) -> dict[str, Any]:
    """Return the content of ``llmtailor.json``.

    ``digests`` are those of the source files; ``readme`` is recorded to detect later edits; ``merge`` is a digest of
    what was merged, to recognize the same merge.
    """
    # Skip ZeRO's rounded masters: a digest depends neither on the stage nor on names on disk.
    rounded = (MODULE, WEIGHT) if composition.target.has_masters else (MODULE,)
    crcs: dict[str, list[tuple[State, int, int]]] = defaultdict(list)
    for state, num_bytes, crc in _state_crcs(results, rounded):
        crcs[composition.structure.part_of[state.param]].append((state, num_bytes, crc))
    digest_of = {part: part_digest(found) for part, found in crcs.items()}
    report = composition.report
    return {
        "schema": SCHEMA_MANIFEST,
        "llmtailor_version": __version__,
        "merge": merge,
        "created": created,
        "base": report.base,
        "global_step": report.global_step,
        "world_size": report.world_size,
        "recipe": {"name": report.recipe, "text": composition.recipe.text},
        "sources": [
            {
                "name": index.name,
                "path": location_of(index.root.absolute()),
                "global_step": index.global_step,
                "files": [
                    {"path": path, "num_bytes": fact.num_bytes} | _digest(digests.get((number, path)))
                    for path, fact in index.files.items()
                ],
            }
            for number, index in enumerate(composition.indexes)
        ],
        "parts": [{**encode(row), "digest": digest_of.get(layer_of(row.part))} for row in report.parts],
        "optimizer_steps": encode(report.steps),
        "files": [
            {"path": one.path, "num_bytes": one.num_bytes, "crc32": f"{one.crc:08x}"} | _digest(one.digest)
            for one in results
        ],
        "card": {"path": CARD, "num_bytes": len(readme), "crc32": f"{crc32(readme):08x}"},
        "notices": encode(report.notices),
    }


def _state_crcs(results: Sequence[FileResult], left_out: Container[str]) -> Iterator[tuple[State, int, int]]:
    """Yield the number of bytes and the CRC-32 of every state but those of some kinds, as written."""
    runs: dict[State, array[int]] = defaultdict(lambda: array("Q"))  # millions, for a thousand ranks
    for run in (run for result in results for run in result.runs()):
        if run.state.kind not in left_out:
            runs[run.state].extend((run.begin, run.num_bytes, run.crc))
    for state, packed in runs.items():
        # elements may be written more than once (a buffer on every rank): count them once, in order
        written = dict(zip(packed[::3], zip(packed[1::3], packed[2::3], strict=True), strict=True))
        total, crc = 0, 0
        for begin in sorted(written):
            num_bytes, own = written[begin]
            total, crc = total + num_bytes, combine(crc, own, num_bytes)
        yield state, total, crc


def _digest(digest: str | None) -> dict[str, str]:
    return {DIGEST: digest} if digest else {}


def stated_checksums(composition: Composition, files: Iterable[SourceFile]) -> dict[SourceFile, list[Stated]]:
    """Return the checksums of these files that the sources state: torch in its files, llmtailor in its manifests."""
    manifests = [read_manifest(index.root, index.name) for index in composition.indexes]
    of_dcp = [_data_records(index) for index in composition.indexes]
    stated: dict[SourceFile, list[Stated]] = defaultdict(list)
    for number, path in files:
        index, about = composition.indexes[number], manifests[number]
        records = of_dcp[number].get(path, ())
        if path.endswith((".pt", ".pth", ".bin")):
            records = list_records(index.root, path, PathIn(index.name, path))
        for record in records:
            if record.crc is not None:
                stated[(number, path)].append(Stated(record.name, record.start, record.stop, record.crc))
        if about is not None and path in about.files and is_resumed_from(path, index):
            num_bytes, crc = about.files[path]
            stated[(number, path)].append(Stated("the file", 0, num_bytes, crc))
    return stated


def _data_records(index: CheckpointIndex) -> dict[str, tuple[Record, ...]]:
    """Return the records of the data files of a source's DCP folders."""
    folders = [path for path in index.files if path.rpartition("/")[2] == METADATA]
    found = (list_data_records(index.root, path, PathIn(index.name, path)) for path in folders)
    return {path: records for each in found for path, records in each.items()}
