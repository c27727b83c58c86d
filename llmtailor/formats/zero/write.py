"""Layout of a Trainer checkpoint with DeepSpeed shards of any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator

from llmtailor.checkpoint.index import CheckpointIndex, TrainState
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.errors import Problem
from llmtailor.formats.deepspeed_common.trees import RankFiles, ZeroTarget
from llmtailor.formats.deepspeed_common.write import lay_out_engine
from llmtailor.loaders.files import LATEST
from llmtailor.loaders.write import (
    Wanted,
)


def check(dtype: str | None, allow_split: bool) -> None:
    """Accept any dtype and split: master weights are stored separately from the weights."""


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a composite's files except the tokenizer's, and notices.

    Raises UnsupportedCheckpoint for a base without DeepSpeed that lacks something that its shards need.
    """
    return lay_out_engine(base, wanted, _lay_out_shards)


def _lay_out_shards(target: ZeroTarget, train: TrainState) -> Iterator[FileLayout]:
    if LATEST not in target.base.files or not target.base.train.optim or target.tag != target.base.zero.tag:
        yield FileLayout(LATEST, (Bytes(target.tag.encode(), "the tag"),))
    ranks = RankFiles(target, train)
    yield from ranks.optim(target.tag)
    yield from ranks.model(target.tag)
