"""What a checkpoint says of its sources, and the attempt that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import LIGHTNING
from llmtailor.checkpoint.lineage import THINNED, Past, read_past
from llmtailor.containers.json import read_json
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.errors import SourceError
from llmtailor.formats.composite import ManifestFacts, read_composite
from llmtailor.formats.deepspeed.files import model_name
from llmtailor.formats.lightning_tree import is_from_lightning
from llmtailor.formats.partial.manifest import read_manifest as read_partial_manifest
from llmtailor.formats.partial.manifest import read_ranges
from llmtailor.frameworks.files import CKPT, MANIFEST, TRAINER_STATE, WHOLE_MODEL
from llmtailor.frameworks.framework import FRAMEWORKS, is_partial
from llmtailor.frameworks.trainer_state import CALLBACKS, read_mark


def stated_attempt(root: Path) -> Past | None:
    """Return the attempt that a checkpoint states; None if it states none, or is damaged.

    Without a mark in the Trainer's state, the attempt of a partial checkpoint is that of its ledger, and the attempt of
    a composite that of its manifest.
    """
    with suppress(OSError, SourceError):
        content = read_json(root / TRAINER_STATE, TRAINER_STATE)
        if marked := read_mark(content, content.get("global_step")):
            return marked
    with suppress(OSError, SourceError):
        if (tree := read_lightning(root)) is not None:
            return read_mark({CALLBACKS: tree.get("callbacks")}, tree.get("global_step"))
    with suppress(OSError, SourceError):
        if is_partial(root):
            manifest = read_partial_manifest(root, root.name)
            past = read_past(manifest.step, *(manifest.ledger.get(key) for key in ("lineage", "history", "missed")))
            return None if past is None or past.lineage.startswith(THINNED) else past
    with suppress(OSError, SourceError):
        stated = read_json(root / MANIFEST, MANIFEST).get("attempt")
        if isinstance(stated, dict):
            return read_past(*(stated.get(key) for key in ("step", "lineage", "history", "missed")))
    return None


def read_manifest(root: Path, name: str) -> ManifestFacts | None:
    """Return what a merge recorded of a composite, or a save of a partial checkpoint; None if it is neither.

    Raises SourceError for a damaged manifest.
    """
    if is_partial(root):  # it may contain the manifest of the composite that it was made from
        saved = read_partial_manifest(root, name)
        files: dict[str, tuple[int, int | None]] = {one.path: (one.num_bytes, one.crc32) for one in saved.bundles}
        ranges = {one.path: read_ranges(one.ranges) for one in saved.bundles}
        return ManifestFacts(
            saved.step, saved.world_size, {}, files, {}, is_split=False, ranges=ranges, carried=saved.carried
        )
    return read_composite(root, name)


def read_lightning(root: Path) -> Mapping[Any, Any] | None:
    """Return the object tree of a checkpoint, or of its model states; None if it is not Lightning's.

    Raises SourceError for a damaged file.
    """
    tag = FRAMEWORKS[LIGHTNING].tag
    places = [CKPT, f"{tag}/{WHOLE_MODEL}", f"{tag}/{model_name(0, 3)}"]
    if root.is_file():
        places = ["."] if root.suffix == ".ckpt" else []
    path = next((path for path in places if (root / path).is_file()), None)
    tree = read_torch_file(root, path, root.name).tree if path is not None else None
    return tree if is_from_lightning(tree) else None
