"""Describes a checkpoint without loading a tensor."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, TypedDict

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import common, count
from llmtailor.checkpoint.schema import name_of, schema_of
from llmtailor.containers.unpickle import as_number
from llmtailor.documents import encode
from llmtailor.formats.provenance import stated_attempt
from llmtailor.formats.registry import absent_parts, find_structure, index_checkpoint, split_parts
from llmtailor.model.dtypes import size_of
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT
from llmtailor.storage.local import as_path

_FEW = 8
_HYPER: tuple[Literal["lr", "weight_decay", "betas", "eps"], ...] = ("lr", "weight_decay", "betas", "eps")


class GroupFacts(TypedDict, total=False):
    """A param group of the optimizer. Hyperparameters missing in the file are left out."""

    flat_ids: list[int]
    num_params: int
    lr: object
    weight_decay: object
    betas: object
    eps: object


class PartFacts(TypedDict):
    part: str
    num_tensors: int
    step: int
    """Global step at which it was saved; of a part whose states are of several steps the oldest"""
    masters_step: int | None
    """That of its masters, if they are newer than its moments"""
    optimizer_steps: list[float]
    num_bytes: int
    num_bytes_by_kind: dict[str, int]
    updates_missed: int
    """Updates that Adam's step counts, and its second moments lack"""
    held: bool
    """Whether a partial checkpoint holds it"""


class StoredFile(TypedDict):
    path: str
    num_bytes: int


class Inspection(TypedDict):
    """The description of a checkpoint, ready for JSON. The keys are stable within a schema version."""

    schema: str
    name: str
    format: str
    zero_stage: int
    """0 without DeepSpeed"""
    world_size: int
    mesh: dict[str, int]
    """The same by kind of parallelism: ``dp``, and ``tp`` under AutoTP"""
    global_step: int
    skipped_steps: int
    framework: str
    """What resumes: ``trainer``, ``accelerate``, ``lightning``, ``deepspeed`` (an engine in a loop) or ``dcp``"""
    tag: str
    """DeepSpeed's name of the folder with the shards"""
    precision: str
    weights_dtype: list[str]
    optimizer: str | None
    optimizer_states: dict[str, str]
    """What it keeps of the params -> `checkpoint.schema.StateKind`"""
    num_layers: int
    tied: dict[str, str]
    num_params: int
    num_trainable_params: int
    num_tensors: dict[str, int]
    """Role (trainable, frozen, buffer) -> count"""
    param_groups: list[GroupFacts]
    optimizer_steps: list[float]
    parts: list[PartFacts]
    num_bytes: int
    files: list[StoredFile]
    findings: list[dict[str, str | None]]


def inspect_checkpoint(root: str | Path, framework: str | None = None) -> Inspection:
    """Describe a checkpoint without loading a tensor. ``framework`` will resume from it; None: detected from the files.

    Raises SourceError with everything damaged or missing, or UnsupportedCheckpoint.
    """
    return describe(index_checkpoint(as_path(root), framework=framework))


def describe(index: CheckpointIndex) -> Inspection:
    """Describe an index: format, counters, param groups, parts with their bytes, files, and findings."""
    structure = split_parts(find_structure(index), index)
    steps, pieces_of = index.steps(), structure.pieces_of
    by_kind: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for state, entry in index.held.items():
        if not entry.is_here or (index.form.weights_are_states and state.kind in (MASTER, FROZEN, BUFFER)):
            continue  # without DeepSpeed these are the same bytes as the weight
        if state.param not in pieces_of:
            by_kind[structure.part_of[state.param]][state.kind] += entry.num_bytes
        for name in pieces_of.get(state.param, ()):
            own = count(common(((structure.pieces[name].begin, structure.pieces[name].end),), entry.runs))
            by_kind[structure.part_of[name]][state.kind] += size_of(entry.stored_as, own)
    for name, differing in index.partial.differences.items():
        by_kind[structure.part_of[name]][MASTER] += differing.entry.num_bytes
    absent = absent_parts(index, structure)
    missed = past.missed if (past := stated_attempt(index.root)) else {}
    roles = [param.role for param in index.params.values()]
    return {
        "schema": "llmtailor.inspect/1",
        "name": index.name,
        "format": index.format,
        "zero_stage": index.form.stage,
        "world_size": index.world_size,
        "mesh": index.layout.mesh,
        "global_step": index.global_step,
        "skipped_steps": index.zero.skipped_steps,
        "framework": index.framework,
        "tag": index.zero.tag,
        "precision": index.precision,
        "weights_dtype": sorted({entry.dtype for state, entry in index.held.items() if state.kind == WEIGHT}),
        "optimizer": name_of(index),
        "optimizer_states": {name: kind.value for name, kind in sorted(schema_of(index).items())},
        "num_layers": structure.num_layers,
        "tied": dict(index.tied),
        "num_params": sum(param.numel for param in index.params.values() if param.role != "buffer"),
        "num_trainable_params": sum(param.numel for param in index.params.values() if param.role == "trainable"),
        "num_tensors": {role: roles.count(role) for role in ("trainable", "frozen", "buffer")},
        "param_groups": [_group(index, number) for number in range(len(index.groups))],
        "optimizer_steps": sorted(set(index.steps().values())),
        "parts": [
            {
                "part": part,
                "num_tensors": len(names),
                "step": (step := index.step_of(part)),
                "masters_step": newer if (newer := index.master_step_of(part)) > step else None,
                "updates_missed": missed.get(part, missed.get(part.whole, 0)),
                "optimizer_steps": sorted({steps[name] for name in map(structure.stored_in, names) if name in steps}),
                "num_bytes": sum(by_kind[part].values()),
                "num_bytes_by_kind": dict(by_kind[part]),
                "held": part not in absent,
            }
            for part in structure.parts
            for names in [structure.names(part)]
        ],
        "num_bytes": sum(fact.num_bytes for fact in index.files.values()),
        "files": [{"path": path, "num_bytes": fact.num_bytes} for path, fact in index.files.items()],
        "findings": encode(index.findings),
    }


def _group(index: CheckpointIndex, number: int) -> GroupFacts:
    group = index.groups[number]
    facts: GroupFacts = {"flat_ids": index.layout.of_group(number), "num_params": len(group.params)}
    for key in _HYPER:
        if key in group.hyper:
            facts[key] = _plain(group.hyper[key])
    return facts


def _plain(value: Any) -> Any:
    """Return a hyperparameter as a JSON value; other types than numbers, strings and lists become their type's name."""
    if isinstance(value, (list, tuple)) and len(value) <= _FEW:
        return [_plain(item) for item in value]
    value = value if (number := as_number(value)) is None else number
    return value if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
