"""The trainings with Lightning, once for all sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_runs.runs import ALL
from llmtailor.runs.folder import RunFolder
from trainings.harness import Run, TrainingFailed, train_once


class Lightnings:
    """``lightnings["ddp"]`` is a finished run of runs.py. Never write into its folder."""

    def __init__(self) -> None:
        self._found: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if not self._found:
            try:
                self._found = train_once(ALL, 2, "trainings.lightning")
            except TrainingFailed as error:
                pytest.fail(str(error), pytrace=False)
        return self._found[name]

    def checkpoint(self, name: str, step: int = 2) -> Path:
        return RunFolder(self[name].folder).full()[step]


@pytest.fixture(scope="session")
def lightnings() -> Lightnings:
    return Lightnings()
