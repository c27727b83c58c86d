"""What `thin` makes of full checkpoints belongs to the attempts of the run that they belong to."""

from __future__ import annotations

import json
import shutil

import pytest

from attempts.campaign import THINNING, composites, play, promised
from attempts.world import World, read_full, step_of
from attempts.zero import ZeroWorld
from helpers.cases import examples, mostly_long
from helpers.commands import call


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path / "run", 0, policy="round_robin:3")
    world.start(None, 0, None)
    yield world
    world.stop()


def thin(world: World, strategy: str) -> dict:
    return json.loads(call("thin", world.run, "--strategy", strategy, "--yes", "--json").stdout)


def test_a_resume_from_it_continues_the_attempt(world):
    """What the saver and the Trainer saved before, and what `thin` made of that, is of use afterwards."""
    world.train_and_save(3)
    world.train(1)
    world.save_full()
    world.train_and_save(2)
    world.train(1)
    world.save_full()
    assert thin(world, "full")["composable_after"] == [3, 4, 6, 7]
    world.resume_from(world.compose(5), 4)
    world.train_and_save(2)
    out = world.compose()
    assert step_of(out) == 6 and set(read_full(out).values()) == {(1, 4), (2, 6)}
    assert promised(world) == [3, 4, 6]


def test_full_loses_nothing_beside_partial_checkpoints(world):
    for step in range(2, 14, 2):
        world.train(2)
        world.save_full()
        if step in (2, 4, 8):
            world.save()
    world.train_and_save(1)
    before = composites(world, promised(world))
    told = thin(world, "full")
    why = {row["step"]: row["why"] for row in told["checkpoints"]}
    assert {step for step, reason in why.items() if reason} == {4, 8}
    assert why[8] == "the composite of step 8 would have older states without it"
    assert composites(world, promised(world)) == before


def test_the_saver_keeps_what_thin_made(world):
    """The user has kept these steps; `keep_composable` is about what the saver saves."""
    for _ in range(3):
        world.train(1)
        world.save_full()
    thin(world, "parity")
    world.present.saver.record.keep_composable = 1
    for _ in range(8):
        world.train_and_save(1)
    assert {1, 2, 3, 11} <= {*promised(world)}
    world.resume_from(world.compose(2), 2)
    world.present.saver.record.keep_composable = 2
    for _ in range(8):
        world.train_and_save(1)
    assert {1, 2, 9, 10} <= {*promised(world)}


CASES = [*((World, seed) for seed in range(150)), *((ZeroWorld, seed) for seed in range(200, 260))]


@pytest.mark.parametrize("case", mostly_long(CASES, (World, 6)), ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_no_history_loses_a_step_or_makes_it_older(tmp_path, case):
    kind, seed = case
    world = kind(tmp_path / "run", seed)
    play(world, examples(14, 24), THINNING)
    shutil.rmtree(tmp_path)
