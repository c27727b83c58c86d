"""Ranks that were started with different environments."""

from __future__ import annotations

import os
from pathlib import Path

from llmtailor.errors import UsageError
from llmtailor.saving import PartialSaving
from partial.alone import Alone


def main(folder: Path) -> None:
    os.environ["LLMTAILOR_SAVE_STEPS"] = str(2 + int(os.environ["RANK"]))
    run = Alone(folder / "run", callbacks=(PartialSaving("full"),))
    try:
        run.train()
    except UsageError as error:
        (folder / f"told-{os.environ['RANK']}").write_text(str(error))
