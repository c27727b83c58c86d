"""``scaler.pt``: the loss scale of an fp16 run without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR, Finding
from llmtailor.formats.resumed.model import check_fields
from llmtailor.formats.resumed.trainer import SCALER_TABLE
from llmtailor.formats.safe_names import find_refused
from llmtailor.formats.training_args import RunFacts


def check_scaler(tree: Any, facts: RunFacts, where: str) -> Iterator[Finding]:
    """Yield what keeps a resume from taking a loss scale, or makes it skip every step."""
    yield from find_refused(tree, where)
    if facts.scales_loss is False:
        what = "the run trained without a loss scale, and can't take one"
        yield Finding(where, what, "a resume fails; remove the file", Code.FIELD_UNKNOWN, ERROR)
    if not isinstance(tree, dict):
        fix = "a resume fails; copy the file again"
        yield Finding(where, f"it holds a {type(tree).__name__}, and no loss scale", fix, Code.FIELD_TYPE, ERROR)
        return
    yield from check_fields(tree, SCALER_TABLE, where)
