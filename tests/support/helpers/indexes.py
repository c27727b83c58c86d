"""Indexes made by hand, for tests of the pure rooms."""

from __future__ import annotations

from pathlib import Path

from llmtailor.checkpoint.index import DEEPSPEED, CheckpointIndex, Form


def make_index(root: Path = Path("x"), **changes: object) -> CheckpointIndex:
    """Return an empty index with some fields set."""
    fields: dict[str, object] = {
        "root": root,
        "name": root.name,
        "form": Form(DEEPSPEED, 3),
        "world_size": 2,
        "global_step": 10,
        "precision": "BF16",
        "params": {},
        "tied": {},
        "held": {},
        "groups": (),
        "sub_groups": (),
        "files": {},
    }
    return CheckpointIndex(**{**fields, **changes})  # type: ignore[arg-type]
