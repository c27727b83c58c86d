"""The study of benchmarks/fidelity.md composes in memory what the saver and ``merge --run`` compose from files."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("policy", ["adaptive:0.5", "moments_in_turn:3"])
def test_composites_are_the_same(policy, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    check = importlib.import_module("study.check").check
    assert check(policy, tmp_path) == 3 * (9 * 4 + 3)
