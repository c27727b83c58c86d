"""Folders of torch.distributed.checkpoint with everything: {"model", "optim"} of a loop, torchtitan's step-N."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llmtailor.checkpoint.index import DCP
from llmtailor.codes import Code
from llmtailor.containers.dcp import DATA_FILE, METADATA, SHARD_FILE, mentions
from llmtailor.containers.json import get, read_json
from llmtailor.errors import COPY_BACK, PathIn, Problems, SourceError, UnsupportedCheckpoint, attempt, damaged, some
from llmtailor.formats.composite import read_composite
from llmtailor.formats.dcp.folder import read_folder, read_shards
from llmtailor.formats.dcp.index import Folders, draft_of
from llmtailor.formats.format import Draft
from llmtailor.frameworks.files import DCP_RECORD

_CHECKSUM = re.compile("[0-9a-f]{8}")


_RANK_METADATA = re.compile(r"__[0-9]+\.metadata")


def detects(root: Path) -> bool:
    """Return whether a folder is, or was, a DCP folder."""
    names = {path.name for path in root.iterdir()} if root.is_dir() else set()
    is_listed = METADATA in names or DCP_RECORD in names
    return is_listed or any(DATA_FILE.fullmatch(name) or _RANK_METADATA.fullmatch(name) for name in names)


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a DCP folder; of its tensors only the 4 bytes of each ``step`` are read, and samples of tensors that may be
    tied.

    Raises UnsupportedCheckpoint for a folder without optimizer states, or saved rank by rank without a common metadata.
    """
    problems = Problems()
    if any(_RANK_METADATA.fullmatch(path.name) for path in root.iterdir()):
        what = "saved with use_collectives=False: only the same set of ranks can load it"
        raise UnsupportedCheckpoint.at(name, what, "save it with use_collectives=True")
    manifest = attempt(lambda: read_composite(root, name), problems)
    linked: Mapping[str, int | None] = manifest.links if manifest is not None else _files_of_save(root, name, problems)
    folder = None
    if any(map(SHARD_FILE.fullmatch, linked)):
        folder = read_shards(root, name, problems, linked)
    elif (root / METADATA).exists():
        folder = read_folder(root, "", name, problems, linked)
    else:
        what = "the file is missing: the save was not finished, or it was lost in a copy"
        problems.add(SourceError.at(PathIn(name, METADATA), what, COPY_BACK, Code.FILE_MISSING))
    return draft_of(root, name, Folders(DCP, folder) if folder else None, manifest, problems)


def _files_of_save(root: Path, name: str, problems: Problems) -> dict[str, int | None]:
    """Return the data files of a partial save through DCP, own ones and links, with their checksums, if any."""
    where = PathIn(name, DCP_RECORD)

    def read() -> dict[str, int | None]:
        record = read_json(root / DCP_RECORD, where)
        files = get(record, "files", dict, where)
        is_of_this = any(map(SHARD_FILE.fullmatch, files)) or mentions(  # the former are without .metadata
            root, METADATA, PathIn(name, METADATA), get(record, "save_id", str, where)
        )
        if odd := [path for path, one in files.items() if not (one is None or _CHECKSUM.fullmatch(f"{one}"))]:
            raise damaged(where, f"the checksum of {some(odd)} is none")
        return {path: one and int(one, 16) for path, one in files.items() if is_of_this}

    return (attempt(read, problems) or {}) if (root / DCP_RECORD).is_file() else {}
