"""What people and programs do to checkpoints that share data files, in random order."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from helpers.commands import run_here
from lives.world import (
    PARTS,
    Holding,
    World,
    holding_of,
    inodes,
    killed,
    load,
    part_of,
    step_of,
    steps_of,
)
from llmtailor.saving import DcpSaver, saver_for

# --- saves ------------------------------------------------------------------------------------------------------------


def save_stock(world: World) -> None:
    world.train()
    path = world.run / f"{world.prefix}{world.step}"
    dcp.save(world.training.state(), checkpoint_id=path, no_dist=True)
    world.note("save_stock", path.name)
    world.add(path, world.now())


def save_linked(world: World, *, kill: bool = False) -> None:
    """A save of the part that is due, which links to the rest."""
    world.train()
    path = world.run / f"{world.prefix}{world.step}"

    def save() -> None:
        writer = world.dcp_saver.writer(FileSystemWriter(path), world.step)
        dcp.save(world.training.state(), storage_writer=writer, no_dist=True)

    if kill and killed(save, world.random.randint(1, 9000)):
        world.note("kill_save", path.name)
        world.look()
        if world.random.random() < 0.5:  # the restarted training saves this step again
            shutil.rmtree(path, ignore_errors=True)
        restart_linked(world)
    save()
    world.note("save_linked", path.name)
    now, holding = world.now(), holding_of(load(path))
    earlier = [one.holding for one in world.live.values()]
    mixed = any(all(holding[key] in (now[key], old[key]) for key in now) for old in earlier if old.keys() == now.keys())
    assert holding == now or (mixed and world.event in holding.values()), world.story(holding)
    world.add(path, holding)
    world.newest_of_dcp = path


def kill_save(world: World) -> None:
    save_linked(world, kill=True)


def restart_linked(world: World) -> None:
    """The training starts again, and goes on from its newest folder."""
    world.dcp_saver = DcpSaver(world.policy)
    if world.newest_of_dcp in world.live and not world.live[world.newest_of_dcp].is_damaged:
        world.dcp_saver.resumed_from(world.newest_of_dcp)
    world.note("restart_linked")


def save_partial(world: World) -> None:
    if world.saver is None:
        parts = {"engine": None, "model": world.training.model, "optimizer": world.training.optimizer}
        policy = "parity" if world.policy.startswith("moments") else world.policy
        world.saver = saver_for(world.run, **parts, scheduler=world.training.scheduler, policy=policy)
        world.saver.record.keep_composable = world.keep
        world.saver.start(world.step, world.resumes or ({} if world.step else None))
    world.train()
    report = world.saver.save(world.step).wait()
    world.partial[world.step] = world.now()
    world.note("save_partial", f"{world.step}: {', '.join(report.parts)}")


def overwrite(world: World) -> None:
    """A run that starts again without the wrapper saves to the folder of an earlier step: torch opens its files."""
    folders = world.full()
    if not folders:
        return
    path = world.random.choice(folders)
    world.note("overwrite", path.name)
    world.event += 1
    world.training.be(world.event, step_of(path))
    touched = inodes(path)
    del world.live[path]
    state = world.training.state()
    if world.random.random() < 0.3 and killed(
        lambda: dcp.save(state, checkpoint_id=path, no_dist=True), world.random.randint(1, 6000)
    ):
        world.note("kill_overwrite")
        world.look(touched)
        shutil.rmtree(path)  # nothing tells how much of it is new
        return
    if (path / "llmtailor.json").exists() and world.random.random() < 0.5:
        (path / "llmtailor.json").unlink()
    dcp.save(state, checkpoint_id=path, no_dist=True)
    world.training.be(world.event, world.step)
    world.look(touched)
    shutil.rmtree(path)


# --- composites -------------------------------------------------------------------------------------------------------


def some_form(world: World) -> list[object]:
    words: list[object] = []
    if world.random.random() < 0.5:
        words += ["--to", world.random.choice(["fsdp", "dcp"])]
    if world.random.random() < 0.3:
        words += ["--num-gpu", world.random.randint(1, 3)]
    return words


def compose(world: World) -> None:
    """By a recipe, of any checkpoints there are, damaged ones too."""
    if not world.live:
        return
    sources = [world.random.choice([*world.live]) for _ in range(world.random.randint(1, 3))]
    base, *others = sources
    taken = dict.fromkeys(PARTS, base)
    rules, left = [], [*PARTS]
    for source in others:
        chosen = world.random.sample(left, world.random.randint(1, max(1, len(left) // 2)))
        left = [part for part in left if part not in chosen]
        taken |= dict.fromkeys(chosen, source)
        rules.append({"from": str(source), "select": [part.replace("layer ", "") for part in chosen]})
    out = world.new()
    recipe = world.root / f"{out.name}.yaml"
    recipe.write_text(json.dumps({"base_model": str(base), **({"parts": rules} if rules else {})}))
    result = world.call("merge", recipe, out, "--reference", "--quiet", *some_form(world))
    world.note("compose", f"{out.name} of {[source.name for source in sources]}: exit {result.code}")
    finish(world, result, out, sources, lambda key: world.live[taken[part_of(key[0])]].holding[key])


def convert(world: World) -> None:
    if world.live:
        source, out = world.random.choice([*world.live]), world.new()
        result = world.call("convert", source, out, "--reference", "--quiet", *some_form(world))
        world.note("convert", f"{source.name} to {out.name}: exit {result.code}")
        finish(world, result, out, [source], lambda key: world.live[source].holding[key])


def replace_by_force(world: World) -> None:
    """``--force`` over a composite."""
    made = [path for path in world.live if path.parent == world.beside and (path / "llmtailor.json").is_file()]
    if made and len(world.live) > 1:
        out = world.random.choice(made)
        source = world.random.choice([path for path in world.live if path != out])
        before = world.live.pop(out)
        result = world.call("convert", source, out, "--reference", "--quiet", "--force")
        world.note("replace", f"{out.name} by {source.name}: exit {result.code}")
        if result.code:
            world.live[out] = before
        finish(world, result, out, [source], lambda key: world.live[source].holding[key])


def finish(world: World, result: Any, out: Path, sources: list[Path], event: Callable[[Any], int]) -> None:
    """Take a composite in; what is made of damaged sources is refused, or does not need the damaged data."""
    if result.code:
        is_bad = any(world.live[source].is_touched or not world.live[source].is_resumable for source in sources)
        assert is_bad, world.story("it was refused", result)
    else:
        world.add(out, {key: event(key) for key in world.now()})


def compose_run(world: World) -> None:
    out = world.new() if world.random.random() < 0.5 else None
    made = composed(world, None, world.random.random() < 0.7, out)
    if made is not None:
        world.note("compose_run", made.name)


def composed(world: World, at: int | None, reference: bool, out: Path | None = None) -> Path | None:
    """``merge --run``: each part is what the source that is named for it holds."""
    words = [*(["--at", at] if at is not None else []), *(["--reference"] if reference else []), "--to", "dcp"]
    trust = ["--trust-unrecorded"] if world.trust else []
    result = world.call("merge", "--run", world.run, *words, *trust, *([out] if out else []), "--json")
    if result.code == 0 and not result.stdout:
        return None
    if result.code:
        assert result.code in (3, 4, 5), world.story(result)
        return None
    told = json.loads(result.stdout)
    made = Path(told["out"])
    if made in world.live:  # is complete, and has the newest state
        return None
    wanted: dict[tuple[str, str], int] = {}
    source = {row["part"]: Path(row["source"]) for row in told["parts"]}
    for key in world.now():
        path = source[part_of(key[0])]
        wanted[key] = (world.partial[step_of(path)] if path.parent.name == "partial" else world.live[path].holding)[key]
    world.add(made, wanted)
    return made


# --- what removes -----------------------------------------------------------------------------------------------------


def promised(world: World) -> list[int]:
    result = world.call("gc", world.run, "--json", *(["--trust-unrecorded"] if world.trust else []))
    return json.loads(result.stdout)["composable_after"] if result.code == 0 and result.stdout else []


def samples(world: World, steps: list[int]) -> dict[int, Holding]:
    found = {}
    for step in steps:
        made = composed(world, step, False, world.new())
        if made is not None:
            found[step] = world.live.pop(made).holding
            shutil.rmtree(made)
    return found


def gc(world: World) -> None:
    steps, keep = promised(world), world.random.choice([None, 1, 2, 3])
    kept = steps[-keep:] if keep else steps
    before = samples(world, world.random.sample(kept, min(1, len(kept))))
    words = [*(["--keep", keep] if keep else []), *(["--trust-unrecorded"] if world.trust else [])]
    result = world.call("gc", world.run, *words, "--yes")
    world.note("gc", f"keep {keep}: exit {result.code}")
    assert samples(world, [*before]) == before, world.story("gc changed a composite")


def thin(world: World) -> None:
    how = world.random.choice([["--strategy", "full"], ["--strategy", "parity"], ["--keep-optimizer-last", 1]])
    result = world.call("thin", world.run, *how, *(["--trust-unrecorded"] if world.trust else []), "--yes")
    world.note("thin", f"{how}: exit {result.code}")


def thin_reference(world: World) -> None:
    """Older full checkpoints get links to those before them, in their place."""
    policy = world.random.choice(["full", "parity", "moments_in_turn:2", "moments_in_turn:3", "round_robin:3"])
    words = ["thin", world.run, "--reference", "--strategy", policy, "--keep-full-last", world.random.choice([1, 1, 2])]
    words += ["--trust-unrecorded"] if world.trust else []
    plan = run_here(*words, "--json")
    assert plan.returncode in (0, 3, 4, 5), world.story(plan)
    steps = {path: steps_of(one.loaded) for path, one in world.live.items()}
    for row in json.loads(plan.stdout)["checkpoints"] if plan.stdout else ():  # oldest first
        if row["becomes"] == "linked":
            path, other = Path(row["path"]), Path(row["links_to"])
            old = world.linked.get(other) or world.live[other].holding
            new = {key for key in old if part_of(key[0]) in row["parts"]}
            new |= {key for key in old if part_of(key[0]) in row["masters"] and key[1] == "weight"}
            world.linked[path] = {key: (world.live[path].holding if key in new else old)[key] for key in old}
            own = {param for param in steps[path] if part_of(param) in row["parts"]}
            steps[path] = {param: steps[path if param in own else other][param] for param in steps[path]}
    result = world.call(*words, "--yes")
    world.note("thin_reference", f"{policy}: {len(world.linked)} linked, exit {result.code}")
    assert result.code == plan.returncode, world.story("it was not carried out", result)
    world.forget_removed("thin")
    for path, wanted in world.linked.items():
        one = world.live[path]
        assert (one.holding, steps_of(one.loaded)) == (wanted, steps[path]), world.story(path, wanted, one.holding)
        world.note("linked", path.name)
    world.linked = {}


def rotate(world: World) -> None:
    """``save_total_limit`` of the Trainer, ``keep_latest_k`` of torchtitan"""
    if len(folders := world.full()) > 1:
        shutil.rmtree(folders[0])
        del world.live[folders[0]]
        world.note("rotate", folders[0].name)


def remove(world: World) -> None:
    if world.live:
        path = world.random.choice([*world.live])
        shutil.rmtree(path)
        del world.live[path]
        world.note("remove", path.name)


# --- moves, copies and damage -----------------------------------------------------------------------------------------


def rename(world: World) -> None:
    made = [path for path in world.live if path.parent == world.beside]
    if made:
        path = world.random.choice(made)
        world.live[target := world.new()] = world.live.pop(path)
        path.rename(target)
        world.note("rename", f"{path.name} to {target.name}")


def copy(world: World) -> None:
    """``cp -a``, ``cp -r`` or ``cp -al``"""
    if world.live:
        path, target = world.random.choice([*world.live]), world.new()
        has_record = (path / "llmtailor.json").exists() or (path / "llmtailor-dcp.json").exists()
        how = world.random.choice([shutil.copy2, shutil.copyfile, *([os.link] if has_record else [])])
        shutil.copytree(path, target, copy_function=how)
        one = world.live[path]
        world.live[target] = replace(one, seen=None)
        world.note("copy", f"{path.name} to {target.name} by {how.__name__}")


def move_run(world: World) -> None:
    world.stop()
    target = world.root / f"run-{len(world.notes)}"
    world.run.rename(target)
    world.live = {(target / path.name if path.parent == world.run else path): one for path, one in world.live.items()}
    if world.newest_of_dcp is not None:
        world.newest_of_dcp = target / world.newest_of_dcp.name
    world.run = target
    restart_linked(world)
    world.note("move_run")


def damage(world: World) -> None:
    """A data file is cut short, under all of its names; then the run is salvaged."""
    folders = world.full()
    if not folders:
        return
    path = folders[-1]
    file = world.random.choice(sorted(path.glob("**/*.distcp")))
    touched = {file.stat().st_ino}
    os.truncate(file, file.stat().st_size // 2)
    world.note("damage", f"{path.name}/{file.name}")
    world.look(touched)
    words = world.random.choice([[], ["--replace"]])
    out = world.new()
    trust = ["--trust-unrecorded"] if world.trust else []
    result = world.call("salvage", world.run, *words, *([] if "--replace" in words else ["-o", out]), *trust, "--json")
    world.note("salvage", f"{words}: exit {result.code}")
    assert result.code in (0, 3, 4, 5, 6), world.story(result)
    world.forget_removed("salvage")
    if "--replace" in words and result.code == 0 and result.stdout:
        out = Path(json.loads(result.stdout)["resume_from"])
    if result.code or out in world.live or not out.exists():
        return
    if [*out.rglob(".metadata")]:
        everything = [one.holding for one in world.live.values()] + [*world.partial.values()]
        holding = holding_of(load(out))
        known = all(any(one.get(key) == event for one in everything) for key, event in holding.items())
        assert known, world.story("salvage made this up", holding)
        world.add(out, holding)
    else:  # of partial checkpoints alone, in another format
        shutil.rmtree(out)


Actions = dict[Callable[[World], object], float]
EVERYTHING: Actions = {
    save_stock: 4,
    save_linked: 5,
    kill_save: 2,
    restart_linked: 1,
    save_partial: 4,
    overwrite: 1,
    compose: 6,
    convert: 2,
    replace_by_force: 1,
    compose_run: 3,
    gc: 2,
    thin: 1,
    thin_reference: 1.5,
    rotate: 2,
    remove: 1,
    rename: 1,
    copy: 2,
    move_run: 0.4,
    damage: 0.5,
}


def play(world: World, moves: int, actions: Actions) -> None:
    for _ in range(moves):
        action = world.random.choices([*actions], [*actions.values()])[0]
        try:
            action(world)
            world.forget_removed(action.__name__)
            world.look()
        except Exception as error:
            raise AssertionError(world.story(f"{action.__name__}: {error!r}")) from error
    world.stop()
