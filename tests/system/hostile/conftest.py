"""Checkpoints of every form, to be damaged: stock ZeRO-3 and what it converts to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make
from helpers.composing import convert

FORMS: dict[str, dict[str, Any]] = {"zero2": {"stage": 2}, "plain": {"stage": 0}, "universal": {"to": "universal"}}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Form -> checkpoint at step 100. Never write into them."""
    root = tmp_path_factory.mktemp("pristine")
    found = {"zero3": make(root, 100)}
    for form, options in FORMS.items():
        found[form] = convert(found["zero3"], root / form / "checkpoint-100", **options)
    return found


@pytest.fixture
def copy_of(pristine: dict[str, Path], tmp_path: Path):
    """``copy_of("zero3")`` is a checkpoint that a test may damage."""
    return lambda form, name="checkpoint-100": Path(shutil.copytree(pristine[form], tmp_path / name))
