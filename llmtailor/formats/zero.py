"""A Trainer checkpoint with DeepSpeed shards of any ZeRO stage: reader and layout. `deepspeed_common` does the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex, TrainState
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.containers.json import FileTrees
from llmtailor.errors import Problem, Problems
from llmtailor.formats.deepspeed_common.files import survey_shard_files
from llmtailor.formats.deepspeed_common.read import read_shards
from llmtailor.formats.deepspeed_common.write import RankFiles, ZeroTarget, lay_out_engine
from llmtailor.formats.format import Draft
from llmtailor.frameworks.files import LATEST
from llmtailor.frameworks.framework import is_tag_alone
from llmtailor.frameworks.write import Wanted


def detects(root: Path) -> bool:
    """Return whether a folder has what DeepSpeed leaves in the root of a checkpoint."""
    return (root / LATEST).exists() or any(root.glob("global_step*")) or is_tag_alone(root)


def read(root: Path, name: str, client: str | None = None) -> Draft:
    """Read a checkpoint with DeepSpeed shards; see `Reader`."""
    problems = Problems()
    files = survey_shard_files(root, name, problems)
    return read_shards(FileTrees(root), files, name, problems, client)


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    return lay_out_engine(base, wanted, _lay_out_shards)


def _lay_out_shards(target: ZeroTarget, train: TrainState) -> Iterator[FileLayout]:
    if LATEST not in target.base.files or not target.base.train.optim or target.tag != target.base.zero.tag:
        yield FileLayout(LATEST, (Bytes(target.tag.encode(), "the tag"),))
    digests: dict[int, bytes] = {}
    for rank in range(tp := target.layout.tp):
        of_rank = replace(train, optim=train.optim[rank::tp], model=train.model[rank::tp])
        yield from RankFiles(target.on_tp_rank(rank) if tp > 1 else target, of_rank, digests).layouts(target.tag)
