"""A partial checkpoint's folder, and its manifest.

::

    <output_dir>/partial/step-00000150/
      manifest.json                         written last: without it the checkpoint does not exist
      rank-00003-of-00008.safetensors       a rank's bundle: its fragments of the chosen parts, and object trees
      frozen-00003-of-00008.safetensors     frozen params; a hard link to the same file of the save before
      trainer_state.json, config.json, ..   as the Trainer writes them; what does not change are hard links

A bundle's tensors are ``master/FQN``, ``exp_avg/FQN``, .. (one dimension: the elements that this rank has of it,
without padding), ``buffer/FQN``, and small ones that trees refer to. Its metadata has ``begin`` (JSON: FQN -> first
element of this rank's fragments) and, under ``tree:PATH``, the object tree of the stock file PATH as `encoding` writes
it, with a placeholder where a flat tensor was. There are no pickles, and no weights: these are the rounded masters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.core.index import SavedAs
from llmtailor.core.states import ITEMSIZE
from llmtailor.errors import SourceError
from llmtailor.formats.json_files import read_json
from llmtailor.formats.names import check_name, is_count, is_path_below

MANIFEST = "manifest.json"
SCHEMA = "llmtailor.partial/1"
SCHEMA_BUNDLE = "llmtailor.bundle/1"
FOLDER = "partial"
"""Beside the Trainer's ``checkpoint-N``, under a name that its rotation and its auto-resume don't look for."""
TREE = "tree:"
LEDGER = "ledger"
_FIX = "leave this checkpoint out; its save is damaged"


def folder_name(step: int) -> str:
    """Return the name of a partial checkpoint's folder, e.g. ``step-00000150``."""
    return f"step-{step:08}"


def bundle_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05}-of-{world_size:05}.safetensors"


def frozen_name(rank: int, world_size: int) -> str:
    return f"frozen-{rank:05}-of-{world_size:05}.safetensors"


@dataclass(frozen=True, slots=True)
class BundleFact:
    """A file of tensors, as the rank that wrote it knows it."""

    path: str
    num_bytes: int
    crc32: int
    """Of the whole file."""


@dataclass(frozen=True, slots=True)
class ParamFact:
    """A param or persistent buffer of the model in training."""

    shape: tuple[int, ...]
    role: str
    """See `core.index.Param`."""
    dtype: str
    """Of the live tensor"""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifest.json``, as far as a reader needs it."""

    step: int
    save_id: str
    """Random; the bundles carry it, too, so that those of two saves can't be mixed."""
    stage: int
    """ZeRO stage, or 0 without DeepSpeed"""
    world_size: int
    precision: str
    tag: str
    parts: Mapping[str, str]
    """The chosen parts, and why each was."""
    params: Mapping[str, ParamFact]
    """By FQN"""
    tied: Mapping[str, str]
    saved_as: Mapping[str, tuple[SavedAs, ...]] | None
    """Param -> the tensors that the run would save it as; None if that could not be told."""
    bundles: tuple[BundleFact, ...]
    """The ranks' bundles, in their order, then the files of frozen params."""
    shards: Mapping[str, Any]
    """Of DeepSpeed: ``is_bf16``, and the stock names of the ``optim`` and ``model`` files"""
    ledger: Mapping[str, Any]
    """The saver's memory after this save; see `history.ledger`."""


def read_manifest(root: Path, name: str) -> Manifest:
    """Read a partial checkpoint's manifest. Raises SourceError; also where there is none: the save did not finish."""
    where = f"{name}/{MANIFEST}"
    if not (root / MANIFEST).exists():
        fix = "leave this checkpoint out; the run goes on without it"
        raise SourceError.at(name, "there is no manifest.json: the save did not finish", fix)
    data = read_json(root / MANIFEST, where)
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError.at(where, f"it is no manifest of a partial checkpoint ({error!r})", _FIX) from error


def manifest_json(
    manifest: Manifest,
    *,
    policy: Mapping[str, Any],
    params_of: Mapping[str, Sequence[str]],
    num_bytes: Mapping[str, int],
    tool_version: str,
    created: str,
) -> bytes:
    """Return the content of ``manifest.json``, which `read_manifest` reads back.

    What a reader does without stands in there for people: the policy by name and options, and of each part its trained
    params and the bytes of their states, over all ranks.
    """
    content = {
        "schema": SCHEMA,
        "llmtailor_version": tool_version,
        "created": created,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "stage": manifest.stage,
        "world_size": manifest.world_size,
        "precision": manifest.precision,
        "tag": manifest.tag,
        "policy": dict(policy),
        "parts": [
            {"part": part, "why": why, "num_bytes": num_bytes[part], "params": list(params_of[part])}
            for part, why in manifest.parts.items()
        ],
        "params": {
            name: {"shape": list(fact.shape), "role": fact.role, "dtype": fact.dtype}
            for name, fact in manifest.params.items()
        },
        "tied": dict(manifest.tied),
        "saved_as": None
        if manifest.saved_as is None
        else {
            name: [[one.name, list(one.shape), one.begin] for one in made] for name, made in manifest.saved_as.items()
        },
        "bundles": [
            {"path": one.path, "num_bytes": one.num_bytes, "crc32": f"{one.crc32:08x}"} for one in manifest.bundles
        ],
        "shards": dict(manifest.shards),
        LEDGER: dict(manifest.ledger),
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _parse(data: dict[str, Any]) -> Manifest:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r} instead of {SCHEMA!r}")
    bundles = tuple(
        BundleFact(_plain_name(one["path"]), _count(one["num_bytes"]), int(one["crc32"], 16)) for one in data["bundles"]
    )
    params = {
        check_name(name, "a param", MANIFEST): ParamFact(
            tuple(map(_count, one["shape"])),
            _one_of(one["role"], ("trainable", "frozen", "buffer")),
            _one_of(one["dtype"], tuple(ITEMSIZE)),
        )
        for name, one in data["params"].items()
    }
    world_size, listed = _count(data["world_size"]), [bundle.path for bundle in bundles]
    wanted = (bundle_name(rank, world_size) for rank in range(world_size))
    if not 0 < world_size <= len(listed) or not all(name in listed for name in wanted):
        raise ValueError(f"it does not list the bundles of {world_size} ranks")
    return Manifest(
        step=_count(data["step"]),
        save_id=str(data["save_id"]),
        stage=_one_of(data["stage"], (0, 1, 2, 3)),
        world_size=world_size,
        precision=_one_of(data["precision"], ("BF16", "F16", "F32")),
        tag=_plain_name(data["tag"]),
        parts={str(one["part"]): str(one["why"]) for one in data["parts"]},
        params=params,
        tied={str(name): str(stored) for name, stored in data["tied"].items()},
        saved_as=_saved_as(data["saved_as"]),
        bundles=bundles,
        shards=_shards(data["shards"]),
        ledger=dict(data[LEDGER]),
    )


def _saved_as(data: dict[str, Any] | None) -> dict[str, tuple[SavedAs, ...]] | None:
    if data is None:
        return None
    return {
        str(param): tuple(
            SavedAs(str(name), tuple(map(_count, shape)), _count(begin)) for name, shape, begin in tensors
        )
        for param, tensors in data.items()
    }


def _shards(data: dict[str, Any]) -> dict[str, Any]:
    for path in (*data.get("optim", ()), *data.get("model", ())):
        if not isinstance(path, str) or not is_path_below(path):
            raise ValueError(f"{path!r:.80} is no file below the checkpoint")
    return dict(data)


def _plain_name(value: str) -> str:
    if "/" in value or not is_path_below(value):
        raise ValueError(f"{value!r:.80} is no plain name")
    return value


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r:.80} is no count")
    return int(value)


def _one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{value!r} is none of {choices}")
    return value
