"""What Lightning saves besides weights and optimizer, found without an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import LIGHTNING
from llmtailor.containers.torch_zip import read_torch_file
from llmtailor.formats.lightning.tree import is_lightnings
from llmtailor.formats.zero.files import model_name
from llmtailor.loaders.files import CKPT, WHOLE_MODEL
from llmtailor.loaders.loader import CLIENTS


def read_lightning(root: Path) -> Mapping[Any, Any] | None:
    """Return the object tree of a checkpoint, or of its model states; None if it is not Lightning's.

    Raises SourceError for a damaged file.
    """
    tag = CLIENTS[LIGHTNING].tag
    places = [CKPT, f"{tag}/{WHOLE_MODEL}", f"{tag}/{model_name(0, 3)}"]
    if root.is_file():
        places = ["."] if root.suffix == ".ckpt" else []
    path = next((path for path in places if (root / path).is_file()), None)
    tree = read_torch_file(root, path, root.name).tree if path is not None else None
    return tree if is_lightnings(tree) else None
