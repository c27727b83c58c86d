"""The FSDP trainings, once for all sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp.runs import THREE_RANKS, TWO_RANKS
from trainings.harness import Run, TrainingFailed, train_once


class Trained:
    """``trained["loop"]`` is a finished run of runs.py. Never write into its folder."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, Run]] = {}

    def __getitem__(self, name: str) -> Run:
        specs, ranks = (TWO_RANKS, 2) if name in TWO_RANKS else (THREE_RANKS, 3)
        if ranks not in self._found:
            try:
                self._found[ranks] = train_once(specs, ranks, "trainings.fsdp")
            except TrainingFailed as error:
                pytest.fail(str(error), pytrace=False)
        return self._found[ranks][name]

    def checkpoint(self, name: str, step: int = 2) -> Path:
        return self[name].folder / (f"step-{step}" if "titan" in name else f"checkpoint-{step}")


@pytest.fixture(scope="session")
def trained() -> Trained:
    return Trained()
