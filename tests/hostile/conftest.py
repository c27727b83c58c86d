"""Checkpoints of every form, to be damaged: stock ZeRO-3 and what it converts to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import llmtailor
from helpers.checkpoints import make
from llmtailor.recipe import Recipe

STAGES = {"zero3": 3, "zero2": 2, "plain": 0}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Form -> checkpoint at step 100. Never write into them."""
    root = tmp_path_factory.mktemp("pristine")
    source = make(root, 100)
    found = {"zero3": source}
    for form, stage in STAGES.items():
        if stage != 3:
            found[form] = root / form / "checkpoint-100"
            recipe = Recipe("convert", "", source, (), None, None)
            llmtailor.merge(recipe, found[form], llmtailor.Options(stage=stage))
    return found


@pytest.fixture
def copy_of(pristine: dict[str, Path], tmp_path: Path):
    """``copy_of("zero3")`` is a checkpoint that a test may damage."""

    def copy(form: str, name: str = "checkpoint-100") -> Path:
        return Path(shutil.copytree(pristine[form], tmp_path / name))

    return copy
