"""Random histories of a run: saves, crashes, rollbacks, merges. No composite ever mixes attempts."""

from __future__ import annotations

import shutil

import pytest

from attempts import campaign
from attempts.world import World, step_of
from helpers.cases import mostly_long


def roll_back(world):
    """Give up the newest steps: compose an earlier one, and resume from it."""
    steps = sorted({step_of(path) for path in world.own()})
    if len(steps) > 1:
        at = world.random.choice(steps[:-1])
        if (source := world.compose(at)) is not None:
            world.resume_from(source, step_of(source))


def recover(world):
    if (source := world.compose()) is not None:
        world.resume_from(source, step_of(source))
    elif not list(world.run.glob("partial/step-*[0-9]")):
        world.start(None, 0, None)


def resume_by_hand(world):
    """From any full checkpoint that is there, also one of an attempt that was given up."""
    full = [path for path in world.run.glob("checkpoint-*") if path.name[11:].isdigit()]
    if full:
        source = world.random.choice(sorted(full))
        world.resume_from(source, step_of(source))


def without_saver(world):
    """Somebody resumes without the saver; the Trainer saves full checkpoints then."""
    full = [path for path in world.own() if path.parent == world.run]
    if full:
        source = world.random.choice(sorted(full))
        world.resume_from(source, step_of(source), with_saver=False)


def bring_back(world):
    """Somebody puts back, or copies, what was set aside or is old."""
    aside = sorted([*world.run.glob("abandoned-checkpoint-*"), *world.run.glob("partial/step-*.abandoned")])
    if aside:
        source = world.random.choice(aside)
        target = source.with_name(source.name.removeprefix("abandoned-").removesuffix(".abandoned"))
        if target.name[-1].isdigit() and not target.exists():
            source.rename(target)
            world.note("bring_back", target.name)


def go_on(world):
    world.train(world.random.randint(1, 3))
    if world.random.random() < 0.7:
        world.save()
    if world.random.random() < (0.2 if world.present.saver else 0.8):
        world.save_full()


ACTIONS = {
    go_on: 10,
    recover: 2,
    roll_back: 3,
    resume_by_hand: 1,
    without_saver: 1,
    bring_back: 1,
    World.tear_a_save: 1,
    World.compose: 3,
}


def play(world, moves, actions=ACTIONS):
    world.start(None, 0, None)
    for _ in range(moves):
        action = world.random.choices(list(actions), list(actions.values()))[0]
        try:
            action(world)
        except Exception as error:
            raise AssertionError(world.story(f"{action.__name__}: {error!r}")) from error
    world.stop()


MIXED = ACTIONS | campaign.ACTIONS
CASES = [*((seed, MIXED) for seed in range(100, 104)), *((seed, ACTIONS) for seed in range(8))]


@pytest.mark.parametrize("case", mostly_long(CASES, CASES[0]), ids=lambda case: str(case[0]))
def test_no_composite_mixes_attempts_and_nothing_promised_is_lost(tmp_path, case):
    seed, actions = case
    world = World(tmp_path / "run", seed)
    play(world, 24, actions)
    assert world.outputs
    shutil.rmtree(tmp_path)
