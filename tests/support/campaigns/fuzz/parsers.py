"""The parsers that are fuzzed: where inputs come from, how they are mutated, and what is done with them."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from campaigns.fuzz.mutations import DROP, mutate_bytes, mutate_tree
from helpers.places import ROOT
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.containers.dcp import ALLOWED, METADATA
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.safetensors import INDEX, SINGLE, read_weights
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.containers.unpickle import Machine, Storage, read_pickle
from llmtailor.formats import param_names as model
from llmtailor.formats.composite import read_part_steps
from llmtailor.formats.registry import index_checkpoint
from llmtailor.frameworks.files import PARTIAL_MANIFEST
from llmtailor.recipe import Recipe
from llmtailor.recipe.parse import parse_recipe
from llmtailor.recipe.strategies import read_flags
from llmtailor.runs.scan import scan_run
from llmtailor.verify.inspect import describe

SEPARATOR = b"\n--- the file ---\n"
"""Between the name of a file of a checkpoint, and what stands there instead"""


@dataclass(frozen=True)
class Parser:
    """Something that takes bytes: where inputs come from, how they are mutated, and what is done with them."""

    seeds: Callable[[dict[str, Path]], list[bytes]]
    """From the folders of sound checkpoints, by form."""
    parse: Callable[[bytes, Path, dict[str, Path]], Any]
    """In a scratch folder of its own. Raises TailorError for a refusal."""
    mutate: Callable[[bytes, bytes, random.Random], bytes] = mutate_bytes


def _mutate_json(data: bytes, other: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return mutate_bytes(data, other, rng)
    try:
        tree = mutate_tree(json.loads(data), rng)
        return json.dumps(None if tree is DROP else tree).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(data, other, rng)


def _mutate_header(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate the JSON inside a safetensors file, or a tree that is text in it; keep the length in front of it right."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3 or not 0 < length <= len(data) - 8:
        return mutate_bytes(data, other, rng)
    header = data[8 : 8 + length]
    try:
        tree = json.loads(header)
        metadata = tree["__metadata__"]
        key = rng.choice(sorted(metadata))
        metadata[key] = _mutate_json(str(metadata[key]).encode(), b"", rng).decode("utf-8", "replace")
        changed = json.dumps(tree).encode() if rng.random() < 0.6 else _mutate_json(header, other, rng)
    except (ValueError, RecursionError, LookupError, TypeError):  # it has none, or has been mutated before
        changed = _mutate_json(header, other, rng)
    return struct.pack("<Q", len(changed)) + changed + data[8 + length :]


def storage_of(dtype: str, key: str, numel: int, location: str) -> Storage:
    return Storage(dtype, abs(numel) % 1000, (), location)


def pickles_of(checkpoint: Path) -> list[bytes]:
    found = []
    for path in sorted(checkpoint.rglob("*.pt")) + sorted(checkpoint.glob("*.pth")):
        with zipfile.ZipFile(path) as archive:
            found += [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    return found


def _mutate_zip(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate the end of a torch file, where the directory is, or its pickle, without a CRC to tell."""
    way = rng.random()
    if way < 0.2:
        return mutate_bytes(data, other, rng)
    if way < 0.6:
        cut = max(0, len(data) - rng.choice((22, 100, 400, 4000)))
        return data[:cut] + mutate_bytes(data[cut:], other[-200:], rng)
    try:
        return with_pickle(data, lambda raw: mutate_bytes(raw, other[:400], rng))
    except Exception:  # as below
        return mutate_bytes(data, other, rng)


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a torch file with another ``data.pkl``; its CRC is right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        for info in source.infolist():
            raw = source.read(info)
            target.writestr(info.filename, change(raw) if info.filename.endswith("/data.pkl") else raw)
    return out.getvalue()


def write_file(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder


def _parse_text(parse: Callable[[str], Any]) -> Callable[[bytes, Path, dict[str, Path]], Any]:
    return lambda data, folder, sound: parse(data.decode("utf-8", "replace"))


def _recipes(sound: dict[str, Path]) -> list[bytes]:
    configs = ROOT / "configs"
    return [path.read_bytes() for path in sorted(configs.glob("*.y*ml"))]


def _flags(sound: dict[str, Path]) -> list[bytes]:
    return [b'{"step": 100, "flag": [0, 1, 2]}\n{"step": 150, "flag": [3], "time": 1.5}\n', b""]


def _read_latest(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    for path in sound["zero3"].iterdir():
        if path.name != "latest":
            (folder / path.name).symlink_to(path)
    return index_checkpoint(write_file(folder, "latest", data))


def _index_json(sound: dict[str, Path]) -> list[bytes]:
    return [(sound["sharded"] / INDEX).read_bytes()]


def _read_index_json(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    for path in sound["sharded"].glob("*.safetensors"):
        (folder / path.name).symlink_to(path)
    return read_weights(write_file(folder, INDEX, data), "x")


def _read_trainer_state(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    for path in sound["zero3"].iterdir():
        if path.name != "trainer_state.json":
            (folder / path.name).symlink_to(path)
    return describe(index_checkpoint(write_file(folder, "trainer_state.json", data)))


def _files(*forms: str, ends: tuple[str, ...] = (".pt", ".pth", ".json")) -> Callable[[dict[str, Path]], list[bytes]]:
    def seeds(sound: dict[str, Path]) -> list[bytes]:
        found = []
        for form in forms:
            for path in sorted(sound[form].rglob("*")):
                is_of_other_param = path.parent.parent.name == "zero" and path.parent.name != "model.norm.weight"
                if path.is_file() and path.name.endswith(ends) and not is_of_other_param:
                    name = f"{form}/{path.relative_to(sound[form])}"
                    found.append(name.encode() + SEPARATOR + path.read_bytes())
        return found

    return seeds


def _mutate_file(data: bytes, other: bytes, rng: random.Random) -> bytes:
    name, _, content = data.partition(SEPARATOR)
    return name + SEPARATOR + mutate_content(content, other.partition(SEPARATOR)[2], rng, name.decode())


def mutate_content(content: bytes, other: bytes, rng: random.Random, name: str = "") -> bytes:
    """Mutate the tree inside a file of a checkpoint; now and then its bytes, or put another file in its place."""
    way = rng.random()
    if way < 0.05:
        return other
    if name.endswith(".safetensors"):
        return _mutate_header(content, other[:400], rng)
    if name.endswith(".distcp"):
        return mutate_bytes(content, other[:400], rng)
    is_metadata = name.endswith(METADATA)
    if content[:2] != b"PK" and not is_metadata:
        return _mutate_json(content, other, rng)
    by_bytes = mutate_bytes if is_metadata else _mutate_zip
    if way < 0.2:
        return by_bytes(content, other[:400] if is_metadata else other, rng)
    try:
        if is_metadata:
            return write_pickle(_changed(read_pickle(Machine(content, object_keys=True), "x", allowed=ALLOWED), rng))[0]
        return _with_other_tree(content, rng)
    except Exception:  # it has been mutated before, so anything may be wrong with it
        return by_bytes(content, other[:400] if is_metadata else other, rng)


def _changed(tree: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 3))):
        changed = mutate_tree(tree, rng)
        tree = tree if changed is DROP else changed
    return tree


def _with_other_tree(data: bytes, rng: random.Random) -> bytes:
    """Change a value of the tree in a torch file, and write it so that all else is as it was."""
    storages: dict[int, tuple[Storage, str]] = {}

    def find(dtype: str, key: str, numel: int, location: str) -> Storage:
        storage = Storage(dtype, numel, (), location)
        storages[id(storage)] = (storage, key)
        return storage

    with zipfile.ZipFile(io.BytesIO(data)) as source:
        records = {info.filename: source.read(info) for info in source.infolist()}
    prefix = next(iter(records)).partition("/")[0]
    raw, found = write_pickle(_changed(read_pickle(records[f"{prefix}/data.pkl"], "x", find), rng))
    named = {f"{prefix}/data/{at}": records[f"{prefix}/data/{storages[id(one)][1]}"] for at, one in enumerate(found)}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        others = {name: content for name, content in records.items() if not name.startswith(f"{prefix}/data/")}
        for name, content in (others | {f"{prefix}/data.pkl": raw} | named).items():
            target.writestr(name, content)
    return out.getvalue()


def _read_checkpoint(data: bytes, folder: Path, sound: dict[str, Path]) -> Any:
    """Inspect a checkpoint with one file exchanged, scan its run, and plan what can be made of it."""
    name, _, content = data.partition(SEPARATOR)
    form, _, path = name.decode().partition("/")
    is_partial = form.startswith("partial")
    root = folder / "run" / "partial" / sound[form].name if is_partial else folder / "checkpoint-100"
    shutil.copytree(sound[form], root, copy_function=os.link)
    (root / path).unlink()
    (root / path).write_bytes(content)
    if is_partial and path.endswith(".safetensors"):
        _state_size(root / PARTIAL_MANIFEST, path, len(content))
    with patch.object(model, "_describe", lambda config: "building models takes seconds"):
        index = index_checkpoint(root)
        describe(index)
        if is_partial:
            scan_run(folder / "run")
            others = [Options(world_size=3), Options(groups="layer")]
        elif form in ("dcp", "fsdp"):
            others = [Options(world_size=3, to="deepspeed")]
        else:
            others = [Options(world_size=3, stage=2 if index.form.stage == 3 else 3, groups="default")]
        for options in (Options(), *others):
            plan_merge(Recipe(name="x", base=root), folder / "out", options)


def _state_size(manifest: Path, path: str, num_bytes: int) -> None:
    """Let the manifest agree, or it would refuse every bundle whose length has changed."""
    stated = json.loads(manifest.read_bytes())
    for fact in stated["bundles"]:
        if fact["path"] == path:
            fact["num_bytes"] = num_bytes
    manifest.unlink()
    manifest.write_text(json.dumps(stated))


PARSERS = {
    "torch zip": Parser(
        lambda sound: [
            path.read_bytes() for path in (*sound["zero3"].glob("*.pt*"), *sound["zero3"].glob("global*/*"))
        ],
        lambda data, folder, sound: read_torch_file(write_file(folder, "x.pt", data), "x.pt", "x.pt"),
        _mutate_zip,
    ),
    "pickle": Parser(
        lambda sound: [each for form in ("zero3", "zero2", "plain") for each in pickles_of(sound[form])],
        lambda data, folder, sound: write_pickle(read_pickle(data, "x", storage_of)),
    ),
    "safetensors": Parser(
        lambda sound: [(sound["zero3"] / SINGLE).read_bytes()],
        lambda data, folder, sound: read_weights(write_file(folder, SINGLE, data), "x"),
        _mutate_header,
    ),
    "index.json": Parser(_index_json, _read_index_json, _mutate_json),
    "trainer_state.json": Parser(
        lambda sound: [(sound["zero3"] / "trainer_state.json").read_bytes()], _read_trainer_state, _mutate_json
    ),
    "llmtailor.json": Parser(
        lambda sound: [(sound["zero2"] / "llmtailor.json").read_bytes()],
        lambda data, folder, sound: read_part_steps(write_file(folder, "llmtailor.json", data), "x"),
        _mutate_json,
    ),
    "latest": Parser(lambda sound: [b"global_step100", b"global_step100\n"], _read_latest),
    "recipe": Parser(
        _recipes,
        _parse_text(
            lambda text: parse_recipe(text, name="x.yaml", folder=Path("/runs"), environ={"HOME": "/h", "RUN": "/run"})
        ),
    ),
    "flags": Parser(_flags, _parse_text(lambda text: read_flags(text, "flags.jsonl"))),
    "checkpoint": Parser(_files("zero3", "zero2", "plain"), _read_checkpoint, _mutate_file),
    "universal": Parser(_files("universal"), _read_checkpoint, _mutate_file),
    "partial checkpoint": Parser(
        _files("partial", "partial2", "partial0", ends=(".json", ".safetensors")), _read_checkpoint, _mutate_file
    ),
    "dcp": Parser(_files("dcp", "fsdp", ends=(METADATA, ".distcp")), _read_checkpoint, _mutate_file),
}
