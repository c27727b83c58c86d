"""The files of a ZeRO-1 or ZeRO-2 checkpoint, decoded into checked facts.

``optim_states``, one per rank (key tree verified against DeepSpeed 0.19.8)::

    optimizer_state_dict
      loss_scaler, dynamic_loss_scale, overflow, clip_grad
      base_optimizer_state                {state: {group: {step, exp_avg, exp_avg_sq}}, param_groups}
      single_partition_of_fp32_groups     [this rank's partition of each group's masters]
      zero_stage, group_paddings, param_alignment_paddings, partition_count [one per group], param_slice_mappings

Variants: BF16_Optimizer (ZeRO-1 with fp32 gradient accumulation) has neither ``zero_stage`` nor ``loss_scaler``, and
its master weights keep their padding; elastic checkpoints have a list as ``base_optimizer_state``, without param
groups, and strip the moments too.

``mp_rank_00_model_states``, one for all ranks: ``module`` holds params and buffers in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.fields import Tensor, as_dict, get, read_elementwise, read_masters, read_step
from llmtailor.containers.json import is_count
from llmtailor.containers.pickle_nodes import Call
from llmtailor.errors import COPY_FILE, SourceError
from llmtailor.findings import Finding
from llmtailor.formats.format import Trees
from llmtailor.formats.resumed.tables import check_fields, facts_of_rank
from llmtailor.formats.zero.files import read_param_group, read_shard
from llmtailor.formats.zero.shards3 import check_alike, rest_of_optim
from llmtailor.formats.zero.tables import ZERO12
from llmtailor.model.states import MASTER

Mappings = tuple[dict[str, tuple[Any, Any]], ...]


@dataclass(frozen=True, slots=True)
class PartitionShard:
    """The content of one rank's ``optim_states``."""

    stage: int
    """1 or 2; BF16_Optimizer counts as 1"""
    variant: str
    """``plain``, ``bf16_optimizer`` or ``elastic``"""
    partition_counts: tuple[int, ...]
    """Number of ranks per group"""
    parts: tuple[Mapping[str, Tensor], ...]
    """Per group: kind -> this rank's partition; lengths differ by the padding saved with some kinds"""
    steps: tuple[float, ...]
    """Per group"""
    step_is_tensor: bool
    hyper: tuple[Mapping[str, Any], ...]
    """Per group. Empty for elastic checkpoints, which do not store hyperparameters"""
    gaps: tuple[tuple[int, ...], ...]
    """Per group and param: elements of alignment after it (``parameter_alignment``)"""
    mappings: Mappings
    """Per group: param -> its elements on this rank, and their start in the partition, as DeepSpeed saves it (wrong
    under ``round_robin_gradients``); empty if the file has none"""
    has_group_step: bool
    """Elastic checkpoints only: whether the step that a resume needs exists. torch's AdamW does not save it"""
    rest: Mapping[str, Any]
    """The tree without the states"""
    ds_config: Mapping[str, Any]
    facts: Mapping[str, object]
    """What a resume reads besides states, and must be alike on all ranks"""
    findings: tuple[Finding, ...]


def read_partition_shard(trees: Trees, path: str, where: str) -> PartitionShard:
    """Return the content of one ``optim_states`` file. Raises SourceError."""
    tree = read_shard(trees, path, where)
    outer = get(tree, "optimizer_state_dict", dict, where)
    base = outer.get("base_optimizer_state")
    elastic = isinstance(base, list)
    key = "single_partition_of_fp32_groups"
    masters = read_masters(get(outer, key, list, where), key, where)
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = ()
    states: Mapping[Any, Any]
    if elastic:
        states = dict(enumerate(base))
    else:
        inner = as_dict(base, "base_optimizer_state", where)
        groups = tuple(read_param_group(group, where) for group in get(inner, "param_groups", list, where))
        states = get(inner, "state", dict, where)
        if [owned for owned, _ in groups] != [(number,) for number in range(len(masters))]:
            what = f"{len(masters)} master partitions, but the param groups do not own one each"
            raise SourceError.at(where, what, COPY_FILE, Code.FIELD_CONFLICT)
    if unexpected := [key for key in states if key not in range(len(masters))]:
        raise SourceError.at(
            where,
            f"it holds the optimizer state of {unexpected[0]!r}, which no param group owns",
            COPY_FILE,
            Code.FIELD_UNKNOWN,
        )
    parts: list[Mapping[str, Tensor]] = []
    steps: list[float] = []
    step_is_tensor = True
    for group, master in enumerate(masters):
        if not states:  # fp16, and every step so far has overflowed
            parts.append({MASTER: master})
            steps.append(0.0)
            continue
        if group not in states:
            what = f"the optimizer state of group {group} is missing; a resume would restart Adam for it"
            raise SourceError.at(where, what, COPY_FILE, Code.STATE_MISSING)
        state = as_dict(states[group], f"state[{group}]", where)
        kinds, step = read_elementwise(state, None, group, where)
        parts.append({MASTER: master, **kinds})
        step_is_tensor = not isinstance(step, (int, float))
        steps.append(read_step(trees.root, step, group, where))
    counts = outer.get("partition_count")
    gaps = outer.get("param_alignment_paddings") or ()
    if not isinstance(gaps, (list, tuple)):
        raise SourceError.at(where, "param_alignment_paddings is not a list", COPY_FILE, Code.FIELD_TYPE)
    return PartitionShard(
        stage=_stage(outer, where),
        variant="elastic" if elastic else "plain" if "zero_stage" in outer else "bf16_optimizer",
        partition_counts=_counts(counts, "partition_count", where),
        parts=check_alike(parts, where),
        steps=tuple(steps),
        step_is_tensor=step_is_tensor,
        hyper=tuple(hyper for _, hyper in groups),
        gaps=tuple(_counts(entry, "param_alignment_paddings", where) for entry in gaps),
        mappings=_mappings(outer.get("param_slice_mappings")),
        has_group_step="base_optimizer_state_step" in outer,
        rest=rest_of_optim(tree),
        ds_config=as_dict(tree.get("ds_config", {}), "ds_config", where),
        facts=facts_of_rank(tree, ZERO12),
        findings=tuple(check_fields(tree, ZERO12, where)),
    )


def _stage(outer: Mapping[str, Any], where: str) -> int:
    if "zero_stage" not in outer:
        return 1
    stage = outer["zero_stage"]
    number = stage.args[0] if isinstance(stage, Call) and stage.args else stage
    if type(number) is not int or number not in (1, 2):
        stated = number if type(number) is int else "not a number"
        raise SourceError.at(
            where,
            f"zero_stage is {stated} in a file with the layout of ZeRO-1 and ZeRO-2",
            COPY_FILE,
            Code.FIELD_CONFLICT,
        )
    return number


def _mappings(node: Any) -> Mappings:
    """Return ``param_slice_mappings``, [{param: fragment_address(numel, start)}], as far as they are readable."""
    found: list[dict[str, tuple[Any, Any]]] = []
    for group in node if isinstance(node, list) else ():
        states = {name: getattr(call, "state", None) for name, call in group.items()} if isinstance(group, dict) else {}
        found.append(
            {
                name: (state.get("numel"), state.get("start"))
                for name, state in states.items()
                if isinstance(state, dict)
            }
        )
    return tuple(found)


def _counts(node: Any, what: str, where: str) -> tuple[int, ...]:
    if not isinstance(node, (list, tuple)) or not all(map(is_count, node)):
        raise SourceError.at(where, f"{what} is not a list of counts", COPY_FILE, Code.FIELD_TYPE)
    return tuple(node)
