"""By how many steps stale parts set training back: estimated by the saver, shown by merge and recipe."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from helpers.commands import call, run_here
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.policies import setbacks
from llmtailor.runs.save_log import LOG, read_log
from saving.loop import Loop

ALIKE = {"a": 2.0, "b": 2.0, "c": 4.0}


@pytest.mark.parametrize(
    ("loss", "steps", "expected"),
    [
        (ALIKE, {"a": 20, "b": 20, "c": 20}, {"a": 5, "b": 5, "c": 10}),  # wholly 20 steps old: 20 steps behind
        ({"a": 4.0, "b": 2.0}, {"a": 40, "b": 20}, {"a": 20, "b": 10}),  # by what a part changes per step
        *(({"a": unknown, "b": 2.0, "c": 1.0}, {"a": 10, "b": 10}, {"b": 10}) for unknown in (math.inf, math.nan)),
        ({"a": 0.0}, {"a": 10}, {}),
        ({}, {}, {}),
    ],
)
def test_setbacks(loss, steps, expected):
    assert setbacks(loss, steps) == expected


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Never write into its folder."""
    run = tmp_path_factory.mktemp("setback") / "run"
    return Loop(run, layers=6, policy="adaptive:0.4", background=False).trained(5, 2)


@pytest.fixture
def run(trained, tmp_path):
    with trained.copied(tmp_path / "run") as copy:
        yield copy


def planned(run, *words):
    done = call("merge", "--run", run, "--dry-run", *words)
    return done.stdout


def test_saves_record_it_and_composites_show_it(run):
    folder = run.run / "partial"
    newest, before = (read_manifest(folder / f"step-{step:08}", "") for step in (10, 8))
    measured = next(save for save in read_log(folder / LOG).saves if save.step == 10).expected_loss
    steps = {part: 10 - step for part, (_, step) in before.ledger["held_by"].items()}
    expected = {part: value for part, value in setbacks(measured, steps).items() if part not in newest.parts}
    assert newest.setback == pytest.approx(expected, abs=1e-3)
    assert expected
    rows = json.loads(planned(run.run, "--json"))["parts"]
    assert {row["part"]: row["setback"] for row in rows} == pytest.approx(
        {row["part"]: newest.setback.get(row["part"], 0.0) for row in rows}
    )
    total = f"{sum(newest.setback.values()):.2g}"
    assert f"estimated setback by stale parts: {total} steps" in planned(run.run)
    assert f"# estimated setback by stale parts: {total} steps" in run_here("recipe", run.run).stdout


def test_nothing_is_said_about_other_states_than_those_compared(run):
    folder = run.run / "partial"
    newest = read_manifest(folder / "step-00000010", "")
    stale = next(part for part in newest.setback)
    shutil.rmtree(folder / f"step-{newest.ledger['held_by'][stale][1]:08}")
    rows = {row["part"]: row["setback"] for row in json.loads(planned(run.run, "--json"))["parts"]}
    assert rows[stale] is None
    assert "setback" not in planned(run.run)


def test_after_a_resume_only_what_changed_since_then_counts(run, tmp_path):
    again = Loop(run.run, model=run.model, policy="adaptive:0.4", background=False).start(10)
    again.make_saves(1, 2)
    again.saver.close()
    newest = read_manifest(run.run / "partial" / "step-00000012", "")
    assert 0 < sum(newest.setback.values()) < 2  # all parts together changed in two steps
