"""The example recipes do what their comments say."""

from __future__ import annotations

import pytest

import llmtailor
from helpers.checkpoints import make_run
from helpers.places import ROOT

LAYERS = [f"layer {number}" for number in range(4)]
EVERY = ["embed_tokens", *LAYERS, "norm", "lm_head"]
FROM_10 = {
    "halves": {"layer 0", "layer 1"},
    "parity": {"layer 1", "layer 3"},
    "auxiliary": {"embed_tokens", "lm_head", "layer 0", "layer 1"},
    "llmtailor-original": {"norm", "layer 0", "layer 1", "embed_tokens"},
    "average": set(),
}
"""What each recipe takes from step 10 alone; the rest is from step 20, or an average of both."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), (10, 20))


def test_every_recipe_is_tested():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(FROM_10)


@pytest.mark.parametrize("name", FROM_10)
def test_recipes(run, name, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN", str(run))
    report = llmtailor.merge(ROOT / "configs" / f"{name}.yaml", tmp_path / "out")
    assert {row.part: row.step for row in report.parts} == {part: 10 if part in FROM_10[name] else 20 for part in EVERY}
    assert report.base.endswith("checkpoint-20")
    averaged = {row.part for row in report.parts if row.source.startswith("average of ")}
    assert averaged == (set(EVERY) if name == "average" else set())
