"""Ranks that were started with different environments; and what each of them is told of another one's error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.errors import PathIn, TailorError, UnsafePickle, UsageError
from llmtailor.saving import PartialSaving, newest_checkpoint
from llmtailor.saving.training import Ranks
from trainings.alone import Alone


def facts(call: Callable[[], object]) -> list[Any]:
    """The class of an error, and code, path and ranks of each of its problems"""
    try:
        call()
    except TailorError as error:
        return [type(error).__name__, [[one.code.value, one.path, one.ranks] for one in error.problems]]
    raise AssertionError("no error")


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.environ["LLMTAILOR_SAVE_STEPS"] = str(2 + rank)
    run = Alone(folder / "run", callbacks=(PartialSaving("full"),))
    found: dict[str, Any] = {}
    try:
        run.train()
    except UsageError as error:
        found["options"] = str(error)

    def refuse() -> None:
        if rank == 1:
            place = PathIn("run/checkpoint-4", "model.safetensors")
            raise UnsafePickle.at(place, "it is odd", "use another one", Code.STATE_DTYPE)

    found["of rank 1"] = facts(lambda: Ranks.here().together(refuse))
    damaged = folder / "damaged" / "partial" / "step-00000004"
    damaged.mkdir(parents=True, exist_ok=True)
    (damaged / "manifest.json").write_text("{")
    found["newest"] = facts(lambda: newest_checkpoint(folder / "damaged"))
    (folder / f"told-{rank}").write_text(json.dumps(found))
