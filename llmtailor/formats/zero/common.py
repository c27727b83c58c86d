"""The common part of the indexes of all ZeRO stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmtailor.checkpoint.index import TensorEntry, TrainState
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup, ZeroSettings
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.fields import Tensor
from llmtailor.errors import COPY_CHECKPOINT, PathIn, Problems, SourceError, some
from llmtailor.findings import Finding
from llmtailor.formats.format import Trees
from llmtailor.formats.trainer import file_fact
from llmtailor.formats.zero.shards3 import Counters
from llmtailor.model.parts import Param
from llmtailor.model.states import State
from llmtailor.storage.local import FileFact

_Shard = TypeVar("_Shard")
_DEFAULTS = ZeroSettings()


class _HasFindings(Protocol):
    @property
    def findings(self) -> tuple[Finding, ...]: ...


class _Rest(Protocol):
    @property
    def rest(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a checkpoint's shards, for any stage."""

    stage: int
    variant: str
    """``plain``, ``bf16_optimizer`` or ``elastic``: see `shards12`."""
    world_size: int
    counters: Counters
    params: Mapping[str, Param]
    tied: Mapping[str, str]
    held: Mapping[State, TensorEntry]
    groups: tuple[ParamGroup, ...]
    sub_groups: tuple[SubGroup, ...]
    ds_config: Mapping[str, Any]
    train: TrainState
    module: Mapping[str, TensorEntry] = field(default_factory=dict)
    """ZeRO-1/2: see `CheckpointIndex.module`."""
    unreadable: frozenset[str] = frozenset()
    """Shard files that are missing, damaged, or of another save than most"""
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    """The facts on the optimizer's file that `formats.resumed` uses, by the field's name"""


def read_all(
    read: Callable[[Trees, str, str], _Shard],
    trees: Trees,
    paths: Sequence[str],
    missing: Container[str],
    name: str,
    problems: Problems,
) -> list[_Shard | None]:
    """Return every rank's file, None for a bad or missing one; continue after a bad one so that all are reported.

    Files in ``missing`` have already been reported.
    """
    return [
        None if path in missing else attempt(lambda path=path: read(trees, path, PathIn(name, path)), problems)  # type: ignore[misc]
        for path in paths
    ]


def attempt(call: Callable[[], _Shard], problems: Problems) -> _Shard | None:
    """Return the result of a call; add errors about the checkpoint to ``problems``, and raise all others."""
    try:
        return call()
    except SourceError as error:
        problems.add(error)
        return None


def keep_agreeing(
    name: str,
    paths: Sequence[str],
    shards: Sequence[_Shard | None],
    facts_of: Callable[[_Shard], Mapping[str, object]],
    problems: Problems,
) -> list[_Shard | None]:
    """Report every fact of a rank's file that differs from most ranks'; put None for such a file.

    Stock DeepSpeed compares none of this: each rank loads its own file and continues.
    """
    facts = [None if shard is None else facts_of(shard) for shard in shards]
    kinds: list[list[int]] = []
    for rank, mine in enumerate(facts):
        if mine is None:
            continue
        for kind in kinds:
            if facts[kind[0]] == mine:
                kind.append(rank)
                break
        else:
            kinds.append([rank])
    if not kinds:
        return list(shards)
    usual = max(kinds, key=len)
    reference = facts[usual[0]]
    assert reference is not None
    for path, mine in zip(paths, facts, strict=True):
        if mine is None:
            continue
        for what in {**reference, **mine}:
            value, usual_value = mine.get(what), reference.get(what)
            if value != usual_value:
                detail = f" ({value} and {usual_value})" if len(f"{value}{usual_value}") < 80 else ""
                text = f"{what} differs from that of rank {usual[0]}{detail}"
                problems.add(SourceError.at(PathIn(name, path), text, COPY_CHECKPOINT, Code.RANKS_DIFFER))
    return [shard if rank in usual else None for rank, shard in enumerate(shards)]


def first(shards: Iterable[_Shard | None]) -> _Shard | None:
    return next((shard for shard in shards if shard is not None), None)


def rests(shards: Sequence[_Rest | None], world_size: int) -> tuple[Mapping[str, Any] | None, ...]:
    """Return the content of the ranks' files other than states; None for unusable files."""
    known = [None if shard is None else shard.rest for shard in shards]
    return (*known, *[None] * (world_size - len(known)))


def findings_of(shards: Iterable[_HasFindings | None]) -> tuple[Finding, ...]:
    """Return the findings on the ranks' files by themselves, including unusable ones."""
    return tuple(finding for shard in shards if shard is not None for finding in shard.findings)


def place_of(tensor: Tensor | None, path: str) -> Extent:
    """Return where a rank's tensor lies; for an unreadable file, a meaningless place in it."""
    return tensor.extent if tensor is not None else Extent(path, 0, 0)


def check_tied(tied: Mapping[str, str], module: Container[str], where: str) -> None:
    """Raise SourceError if a name is tied to one that the module does not have."""
    if lost := [name for name, stored in tied.items() if stored not in module]:
        raise SourceError.at(
            where,
            f"{lost[0]} is tied to {tied[lost[0]]}, which the checkpoint does not contain",
            COPY_CHECKPOINT,
            Code.TIED,
        )


def check_params(
    trainable: Sequence[str],
    frozen: Iterable[str],
    buffers: Iterable[str],
    module: Iterable[str],
    tied: Iterable[str],
    where: str,
) -> None:
    """Raise SourceError if a name has two roles, or the module's names are not those with a role."""
    known = Counter([*trainable, *frozen, *buffers])
    if twice := [param for param, count in known.items() if count > 1]:
        raise SourceError.at(where, f"{some(twice)} is described twice", COPY_CHECKPOINT, Code.FIELD_CONFLICT)
    module = set(module)
    if lacking := [param for param in known if param not in module]:
        raise SourceError.at(
            where, f"module lacks {some(lacking)}; a resume would fail", COPY_CHECKPOINT, Code.FIELD_MISSING
        )
    if extra := sorted(module.difference(known, tied)):
        raise SourceError.at(
            where, f"module lists {some(extra)}, which have no state", COPY_CHECKPOINT, Code.FIELD_UNKNOWN
        )


def precision(files_are_bf16: bool, config: Mapping[str, Any]) -> str:
    """Return the dtype of the weights in training: the shards' names indicate bf16, the config fp16."""
    fp16 = config.get("fp16")
    return "BF16" if files_are_bf16 else "F16" if isinstance(fp16, dict) and fp16.get("enabled") is True else "F32"


def read_settings(config: Mapping[str, Any], is_bf16: bool, variant: str) -> ZeroSettings:
    """Return the settings that decide the layout, from the ``ds_config`` in a checkpoint."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    data_types = config.get("data_types")
    data_types = data_types if isinstance(data_types, dict) else {}
    offload = zero.get("offload_optimizer")
    offloaded = isinstance(offload, dict) and offload.get("device") == "cpu"
    size = zero.get("sub_group_size")
    known = type(size) is int or (isinstance(size, float) and math.isfinite(size))  # JSON may have 1e9
    return ZeroSettings(
        sub_group_size=int(size) if known else _DEFAULTS.sub_group_size,  # type: ignore[arg-type]
        round_robin=zero.get("round_robin_gradients") is True,
        parameter_alignment=bool(zero.get("parameter_alignment")),
        fp32_gradients=variant == "bf16_optimizer"
        or (is_bf16 and not offloaded and data_types.get("grad_accum_dtype") in ("fp32", "float32")),
    )


def optimizer_name(saved: Saved) -> str:
    """Return the optimizer's name, inferred from the hyperparameters."""
    keys = set(saved.groups[0].hyper) if saved.groups else set()
    if "bias_correction" in keys or not saved.train.step_is_tensor:
        return "DeepSpeed Adam"
    return "torch AdamW" if "betas" in keys else "unknown"


def file_facts(root: Path, paths: Iterable[str]) -> dict[str, FileFact]:
    """Return the facts of the existing files; others are missing, or inside a rank shard."""
    found = ((path, file_fact(root / path)) for path in paths)
    return {path: fact for path, fact in found if fact is not None}
