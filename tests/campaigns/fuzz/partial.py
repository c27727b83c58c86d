"""Partial checkpoints as input: a file of one is exchanged, and what can be made of it is planned."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from campaigns.fuzz.mutations import DROP, mutate_bytes, mutate_tree
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.engine.pool import Stop
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.loaders.files import PARTIAL_MANIFEST
from llmtailor.recipe import Recipe
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.prune import Conversion
from llmtailor.runs.scan import scan_run
from llmtailor.runs.thin import write_conversion
from llmtailor.verify.inspect import describe

SEPARATOR = b"\n--- the file ---\n"


def make_partial(full: Path, run: Path) -> Path:
    """Turn a full checkpoint into a partial one of a run; it holds every part."""
    index = index_checkpoint(full)
    structure = find_structure(index)
    after = Ledger("fuzz").after(index.global_step, structure.parts, structure.parts)
    target = RunFolder(run).at(index.global_step)
    target.parent.mkdir(parents=True)
    plan = Conversion(index, structure, target, dict.fromkeys(structure.parts, "all"), after, {"name": "full"}, {})
    write_conversion(plan, Stop())
    return target


def seeds(sound: dict[str, Path]) -> list[bytes]:
    """Return inputs that name a file of a partial checkpoint, and hold what stands there instead."""
    return [
        f"{form}/{path.name}".encode() + SEPARATOR + path.read_bytes()
        for form in ("partial", "partial2", "partial0")
        for path in sorted(sound[form].iterdir())
        if path.suffix in (".json", ".safetensors")
    ]


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    name, _, content = data.partition(SEPARATOR)
    change = _mutate_json if name.endswith(b".json") else _mutate_bundle
    return name + SEPARATOR + change(content, other.partition(SEPARATOR)[2], rng)


def read(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    """Inspect it, scan its run, and plan composites of it."""
    name, _, content = data.partition(SEPARATOR)
    form, _, path = name.decode().partition("/")
    root = folder / "run" / "partial" / sound[form].name
    shutil.copytree(sound[form], root, copy_function=os.link)
    (root / path).unlink()
    (root / path).write_bytes(content)
    if path.endswith(".safetensors"):
        _tell_size(root / PARTIAL_MANIFEST, path, len(content))
    index = index_checkpoint(root)
    describe(index)
    scan_run(folder / "run")
    for options in (Options(), Options(world_size=3), Options(groups="layer")):
        plan_merge(Recipe("x", "", root, (), None, None), folder / "out", options)


def _tell_size(manifest: Path, path: str, num_bytes: int) -> None:
    """Let the manifest agree, or it would refuse every bundle whose length has changed."""
    told = json.loads(manifest.read_bytes())
    for fact in told["bundles"]:
        if fact["path"] == path:
            fact["num_bytes"] = num_bytes
    manifest.unlink()
    manifest.write_text(json.dumps(told))


def _mutate_json(data: bytes, other: bytes, rng: random.Random) -> bytes:
    try:
        tree = mutate_tree(json.loads(data), rng)
        text = json.dumps(tree).encode() if tree is not DROP else b""
    except (ValueError, RecursionError):  # it has been mutated before
        text = b""
    return text if text and rng.random() < 0.8 else mutate_bytes(data, other[:400], rng)


def _mutate_bundle(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate the header of a bundle: what lies where, or an object tree that is text inside of it."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.1 or not 0 < length <= len(data) - 8:
        return mutate_bytes(data, other[:400], rng)
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = header["__metadata__"]
        key = rng.choice(sorted(metadata))
        if rng.random() < 0.7:
            metadata[key] = _mutate_json(str(metadata[key]).encode(), b"", rng).decode("utf-8", "replace")
            raw = json.dumps(header).encode()
        else:
            raw = _mutate_json(data[8 : 8 + length], b"", rng)
    except (ValueError, RecursionError, LookupError, TypeError):  # it has been mutated before
        return mutate_bytes(data, other[:400], rng)
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]
