"""Everything that people do to a run's folder, in random order; after each step nothing promised is lost or mixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from attempts.world import DAMAGE, Holding, World, read_full, step_of
from helpers.commands import run_here
from helpers.files import cut


def composites(world: World, steps: list[int]) -> dict[int, Holding]:
    """Compose steps, elsewhere, and read what came out; it must be of one attempt."""
    made = {}
    for step in steps:
        out = world.run.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        result = run_here("merge", "--run", world.run, "--at", step, out)
        assert result.returncode == 0, world.story(f"step {step} was promised", result)
        made[step] = read_full(out)
        assert any(all(one.owns(made) for made in made[step].values()) for one in world.attempts), world.story(made)
        shutil.rmtree(out)
    return made


def promised(world: World) -> list[int]:
    """The steps that can be composed, as gc says."""
    result = run_here("gc", world.run, "--json")
    return json.loads(result.stdout)["composable_after"] if result.returncode == 0 else []


def same(before: Mapping[int, Holding], after: Mapping[int, Holding]) -> bool:
    return all(after.get(step) == holding for step, holding in before.items())


def thin(world: World) -> None:
    """No step is lost, and none of its parts gets older than the plan says; with ``full`` none does at all."""
    strategy = world.random.choice(["full", "full", "parity", "round_robin:3", "moments_in_turn:2", "filter"])
    before = promised(world)
    if not before:
        return
    was = composites(world, before[-5:])
    result = run_here("thin", world.run, "--strategy", strategy, "--yes", "--json")
    world.note("thin", f"{strategy}: exit {result.returncode}")
    assert result.returncode in (0, 4, 7), world.story(result)
    now = composites(world, before[-5:])
    told = {row["step"]: row["afterwards"]["steps_back"] for row in json.loads(result.stdout or "{}").get("ages", ())}
    for step, holding in was.items():
        allowed = 0 if strategy == "full" else told.get(step, 0)
        for part, made in holding.items():
            is_fine = now[step][part] == made or step - now[step][part][1] <= allowed
            assert is_fine, world.story(result, f"{part} of step {step} was {made}", now[step])


def gc(world: World) -> None:
    before = promised(world)
    if not before:
        return
    keep = world.random.choice([None, 1, 2, 3])
    kept = before[-keep:] if keep else before
    sample = world.random.sample(kept, min(2, len(kept)))
    was = composites(world, sample)
    words = ["--keep", keep] if keep else []
    result = run_here("gc", world.run, *words, "--yes", "--json")
    world.note("gc", f"keep {keep}: exit {result.returncode}")
    assert result.returncode == 0, world.story(result)
    assert same(was, composites(world, sample)), world.story("gc changed a composite", was)


def rotate(world: World) -> None:
    """The Trainer deletes an old full checkpoint."""
    full = sorted((path for path in world.run.glob("checkpoint-*") if path.name[11:].isdigit()), key=step_of)
    if len(full) > 1:
        shutil.rmtree(full[0])
        world.note("rotate", full[0].name)


def lose_full(world: World) -> None:
    """All full checkpoints are gone: what gc promised must stand on the partial ones."""
    kept = {path: holding for path, holding in world.own().items() if path.parent != world.run}
    if kept and world.present.saver is not None:
        for path in world.run.glob("checkpoint-*"):
            shutil.rmtree(path)
        world.note("lose_full")


def copy_away(world: World) -> None:
    """The run moves to another folder."""
    world.stop()
    elsewhere = world.run.with_name(f"run-{len(world.notes)}")
    shutil.copytree(world.run, elsewhere)
    shutil.rmtree(world.run)
    world.run = elsewhere
    world.note("copy_away")
    source = world.compose()
    if source is not None:
        world.resume_from(source, step_of(source))
    else:
        shutil.rmtree(world.run)
        world.run.mkdir()
        world.start(None, 0, None)


def damage(world: World) -> None:
    """The newest checkpoint is cut short, and salvaged."""
    there = sorted(world.own().items(), key=lambda item: step_of(item[0]))
    if not there:
        return
    path, _ = there[-1]
    file = path / "model.safetensors" if path.parent == world.run else min(path.glob("rank-*.safetensors"))
    cut(file, 40)
    result = run_here("salvage", world.run, "--replace")
    world.note("damage", f"{path.name}: salvage exit {result.returncode}")
    is_taken = result.returncode == 6 and "the name is taken by an earlier --replace" in result.stderr
    assert result.returncode in (0, 4) or is_taken, world.story(result)
    if result.returncode == 0:
        full = sorted((one for one in world.run.glob("checkpoint-*") if one.name[11:].isdigit()), key=step_of)
        made = {read(one): one for one in full[-1:]}
        for holding in made:
            assert any(all(one.owns(part) for part in holding) for one in world.attempts), world.story(result, made)
    if path.exists():
        shutil.rmtree(path)


def read(path: Path) -> frozenset[tuple[int, int]]:
    try:
        return frozenset(read_full(path).values())
    except DAMAGE as error:
        raise AssertionError(f"{path} was left damaged where auto-resume looks") from error


def replace(world: World) -> None:
    """``merge --force`` over a composite of before."""
    out = world.compose()
    if out is not None and (out / "llmtailor.json").is_file() and not any(one.is_dir() for one in out.iterdir()):
        copy = world.run.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(out, copy)
        result = run_here("merge", "--run", world.run, copy, "--force")
        world.note("replace", f"exit {result.returncode}")
        assert result.returncode == 0, world.story(result)
        assert read_full(copy) == read_full(out), world.story(result)


def roll_back(world: World) -> None:
    """Give up the newest steps: compose an earlier one, and resume from it."""
    steps = sorted({step_of(path) for path in world.own()})
    if len(steps) > 1:
        at = world.random.choice(steps[:-1])
        if (source := world.compose(at)) is not None:
            world.resume_from(source, step_of(source))


def recover(world: World) -> None:
    if (source := world.compose()) is not None:
        world.resume_from(source, step_of(source))
    elif not list(world.run.glob("partial/step-*[0-9]")):
        world.start(None, 0, None)


def resume_by_hand(world: World) -> None:
    """From any full checkpoint that is there, also one of an attempt that was given up."""
    full = [path for path in world.run.glob("checkpoint-*") if path.name[11:].isdigit()]
    if full:
        source = world.random.choice(sorted(full))
        world.resume_from(source, step_of(source))


def without_saver(world: World) -> None:
    """Somebody resumes without the saver; the Trainer saves full checkpoints then."""
    full = [path for path in world.own() if path.parent == world.run]
    if full:
        source = world.random.choice(sorted(full))
        world.resume_from(source, step_of(source), with_saver=False)


def bring_back(world: World) -> None:
    """Somebody puts back, or copies, what was set aside or is old."""
    aside = sorted([*world.run.glob("abandoned-checkpoint-*"), *world.run.glob("partial/step-*.abandoned")])
    if aside:
        source = world.random.choice(aside)
        target = source.with_name(source.name.removeprefix("abandoned-").removesuffix(".abandoned"))
        if target.name[-1].isdigit() and not target.exists():
            source.rename(target)
            world.note("bring_back", target.name)


def go_on(world: World) -> None:
    world.train(world.random.randint(1, 3))
    if world.random.random() < 0.7:
        world.save()
    if world.random.random() < (0.2 if world.present.saver else 0.8):
        world.save_full()


Actions = dict[Callable[[World], object], float]
SAVING: Actions = {
    go_on: 10,
    recover: 2,
    roll_back: 3,
    resume_by_hand: 1,
    without_saver: 1,
    bring_back: 1,
    World.tear_a_save: 1,
    World.compose: 3,
}
EVERYTHING: Actions = SAVING | {thin: 1, gc: 2, rotate: 1, lose_full: 0.3, copy_away: 0.3, damage: 0.7, replace: 0.7}
"""What people do, and how often"""


def save_both(world: World) -> None:
    """The Trainer's own checkpoints among partial ones, also of the same step"""
    world.train(world.random.randint(1, 3))
    saves = world.random.choice([(World.save,), (World.save_full,), (World.save, World.save_full)])
    for save in saves:
        save(world)


THINNING: Actions = {
    save_both: 12,
    thin: 3,
    recover: 2,
    roll_back: 2,
    resume_by_hand: 1,
    without_saver: 0.5,
    bring_back: 0.5,
    World.compose: 2,
    gc: 1,
    rotate: 0.5,
    copy_away: 0.5,
    damage: 0.7,
}


def play(world: World, moves: int, actions: Actions) -> None:
    world.policy = world.random.choice(["parity", "parity", "round_robin:3", "full", "moments_in_turn:2"])
    world.start(None, 0, None)
    for _ in range(moves):
        action = world.random.choices(list(actions), list(actions.values()))[0]
        try:
            action(world)
        except Exception as error:
            raise AssertionError(world.story(f"{action.__name__}: {error!r}")) from error
    world.stop()
