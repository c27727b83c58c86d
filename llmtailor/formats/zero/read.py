"""A folder with DeepSpeed shards. `deepspeed_common.read` reads them."""

from __future__ import annotations

from pathlib import Path

from llmtailor.containers.trees import FileTrees
from llmtailor.errors import Problems
from llmtailor.formats.deepspeed_common.files import survey_shard_files
from llmtailor.formats.deepspeed_common.read import (
    read_shards,
)
from llmtailor.formats.finish import Draft
from llmtailor.loaders.files import LATEST
from llmtailor.loaders.loader import is_tag_alone


def detects(root: Path) -> bool:
    """Return whether a folder has what DeepSpeed leaves in the root of a checkpoint."""
    return (root / LATEST).exists() or any(root.glob("global_step*")) or is_tag_alone(root)


def read(root: Path, name: str, client: str | None = None) -> Draft:
    """Read a checkpoint with DeepSpeed shards; no tensor byte is read except the 4 bytes of each ``step``.

    Raises SourceError or UnsupportedCheckpoint for any other folder; the draft reports damage.
    """
    problems = Problems()
    files = survey_shard_files(root, name, problems)
    return read_shards(FileTrees(root), files, name, problems, client)
