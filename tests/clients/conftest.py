"""The trainings without a Trainer, once for all sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.runs import ALL
from trainings.harness import Run, TrainingFailed, train_once


class Loops:
    """``loops["engine-3"]`` is a finished run of runs.py. Never write into its folder."""

    def __init__(self) -> None:
        self._found: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if not self._found:
            try:
                self._found = train_once(ALL, 2, "trainings.loops")
            except TrainingFailed as error:
                pytest.fail(str(error), pytrace=False)
        return self._found[name]

    def checkpoint(self, name: str, step: int = 2) -> Path:
        return self[name].checkpoint(step)


@pytest.fixture(scope="session")
def loops() -> Loops:
    return Loops()
