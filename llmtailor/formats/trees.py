"""The object tree of a stock file, whichever container holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtailor.containers.torch_zip import read_torch_file
from llmtailor.errors import PathIn
from llmtailor.formats.partial.read import is_partial, open_partial


def read_tree(root: Path, path: str, where: str) -> Any:
    """Decode ``root/path``: from the file itself or, in a partial checkpoint, from the bundle that has it inside.

    No tensor byte is read. Raises SourceError for what is missing or damaged, and UnsafePickle for names that are not
    on the allow-list.
    """
    if is_partial(root):
        return open_partial(root, where.checkpoint if isinstance(where, PathIn) else str(root)).tree(path)
    return read_torch_file(root, path, where).tree
