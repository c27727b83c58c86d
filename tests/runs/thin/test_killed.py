"""Killed at any moment, thin and gc take nothing away that is promised; the same command then completes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from faults.scene import Killing
from helpers.cases import mostly_long
from helpers.files import TOLD, contents
from llmtailor.checkpoint.lineage import Ledger, composable_steps
from llmtailor.runs.scan import scan_run
from thin.scene import SHORT, compose, folders, make_run, save_partial, taken

STEPS = (100, 200, 300)


def composable(run: Path) -> list[int]:
    scan = scan_run(run, every_chain=True)
    return composable_steps(scan.usable, scan.structure.parts)


def left(run: Path, *steps: int) -> object:
    """Return the folders of a run, and what steps of it are composed to."""
    found = []
    for step in steps:
        shutil.rmtree(run.parent / "out", ignore_errors=True)
        found.append(contents(compose(run, step, run.parent / "out"), *TOLD))
    return folders(run), found


@pytest.mark.parametrize("form", [None, *mostly_long(["fsdp", "dcp", "universal"])])
def test_thin(tmp_path, form):
    make_run(tmp_path / "original", STEPS, form, shape=SHORT)
    words = ("thin", "--strategy", "parity", "--yes")
    killing = Killing(tmp_path, words, lambda run: left(run, STEPS[1]))  # of both that were thinned out
    for moment in killing.trials():
        assert composable(killing.run) == list(STEPS), f"killed at {moment}: {folders(killing.run)}"


@pytest.mark.parametrize(("can_exchange", "form"), [(True, "dcp"), pytest.param(False, "fsdp", marks=pytest.mark.long)])
def test_thin_with_links(tmp_path, can_exchange, form):
    make_run(tmp_path / "original", STEPS, form, shape=SHORT)
    names = [f"checkpoint-{step}" for step in STEPS]

    def outcome(run: Path) -> object:
        return folders(run), [contents(run / name, *TOLD) for name in names], taken(run) // 10_000

    words = ("thin", "--strategy", "parity", "--reference", "--yes")
    killing = Killing(tmp_path, words, outcome, no_exchange=not can_exchange)
    assert [path.stat().st_nlink for path in (killing.run / names[1]).rglob("*.distcp")].count(2)
    for moment in killing.trials():
        is_aside = not can_exchange and (killing.run / ".checkpoint-200.llmtailor-old").exists()
        assert is_aside or composable(killing.run) == list(STEPS), f"killed at {moment}: {folders(killing.run)}"


@pytest.mark.parametrize(
    ("can_exchange", "form"),
    [
        (True, "dcp"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((False, None), (True, None), (False, "fsdp"))),
    ],
)
def test_thin_to_weights(tmp_path, can_exchange, form):
    original = make_run(tmp_path / "original", STEPS[:2], form, shape=SHORT)

    def first(run: Path) -> object:
        return folders(run), contents(run / "checkpoint-100", *TOLD)

    words = ("thin", "--keep-optimizer-last", "1", "--yes")
    killing = Killing(tmp_path, words, first, no_exchange=not can_exchange)
    for _ in killing.trials():
        run = killing.run
        assert 200 in composable(run)
        there = [contents(run / name, *TOLD) for name in folders(run) if "checkpoint-100" in name]
        assert killing.wanted[1] in there or contents(original / "checkpoint-100", *TOLD) in there


def test_gc(tmp_path):
    full = make_run(tmp_path / "full", STEPS, shape=SHORT)
    (tmp_path / "original").mkdir()
    ledger = Ledger("saver")
    for step in STEPS:
        parts = ("embed_tokens", "layer 0", "layer 1", "norm", "lm_head")
        ledger = save_partial(tmp_path / "original", full / f"checkpoint-{step}", parts, ledger)
    killing = Killing(tmp_path, ("gc", "--keep", "1", "--yes"), lambda run: left(run, 300))
    assert folders(killing.run) == ["partial/step-00000300"]
    for _ in killing.trials():
        assert composable(killing.run)[-1] == 300
