"""Small runs of partial checkpoints, made in seconds, and ways to change what is in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import make
from helpers.composing import convert
from helpers.files import edit_json
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.storage.checksums import crc32
from thin.scene import save_partial
from trainings.alone import Alone

STEPS = (100, 200, 300)
STAGES = {"zero3": 3, "zero2": 2, "plain": 0}
FORMS = (*STAGES, "saver")


def make_run(form: str, folder: Path) -> Path:
    """Make a run whose first save is complete, and whose second and third hold half of the model each.

    ``saver`` is a training in this process, with frozen params and a buffer, the others are made of full checkpoints.
    """
    if form == "saver":
        attached = {"policy": "parity", "save_steps": 1}
        return Alone(folder, attached, prepare=freeze, max_steps=3).train().folder
    ledger = Ledger("one")
    for save, step in enumerate(STEPS):
        full = make(folder.parent / f"full-{form}", step)
        if STAGES[form] != 3:
            converted = folder.parent / f"converted-{form}" / full.name
            convert(full, converted, stage=STAGES[form])
            full = converted
        parts = find_structure(index_checkpoint(full)).parts
        ledger = save_partial(folder, full, parts if save == 0 else parts[save % 2 :: 2], ledger)
    return folder


def freeze(model: Any) -> Any:
    model.model.embed_tokens.weight.requires_grad = False
    model.model.register_buffer("counts", torch.arange(5.0))
    return model


def partials(run: Path) -> list[Path]:
    """Return the partial checkpoints, oldest first."""
    return sorted(path.parent for path in (run / "partial").glob("step-????????/manifest.json"))


def bundles(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("rank-*.safetensors"))


def edit_manifest(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    edit_json(checkpoint / "manifest.json", change)


def edit_header(bundle: Path, change: Callable[[dict[str, Any]], bytes | None], *, mend: bool = True) -> None:
    """Change a bundle's header in place; ``change`` may return other data. With ``mend`` the manifest knows nothing."""
    raw = bundle.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    data = change(header)
    text = json.dumps(header).encode()
    bundle.write_bytes(struct.pack("<Q", len(text)) + text + (raw[8 + length :] if data is None else data))
    if mend:
        mend_manifest(bundle)


def mend_manifest(bundle: Path) -> None:
    """Have the manifest list a bundle as it is now, so that neither size nor checksum gives it away."""
    raw = bundle.read_bytes()

    def change(manifest: Any) -> None:
        for one in manifest["bundles"]:
            if one["path"] == bundle.name:
                one.update(num_bytes=len(raw), crc32=f"{crc32(raw):08x}")

    edit_manifest(bundle.parent, change)
