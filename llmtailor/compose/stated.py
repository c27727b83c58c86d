"""The checksums of source files that the sources state themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.compose.plan import Composition
from llmtailor.containers.dcp import METADATA, list_data_records
from llmtailor.containers.torch_zip import list_records
from llmtailor.containers.zip import Record
from llmtailor.engine.recheck import SourceFile, Stated
from llmtailor.errors import PathIn
from llmtailor.formats.known_files import is_resumed_from
from llmtailor.formats.manifest import read_manifest


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
