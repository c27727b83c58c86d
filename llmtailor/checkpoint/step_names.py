"""The step in the name of a checkpoint's folder, file or tag. Pure."""

from __future__ import annotations

import re
from pathlib import Path

NAMES = "checkpoint-N, step-N, step_N, step=N, global_stepN, iter_N or *step=N.ckpt"
"""The names that `step_of` knows, for messages"""
ABANDONED, DAMAGED, REPLACED, SALVAGED = ASIDE = ("abandoned-", "damaged-", "replaced-", "salvaged-")
"""Prefixes of the names of checkpoints that must not be found any more, or not yet"""
UNIVERSAL_SUFFIX = "_universal"
"""What ``ds_to_universal`` appends to a tag"""
_CHECKPOINT = re.compile(
    r"(?:checkpoint-|step-|step_|global_step|iter_)([0-9]{1,18})|step=([0-9]{1,18})"
    rf"|(?!{'|'.join(ASIDE)})(?:.+-)?step=([0-9]{{1,18}})(?:-.+)?\.ckpt"
)
"""Names by the Trainer, torchtitan, loops, DeepSpeed (tag folders), Megatron and Lightning, which may add metrics"""
_OWN_TAG = "global_step"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a folder or file, or None if the name is not a checkpoint's."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[match.lastindex or 0]) if match else None


def step_of_tag(tag: str) -> int | None:
    """Return the step in a tag that DeepSpeed chose; None for a tag that a loop chose, even a number."""
    return step_of(Path(tag.removesuffix(UNIVERSAL_SUFFIX))) if tag.startswith(_OWN_TAG) else None
