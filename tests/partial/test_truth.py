"""Composites of partial checkpoints: what the processes held, and what the Trainer would have saved, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real

from partial.checking import check_composite  # noqa: E402
from partial.runs import CHECKED_2, CHECKED_3  # noqa: E402

CHECKED = [job.name for job in (*CHECKED_2, *CHECKED_3)]


@pytest.mark.parametrize("name", CHECKED)
def test_the_first_save_is_a_complete_checkpoint(trained, name, tmp_path):
    done = trained[name]
    first = done.saves[0]
    assert set(check_composite(done, first, tmp_path).values()) == {first}


@pytest.mark.parametrize("name", CHECKED)
def test_a_composite_has_of_every_part_the_newest_that_was_saved(trained, name, tmp_path):
    done = trained[name]
    last = done.saves[-1]
    assert set(check_composite(done, last, tmp_path).values()) == set(done.saves[-1 if name == "z3-full" else -2 :])


@pytest.mark.parametrize(
    ("name", "at", "steps"),
    [
        ("z3-again", 6, {4, 6}),  # what it went on from, and what it saved itself
        ("z3-again", 8, {6, 8}),
        ("z3-twice", 8, {6, 8}),
        ("z3-then-filter", 8, {6, 8}),
        ("z3-on-3", 6, {4, 6}),  # of 2 and of 3 ranks
        ("z3-on-3", 8, {6, 8}),
        ("z3-full-on-3", 8, {8}),
    ],
)
def test_it_is_so_after_failures_too(trained, name, at, steps, tmp_path):
    assert set(check_composite(trained[name], at, tmp_path).values()) == steps
