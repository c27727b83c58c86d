"""Indexes made by hand, for tests of the pure rooms."""

from __future__ import annotations

from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.optimizer import ZeroSettings


def make_index(root: Path = Path("x"), **changes: object) -> CheckpointIndex:
    """Return an empty index with some fields set."""
    fields: dict[str, object] = {
        "root": root,
        "name": root.name,
        "format": "deepspeed-zero3",
        "stage": 3,
        "world_size": 2,
        "global_step": 10,
        "skipped_steps": 0,
        "tag": "global_step10",
        "precision": "BF16",
        "optimizer": "torch AdamW",
        "params": {},
        "tied": {},
        "held": {},
        "groups": (),
        "sub_groups": (),
        "settings": ZeroSettings(),
        "variant": "plain",
        "files": {},
    }
    return CheckpointIndex(**{**fields, **changes})  # type: ignore[arg-type]
