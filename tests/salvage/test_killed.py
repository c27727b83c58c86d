"""salvage --replace killed at any moment, also between two renames: nothing is lost, and the same command completes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.scene import Killing
from helpers.cases import diagonal, examples
from helpers.checkpoints import make_run, model_states
from helpers.files import TOLD, contents, cut
from llmtailor.salvage import replace
from thin.scene import SHORT, folders

LAST = examples(5, 12)
"""Changes before the end that are all tried: the last of the merge, and the renames."""


def lose_a_file(run: Path) -> None:
    """A composite of step 300, which has the file again, takes its place."""
    cut(model_states(run / "checkpoint-300", 1))


def lose_the_schedule(run: Path) -> None:
    """A composite of step 200, with newer states, takes its place; the newest goes aside."""
    (run / "checkpoint-300" / "scheduler.pt").unlink()


def lose_two(run: Path) -> None:
    """Nothing is composed: an older one is whole, and two go aside."""
    for step in (200, 300):
        shutil.rmtree(run / f"checkpoint-{step}" / f"global_step{step}")


@pytest.mark.parametrize(
    ("can_exchange", "damage"), diagonal([True, False], [lose_a_file, lose_the_schedule, lose_two])
)
def test_replace(tmp_path: Path, damage: Callable[[Path], None], can_exchange: bool) -> None:
    original = make_run(tmp_path / "original", shape=SHORT)
    damage(original)
    before = {tuple(contents(path, *TOLD).items()) for path in original.iterdir()}

    def all_of(run: Path) -> dict[str, object]:
        return {path.name: contents(path, *TOLD) for path in run.iterdir()}

    words = ("salvage", "--replace")
    killing = Killing(tmp_path, words, all_of, no_exchange=not can_exchange)
    stays = killing.wanted.keys() & {path.name for path in original.iterdir()}
    for moment in killing.trials(last=LAST):
        there = {path.name: tuple(contents(path, *TOLD).items()) for path in killing.run.iterdir() if path.is_dir()}
        assert before <= {*there.values()}, f"killed at {moment}: {folders(killing.run)}"
        assert not can_exchange or stays <= there.keys(), "a trainer that starts meanwhile finds each where it was"


def test_what_was_put_there_after_an_interruption_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", shape=SHORT)
    target, made, aside = (run / f"{word}checkpoint-300" for word in ("", "salvaged-", "damaged-"))
    shutil.copytree(run / "checkpoint-200", made)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(replace, "put_in_place", die)
        replace.put_salvaged_in_place(replace.Replacement(made, target, {target: aside}))
    assert replace.unfinished_replacement(run) == replace.Replacement(made, target, {target: aside})
    target.rename(aside)
    shutil.copytree(run / "checkpoint-100", target)
    assert replace.unfinished_replacement(run) == replace.Replacement(target, target, {})
