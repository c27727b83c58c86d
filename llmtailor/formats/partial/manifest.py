"""A partial checkpoint's folder, and its manifest.

::

    <output_dir>/partial/step-00000150/
      manifest.json                         written last: without it the checkpoint does not exist
      rank-00003-of-00008.safetensors       a rank shard: the rank's fragments of the chosen parts, and object trees
      frozen-00003-of-00008.safetensors     frozen params; a hard link to the same file of the previous save
      differences-00003-of-00008.delta      masters as compressed differences, see `differences`
      trainer_state.json, config.json, ..   as the Trainer writes them; unchanged ones are hard links

A rank shard's tensors are ``master/FQN``, ``exp_avg/FQN``, .. (one dimension: the elements that this rank has of it,
without padding), ``buffer/FQN``, and small ones that trees refer to. Its metadata has ``begin`` (JSON: FQN -> first
element of this rank's fragments) and, under ``tree:PATH``, the object tree of the stock file PATH in the form of
`trees`, with placeholders for flat tensors. If a save leaves out some of the experts that are fused in a param,
``begin`` is a list of runs of elements, each with its first and its last + 1; they follow each other in the tensor. If
it has moments of fewer elements than masters, their list is under ``exp_avg/FQN``. Under tensor parallelism a rank may
have a box of a param whose elements are not adjacent; then ``begin`` is its ``{offsets, sizes}`` along each dimension.
There are neither pickles nor weights: weights are the rounded masters.

The functions that check single values of a possibly damaged manifest return them, or raise ValueError.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.layout import Bytes, Segment, Zeros
from llmtailor.checkpoint.placement import Runs, count, union
from llmtailor.checkpoint.step_names import step_of
from llmtailor.codes import Code
from llmtailor.containers.json import MAX_BYTES, is_count, is_name, is_path_below, read_strict_json
from llmtailor.containers.unpickle import MAX_DIMENSIONS
from llmtailor.errors import PathIn, SourceError
from llmtailor.frameworks.files import PARTIAL_MANIFEST
from llmtailor.model.dtypes import DTYPES
from llmtailor.model.parts import Part, SavedAs
from llmtailor.model.roles import is_moment
from llmtailor.storage.local import read_source

_CRC = re.compile(r"[0-9a-f]{8}")
_RANGE = re.compile(r"([0-9a-f]{1,14})\+([0-9a-f]{1,14})=([0-9a-f]{8})")


def _checker(is_it: Callable[[Any], bool], what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not is_it(value):
            raise ValueError(f"{value!r:.80} is not {what}")
        return value

    return check


def _one_of(*choices: Any) -> Callable[[Any], Any]:
    is_it = {(type(choice), choice) for choice in choices}
    return _checker(lambda value: (type(value), value) in is_it, f"one of {choices[:4]}")


_list = _checker(lambda value: isinstance(value, list), "a list")
_mapping = _checker(lambda value: isinstance(value, dict), "an object")
_count = _checker(is_count, "a count")
_name = _checker(is_name, "a name")
_plain_name = _checker(lambda value: is_name(value) and "/" not in value and is_path_below(value), "a plain name")
_file = _checker(lambda value: is_name(value) and is_path_below(value), "the path of a file")
_crc = _checker(lambda value: bool(_CRC.fullmatch(value)), "a CRC-32")
_steps = _checker(lambda value: type(value) in (int, float) and 0 <= value < 1e15, "a number of steps")
_role, _dtype = _one_of("trainable", "frozen", "buffer"), _one_of(*DTYPES)


def _shape(value: Any) -> tuple[int, ...]:
    if len(_list(value)) > MAX_DIMENSIONS:
        raise ValueError("a shape has too many dimensions")
    shape = tuple(map(_count, value))
    _count(math.prod(shape))
    return shape


SCHEMA = "llmtailor.partial/1"
SCHEMA_MASTERS = "llmtailor.partial/2"
"""Of a save with ``masters``: readers of the other schema would miss these parts"""
SCHEMA_DIFFERENCES = "llmtailor.partial/3"
"""Of a save that also has files of differences"""
SCHEMA_BUNDLE = "llmtailor.bundle/1"
TREE = "tree:"
KEY_LAYOUT = "dcp/style"
"""The name of the tree, beside those of stock files, that says how the run's DCP folders are arranged::

    {model, optimizer, is_flat, form,
     others: [{path, object} or {path, dtype, shape, boxes: [(offsets, sizes, tensor)]}]}
"""
IS_THINNED = "made_of_full_checkpoints"
_FIX = "leave this checkpoint out; its save is damaged"


def folder_name(step: int) -> str:
    """Return the name of a partial checkpoint's folder, e.g. ``step-00000150``."""
    return f"step-{step:08}"


def step_in_name(name: str) -> int | None:
    """Return the step in a folder's name, or None if the name is not a partial checkpoint's."""
    return step_of(Path(name)) if name.startswith("step-") and len(name) >= len(folder_name(0)) else None


def bundle_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05}-of-{world_size:05}.safetensors"


def frozen_name(rank: int, world_size: int) -> str:
    return f"frozen-{rank:05}-of-{world_size:05}.safetensors"


def differences_name(rank: int, world_size: int) -> str:
    return f"differences-{rank:05}-of-{world_size:05}.delta"


@dataclass(frozen=True, slots=True)
class BundleFact:
    """A file of tensors, as described by the rank that wrote it."""

    path: str
    num_bytes: int
    crc32: int
    """Checksum of the whole file"""
    ranges: str = ""
    """Checksums of what merges read of it, see `ranges_of`; empty in older saves, and of what is not read in ranges"""


def ranges_of(pieces: Iterable[tuple[Segment, int]]) -> str:
    """Return the checksums of the states in a file as text: ``START+LENGTH=CRC32`` each, in hex.

    ``pieces`` are those of the file, each with its CRC-32.
    """
    at, found = 0, []
    for piece, crc in pieces:
        if not isinstance(piece, (Bytes, Zeros)) and piece.num_bytes:
            found.append(f"{at:x}+{piece.num_bytes:x}={crc:08x}")
        at += piece.num_bytes
    return " ".join(found)


def read_ranges(text: str) -> list[tuple[int, int, int]]:
    """Return start, stop and CRC-32 of each range in what `ranges_of` returned. Raises ValueError."""
    found = []
    for one in text.split():
        if not (match := _RANGE.fullmatch(one)):
            raise ValueError(f"{one!r:.40} is not a range")
        start, length, crc = (int(number, 16) for number in match.groups())
        found.append((start, start + length, crc))
    return found


@dataclass(frozen=True, slots=True)
class ParamFact:
    """A param or persistent buffer of the model in training."""

    shape: tuple[int, ...]
    role: str
    """See `model.parts.Param`."""
    dtype: str
    """Dtype of the live tensor"""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifest.json`` that readers need."""

    step: int
    save_id: str
    """Random; also in the rank shards, so that those of two saves can't be mixed"""
    stage: int
    """ZeRO stage, or 0 without DeepSpeed"""
    world_size: int
    precision: str
    tag: str
    parts: Mapping[Part, str]
    """The chosen parts, and the reason for each"""
    params_of: Mapping[Part, Sequence[str]]
    """The trained params of each chosen part: the rank shards hold every state of these, and of no others"""
    params: Mapping[str, ParamFact]
    """By FQN"""
    tied: Mapping[str, str]
    saved_as: Mapping[str, tuple[SavedAs, ...]] | None
    """Param -> the tensors that the run would save it as, none for what PEFT does not save; None if unknown"""
    bundles: tuple[BundleFact, ...]
    """The rank shards in rank order, then the files of frozen params, and of differences"""
    shards: Mapping[str, Any]
    """DeepSpeed's ``is_bf16``, and the stock names of the ``optim`` and ``model`` files"""
    ledger: Mapping[str, Any]
    """The record of the saves up to this one; see `checkpoint.lineage`"""
    setback: Mapping[Part, float] = field(default_factory=dict)
    """Part that this save left out -> estimated steps that training falls back with its last save; empty if unknown"""
    pieces_of: Mapping[Part, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    """Chosen part -> fused param -> the first and the last + 1 of the expert's elements. The rank shards also
    hold the states of these."""
    masters: tuple[Part, ...] = ()
    """Further parts: the rank shards hold their masters without the moments. They are also in ``params_of``
    and ``pieces_of``."""
    carried: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Path -> size and CRC-32 of the other files, such as ``trainer_state.json``; empty in older saves"""
    bases: Mapping[Part, str] = field(default_factory=dict)
    """Of ``masters`` -> the ``save_id`` of the save from whose masters theirs are differences"""
    is_thinned: bool = False
    """Whether ``thin`` made it from a full checkpoint: `IS_THINNED` among the policy's settings"""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Name and options of the policy"""
    unclear: tuple[str, ...] = ()
    """Frozen params that may be buffers: the full checkpoint did not say"""

    def runs_of(self, kind: str) -> dict[str, Runs]:
        """Return the elements of every trained param for which the rank shards hold a kind of state."""
        left_out = {*self.masters} if is_moment(kind) else set()
        held = [names for part, names in self.params_of.items() if part not in left_out]
        runs = {name: [(0, math.prod(self.params[name].shape))] for names in held for name in names}
        for part, pieces in self.pieces_of.items():
            for name, run in pieces.items() if part not in left_out else ():
                runs.setdefault(name, []).append(run)
        return {name: union(tuple(found)) for name, found in runs.items()}


def read_manifest(root: Path, name: str) -> Manifest:
    """Return a partial checkpoint's manifest. Raises SourceError, also for an unfinished save, which has none."""
    where = PathIn(name, PARTIAL_MANIFEST)
    if not (root / PARTIAL_MANIFEST).exists():
        fix = "leave this checkpoint out; the run continues without it"
        raise SourceError.at(name, "there is no manifest.json: the save did not finish", fix, Code.MANIFEST)
    text = read_source(root / PARTIAL_MANIFEST, where, MAX_BYTES)
    try:
        return _parse(read_strict_json(text))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        what = f"it is not a partial checkpoint's manifest ({error!r:.200})"
        raise SourceError.at(where, what, _FIX, Code.MANIFEST) from error


def manifest_json(
    manifest: Manifest, *, policy: Mapping[str, Any], num_bytes: Mapping[str, int], tool_version: str, created: str
) -> bytes:
    """Return the content of ``manifest.json``, which `read_manifest` reads back.

    It also has facts for people only: the policy's name and options, and the bytes of each part's states over all
    ranks.
    """
    saved_as = manifest.saved_as or {}
    rows = {name: [[one.name, list(one.shape), one.begin] for one in made] for name, made in saved_as.items()}
    content = {
        "schema": SCHEMA,
        "llmtailor_version": tool_version,
        "created": created,
        **{key: getattr(manifest, key) for key in _PLAIN},
        "policy": dict(policy),
        "parts": [
            {"part": part, "why": why, "num_bytes": num_bytes[part], **_params_of(part, manifest)}
            for part, why in manifest.parts.items()
        ],
        "params": {
            name: {"shape": list(fact.shape), "role": fact.role, "dtype": fact.dtype}
            for name, fact in manifest.params.items()
        },
        "tied": dict(manifest.tied),
        "saved_as": None if manifest.saved_as is None else rows,
        "bundles": [
            {"path": one.path, "num_bytes": one.num_bytes, "crc32": f"{one.crc32:08x}", "ranges": one.ranges}
            for one in manifest.bundles
        ],
        "carried": [
            {"path": path, "num_bytes": size, "crc32": f"{crc:08x}"} for path, (size, crc) in manifest.carried.items()
        ],
        "shards": dict(manifest.shards),
        "ledger": dict(manifest.ledger),
    }
    if manifest.masters:
        has_files = any(one.path.endswith(".delta") for one in manifest.bundles)
        content |= {"schema": SCHEMA_DIFFERENCES if has_files else SCHEMA_MASTERS}
        bases = {part: {"base": base} for part, base in manifest.bases.items()}
        content["masters"] = [
            {"part": part, **_params_of(part, manifest), **bases.get(part, {})} for part in manifest.masters
        ]
    if manifest.unclear:
        content["unclear"] = [*manifest.unclear]
    if manifest.setback:
        content["setback"] = {part: round(steps, 3) for part, steps in manifest.setback.items()}
    return json.dumps(content, indent=1).encode() + b"\n"


def _params_of(part: Part, manifest: Manifest) -> dict[str, Any]:
    pieces = manifest.pieces_of.get(part)
    return {"params": list(manifest.params_of[part])} | ({"pieces": dict(pieces)} if pieces else {})


_PLAIN = {
    "step": _count,
    "save_id": _name,
    "stage": _one_of(0, 1, 2, 3),
    "world_size": _count,
    "precision": _one_of("BF16", "F16", "F32"),
    "tag": _plain_name,
}
"""The fields that are plain values, and their checks"""


def _parse(data: Any) -> Manifest:
    if data["schema"] not in (SCHEMA, SCHEMA_MASTERS, SCHEMA_DIFFERENCES):
        raise ValueError(f"schema {data['schema']!r:.80} instead of {SCHEMA!r} to {SCHEMA_DIFFERENCES!r}")
    plain = {key: check(data[key]) for key, check in _PLAIN.items()}
    params = {
        _name(name): ParamFact(_shape(one["shape"]), _role(one["role"]), _dtype(one["dtype"]))
        for name, one in data["params"].items()
    }
    chosen = {Part(_name(one["part"])): one for one in data["parts"]}
    with_masters = data["masters"] if data["schema"] != SCHEMA else ()
    masters = {Part(_name(one["part"])): one for one in with_masters}
    held = chosen | masters
    params_of = {part: tuple(map(_name, _list(one["params"]))) for part, one in held.items()}
    if len(held) != len(data["parts"]) + len(data.get("masters", ())):
        raise ValueError("a part is listed twice")
    if any(params[name].role != "trainable" for names in params_of.values() for name in names):
        raise ValueError("a part has params that are not trained")
    pieces_of = {part: _pieces(one["pieces"], params) for part, one in held.items() if "pieces" in one}
    listed = [name for names in params_of.values() for name in names]
    taken = [(name, run) for pieces in pieces_of.values() for name, run in pieces.items()]
    for name in dict.fromkeys(name for name, _ in taken):
        runs = [run for one, run in taken if one == name]
        if name in listed or count(union(tuple(runs))) != count(runs):
            raise ValueError(f"two parts have the same elements of {name}")
    tied = {_name(name): stored for name, stored in data["tied"].items()}
    if any(name in params or stored not in params for name, stored in tied.items()):
        raise ValueError("a name is tied to none of its params")
    policy = _mapping(data.get("policy", {}))
    return Manifest(
        **plain,
        parts={part: str(one["why"]) for part, one in chosen.items()},
        params_of=params_of,
        params=params,
        tied=tied,
        saved_as=None if data["saved_as"] is None else _saved_as(data["saved_as"], params),
        bundles=_bundles(data["bundles"], plain["world_size"]),
        shards=_shards(data["shards"], plain["stage"], plain["world_size"]),
        ledger=_mapping(data["ledger"]),
        setback={Part(_name(part)): float(_steps(steps)) for part, steps in data.get("setback", {}).items()},
        pieces_of=pieces_of,
        masters=tuple(masters),
        carried={
            _file(one["path"]): (_count(one["num_bytes"]), int(_crc(one["crc32"]), 16))
            for one in _list(data.get("carried", []))
        },
        bases={part: _name(one["base"]) for part, one in masters.items() if "base" in one},
        is_thinned=policy.get(IS_THINNED) is True,
        policy=policy,
        unclear=tuple(map(_name, _list(data.get("unclear", [])))),
    )


def _pieces(data: Any, params: Mapping[str, ParamFact]) -> dict[str, tuple[int, int]]:
    pieces = {_name(name): (_count(begin), _count(end)) for name, (begin, end) in _mapping(data).items()}
    for name, (begin, end) in pieces.items():
        if params[name].role != "trainable" or not begin < end <= math.prod(params[name].shape):
            raise ValueError(f"a part has elements of {name} that are not trained or do not exist")
    return pieces


def _bundles(data: Any, world_size: int) -> tuple[BundleFact, ...]:
    """Return one rank shard per rank, then the files of frozen params: one, or one per rank; each once. There may be
    one of differences for each rank."""
    listed = _list(data)
    if not 0 < world_size <= len(listed):  # checked before building the names of all ranks
        raise ValueError(f"it lists {len(listed)} rank shards for {world_size} ranks")
    ranks = {bundle_name(rank, world_size) for rank in range(world_size)}
    frozen = {frozen_name(rank, world_size) for rank in range(world_size)}
    names = [one["path"] for one in listed]
    others = set(names) - ranks - {differences_name(rank, world_size) for rank in range(world_size)}
    if len(names) != len(set(names)) or not ranks <= set(names) or others not in (set(), {frozen_name(0, 1)}, frozen):
        raise ValueError(f"it does not list the rank shards of {world_size} ranks, each once")
    return tuple(
        BundleFact(one["path"], _count(one["num_bytes"]), int(_crc(one["crc32"]), 16), _ranges(one.get("ranges", "")))
        for one in listed
    )


def _ranges(text: Any) -> str:
    read_ranges(text)
    return str(text)


def _saved_as(data: Any, params: Mapping[str, ParamFact]) -> dict[str, tuple[SavedAs, ...]]:
    found = {
        param: tuple(SavedAs(_name(name), _shape(shape), _count(begin)) for name, shape, begin in _list(tensors))
        for param, tensors in data.items()
    }
    for param, tensors in found.items():
        at, shape = 0, params[param].shape
        for one in sorted(tensors, key=lambda one: one.begin):
            if one.begin != at or (one.name == param and one.shape != shape):
                raise ValueError(f"{param} is saved as elements that it does not have")
            at += math.prod(one.shape)
        if tensors and at != math.prod(shape):  # PEFT does not save all
            raise ValueError(f"{param} is saved with too many or too few elements")
    names = [one.name for tensors in found.values() for one in tensors]
    if found.keys() != params.keys() or len(names) != len(set(names)):
        raise ValueError("a param is missing, or two have the same name")
    return found


def _shards(data: Any, stage: int, world_size: int) -> dict[str, Any]:
    shards: dict[str, Any] = _mapping(data)
    if stage == 0:
        return shards
    for kind, wanted in (("optim", world_size), ("model", world_size if stage == 3 else 1)):
        paths = _list(shards[kind])
        if len(set(paths)) != wanted or not all(map(is_path_below, paths)):
            raise ValueError(f"{kind} does not name {wanted} files below the checkpoint")
    return {**shards, "is_bf16": _one_of(True, False)(shards["is_bf16"])}
