"""From one checkpoint to a plain one, by the rooms' own functions."""

from __future__ import annotations

from pathlib import Path

import torch

from llmtailor.checkpoint.index import CheckpointIndex, Held
from llmtailor.checkpoint.layout import FileLayout, Sources
from llmtailor.checkpoint.optimizer import Target, TargetFlat, TargetGroup, make_target
from llmtailor.compose.planner import plan_composite
from llmtailor.engine.copy import execute
from llmtailor.formats.plain.write import lay_out_plain, left_out
from llmtailor.formats.trainer import is_weight_file, lay_out_trainer_files
from llmtailor.formats.zero.from_plain import lay_out_shards_from_plain

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


def plain_target(base: CheckpointIndex, world_size: int = 1) -> Target:
    groups = [TargetGroup(params, group.hyper) for params, group in zip(base.group_params, base.groups, strict=True)]
    flats = [TargetFlat(number, (param,)) for number, group in enumerate(groups) for param in group.params]
    return Target(0, world_size, tuple(groups), tuple(flats))


def to_plain(base: CheckpointIndex, out: Path, world_size: int = 1) -> Path:
    """Write the plain checkpoint that holds what ``base`` does."""
    target = plain_target(base, world_size)
    steps = [base.steps()[flat.params[0]] for flat in target.flats]
    ranks = (base.world_size, world_size)
    around = lay_out_trainer_files(base, "F32" if base.stage else None, ranks, None, left_out(base, 0))
    layouts = [layout for layout in around if not is_weight_file(layout.path)] + lay_out_plain(base, target, steps)
    write(layouts, base, out)
    return out


def to_zero(base: CheckpointIndex, out: Path, stage: int, world_size: int, precision: str) -> Path:
    """Write the ZeRO checkpoint that holds what a plain ``base`` does."""
    groups = plain_target(base).groups
    target = make_target(base, world_size=world_size, stage=stage, groups=groups)
    steps = [base.steps()[flat.params[0]] for flat in target.flats]
    retie = (base.tied, True) if stage < 3 else None
    around = lay_out_trainer_files(base, precision, (base.world_size, world_size), retie, left_out(base, stage))
    layouts = [*around, *lay_out_shards_from_plain(base, target, steps, precision)]
    write(layouts, base, out)
    return out


def write(layouts: list[FileLayout], base: CheckpointIndex, out: Path) -> None:
    names = {*base.params, *base.tied, *(state.param for state in base.held)}
    out.mkdir()
    execute(plan_composite(layouts, [base], Sources(dict.fromkeys(names, 0)), 0), out)


def read(root: Path, held: Held) -> torch.Tensor:
    """Read a state the way the index says."""
    data = bytearray()
    for piece in held.place.cover(0, held.numel):
        with (root / piece.extent.path).open("rb") as file:
            file.seek(piece.extent.start)
            data += file.read(piece.extent.num_bytes)
    return torch.frombuffer(data, dtype=DTYPES[held.dtype]).reshape(held.shape)
