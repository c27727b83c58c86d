"""Writes the files of a save: each rank's bundle, its frozen params if they have changed, and the manifest.

Also small files of a checkpoint that do not change during a run: config, generation config, tokenizer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from llmtailor import __version__
from llmtailor.checkpoint.layout import Copy, FileLayout, Plan
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.containers.safetensors import read_header
from llmtailor.engine.copy import Context, execute
from llmtailor.errors import SourceError, StorageError, UnsupportedCheckpoint
from llmtailor.formats.partial.manifest import (
    MANIFEST,
    SCHEMA_BUNDLE,
    BundleFact,
    Manifest,
    bundle_name,
    manifest_json,
    read_manifest,
)
from llmtailor.formats.partial.trees import encode, placeholder, stored
from llmtailor.formats.partial.write import Bundle, lay_out_tensors, to_text
from llmtailor.model.states import BUFFER
from llmtailor.runs.folder import link_or_copy
from llmtailor.saving.live import DTYPES, SOURCE, LiveTensors, bytes_of
from llmtailor.saving.model import TrainedModel, is_adapted
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.training import Kept, Left, Training
from llmtailor.storage.checksums import crc32
from llmtailor.storage.local import fsync_file, fsync_folder, replace_durably

_SAMPLES = 1 << 20
"""Bytes sampled from each frozen param to detect changes since it was written"""


@dataclass(frozen=True, slots=True)
class SaveId:
    """The save that a file belongs to."""

    save_id: str
    step: int


def write_rank(
    folder: Path, save: SaveId, training: Training, params: Collection[str], trees: Mapping[str, Any], ranks: Ranks
) -> BundleFact:
    """Write this rank's bundle: its fragments of ``params``, its buffers, and object trees of stock files by path.

    Raises StorageError, or UnsupportedCheckpoint for an object that a checkpoint must not hold.
    """
    live, bundle = LiveTensors(), Bundle(bundle_name(ranks.rank, ranks.world_size))
    for one in training.fragments(params):
        bundle.entries.append(live.entry(f"{one.kind}/{one.param}", one.tensor))
        bundle.begin[one.param] = one.begin
    bundle.entries += [live.entry(f"{BUFFER}/{name}", tensor) for name, tensor in training.buffers().items()]
    for stock, tree in trees.items():
        bundle.trees[stock] = to_text(_encode(tree, _Special(bundle, live), stock))
    facts = {
        "save_id": save.save_id,
        "step": str(save.step),
        "rank": str(ranks.rank),
        "world_size": str(ranks.world_size),
    }
    return _write(folder, bundle.lay_out(facts), live)


def check_trees(trees: Mapping[str, Any]) -> None:
    """Raise UnsupportedCheckpoint for object trees that `write_rank` would not write."""
    for stock, tree in trees.items():
        _encode(tree, _Special(Bundle(""), LiveTensors()), stock)


def write_frozen(folder: Path, training: Training, before: Path | None) -> BundleFact | None:
    """Write this rank's frozen params, or link the previous save's file if they are the same.

    A sample of each decides, because training changes all elements of a param. Raises OSError, or StorageError.
    """
    frozen = training.frozen()
    if not frozen:
        return None
    path = folder / training.frozen_file()
    fingerprint = _fingerprint(frozen)
    if before is not None and (fact := _known(before, path.name, fingerprint)) is not None:
        link_or_copy(before / path.name, path)
        return fact
    live = LiveTensors()
    entries = [live.entry(name, tensor) for name, tensor in frozen.items()]
    layout = lay_out_tensors(path.name, entries, {"schema": SCHEMA_BUNDLE, "fingerprint": fingerprint})
    return _write(folder, layout, live)


def _write(folder: Path, layout: FileLayout, live: LiveTensors) -> BundleFact:
    pieces = tuple(replace(piece, source=0) if isinstance(piece, Copy) else piece for piece in layout.pieces)
    plan = Plan((SOURCE,), (FileLayout(layout.path, pieces),))
    (result,) = execute(plan, folder, Context(stores={SOURCE: live}))
    return BundleFact(result.path, result.num_bytes, result.crc)


def publish(
    folder: Path,
    save: SaveId,
    training: Training,
    model: TrainedModel,
    policy: Mapping[str, Any],
    chosen: Mapping[str, str],
    facts: Sequence[BundleFact],
    ledger: Ledger,
    world_size: int,
) -> None:
    """Make all files of a folder durable, then complete the checkpoint by writing its manifest.

    Raises OSError, or StorageError for a rank's file that is missing or differs from what the rank wrote.
    """
    for fact in facts:
        path = folder / fact.path
        if not path.is_file() or path.stat().st_size != fact.num_bytes:
            fix = "check the disk; on several nodes, put output_dir on a file system that all of them share"
            raise StorageError.at(path, "the file is not what its rank wrote", fix)
    manifest = Manifest(
        step=save.step,
        save_id=save.save_id,
        stage=training.stage,
        world_size=world_size,
        precision=DTYPES[training.precision],
        tag=training.tag,
        parts=chosen,
        params_of={part: model.params_of[part] for part in chosen},
        params=training.params,
        tied=training.tied,
        saved_as=model.saved_as,
        bundles=tuple(facts),
        shards=training.shards(),
        ledger=ledger.to_json(),
    )
    content = manifest_json(
        manifest,
        policy=policy,
        num_bytes=model.num_bytes,
        tool_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    for path in folder.iterdir():
        fsync_file(path)
    fsync_folder(folder)
    replace_durably(folder / MANIFEST, content)
    fsync_folder(folder)
    fsync_folder(folder.parent)


class _Special:
    """Encodes the tensors of a tree as entries of the bundle, or as references to where they are stored."""

    def __init__(self, bundle: Bundle, live: LiveTensors) -> None:
        self.bundle = bundle
        self.live = live

    def __call__(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, torch.Tensor):
            key = f"tree/{len(self.bundle.entries)}"
            self.bundle.entries.append(self.live.entry(key, value))
            return stored(self.bundle.path, key)
        if isinstance(value, Kept):
            return stored(value.file, value.key)
        if isinstance(value, Left):
            return placeholder(DTYPES[value.dtype], value.shape)
        if isinstance(value, torch.Size):
            size = {"$": "global", "module": "torch", "name": "Size"}
            args = [{"$": "tuple", "items": list(value)}]
            return {"$": "call", "func": size, "args": args, "new": False, "appends": [], "items": []}
        return None


def _encode(tree: Any, special: _Special, stock: str) -> Any:
    try:
        return encode(tree, special, stock)
    except TypeError as error:
        fix = "use only numbers, strings, lists, mappings and tensors: a resume would not load anything else either"
        raise UnsupportedCheckpoint.at("the state to save", str(error), fix) from error


def _known(before: Path, name: str, fingerprint: str) -> BundleFact | None:
    """Return the fact of the file in the previous save, if its content is the same."""
    try:
        header = read_header(before, name, name)
        listed = {one.path: one for one in read_manifest(before, name).bundles}
    except SourceError:
        return None
    return listed.get(name) if header.metadata.get("fingerprint") == fingerprint else None


def _fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    crc = 0
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().reshape(-1)
        stride = max(1, flat.numel() * flat.element_size() // _SAMPLES)
        sample = flat[::stride].to("cpu").contiguous()
        crc = crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), crc)
        crc = crc32(bytes_of(sample), crc)
    return f"{crc:08x}"


class CarriedFiles:
    """Files written by their owners at the first save, and hard links to the previous save afterwards."""

    def __init__(self, *owners: Any) -> None:
        self.owners = [owner for owner in owners if hasattr(owner, "save_pretrained")]
        self.written: list[Path] = []

    def put(self, folder: Path) -> None:
        """Put the files into a folder. Raises OSError, or StorageError."""
        if self.written and all(path.is_file() for path in self.written):
            for path in self.written:
                link_or_copy(path, folder / path.name)
            self.written = [folder / path.name for path in self.written]
            return
        before = set(folder.iterdir())
        for owner in self.owners:
            try:
                owner.save_pretrained(folder)
            except Exception as error:
                if isinstance(error, OSError) or "os error" not in str(error):
                    raise
                fix = "free some space, or check the disk"  # tokenizers raises a bare Exception
                raise StorageError.at(folder, str(error), fix) from error
        self.written = sorted(path for path in set(folder.iterdir()) - before if path.is_file())
        for path in self.written:
            fsync_file(path)


def owners_of(model: Any, processing_class: Any = None) -> list[Any]:
    """Return the objects whose ``save_pretrained`` the Trainer would call, besides the model itself."""
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    can_generate = generation is not None and getattr(model, "can_generate", lambda: False)()
    if is_adapted(model):
        return [_adapter_as_saved(model), processing_class]
    return [_as_saved(config, model), generation if can_generate else None, processing_class]


def _adapter_as_saved(model: Any) -> Any:
    """Return the config of the adapter in the root, with the additions of PEFT's own ``save_pretrained``."""
    adapters, base = model.peft_config, model.get_base_model()
    config = copy.deepcopy(adapters.get("default") or next(iter(adapters.values())))
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    if config.task_type is None:
        config.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return config


def _as_saved(config: Any, model: Any) -> Any:
    """Return a copy of a config with the additions of ``model.save_pretrained``."""
    if not hasattr(config, "save_pretrained") or not hasattr(model, "save_pretrained"):
        return config
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(model.dtype).removeprefix("torch."))
    return config
