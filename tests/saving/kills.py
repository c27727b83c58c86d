"""Kill trainings that save in the background at random moments, and see that the newest published save is there.

A training saves after every step: on a disk of the node first, then in the run's folder. It is killed (SIGKILL), while
states are copied, written, published or copied to the run's folder, composed by one command, compared with what it held
at each step, and goes on from there, until it is killed again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from helpers.commands import run_here
from saving.loop import Loop

STEPS, LIVES = 40, 3
LONGEST_LIFE = 12
"""Saves that a training makes at most before it is killed; 2 at least, so that one of them is published"""
LATEST_S = 0.05
"""Seconds that it lives on at most"""


def train(run: Path, node: Path, seed: int, begin: int) -> None:
    """Train to a step, save at each step from there on, until killed."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    policy = chance.choice(["parity", "full", "round_robin:3"])
    loop = Loop(run, policy=policy, staging_dir=node, host_buffer=1 << 20, keep_composable=chance.choice([None, 2]))
    go_to(loop, begin)
    loop.saver.start(begin)
    with (run / "made").open("ab", 0) as made:  # a byte for each save that has begun
        for step in range(begin + 1, STEPS):
            go_to(loop, step)
            loop.save()
            made.write(b".")
    time.sleep(60)


def go_to(loop: Loop, step: int) -> None:
    """Train so that the states of a step are the same in every process."""
    while loop.step < step:
        torch.manual_seed(loop.step)
        loop.train()


def forked(work: object) -> int:
    """Do something in a process of its own: its threads and locks are nobody else's."""
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid


def write_truth(folder: Path) -> None:
    torch.set_num_threads(1)
    loop = Loop(folder / "unused", background=False)
    go_to(loop, STEPS)
    torch.save(loop.truth, folder / "truth.pt")


def held(run: Path, node: Path) -> tuple[int, dict[str, int]]:
    """Return the newest published step on either level, and the step of each param's newest state."""
    step_of: dict[str, int] = {}
    newest = 0
    manifests = {}
    for level in (run, node):
        for path in level.glob("partial/step-????????/manifest.json"):
            manifests[int(path.parent.name[5:])] = json.loads(path.read_text())
    for step in sorted(manifests):
        newest = step
        for part in manifests[step]["parts"]:
            step_of.update(dict.fromkeys(part["params"], step))
    return newest, step_of


def check(run: Path, node: Path, out: Path, truth: dict[int, dict[str, dict[str, torch.Tensor]]]) -> int:
    """Compose the newest state, and compare it with the truth; return its step, 0 if nothing was published yet."""
    newest, step_of = held(run, node)
    if not newest:
        return 0
    also = ["--also", node] if (node / "partial").is_dir() else []
    done = run_here("merge", "--run", run, *also, out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["global_step"] == newest
    weights, optimizer = load_file(out / "model.safetensors"), torch.load(out / "optimizer.pt")
    names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
    for number, name in enumerate(names):
        wanted, found = truth[step_of[name]][name], {"master": weights[name], **optimizer["state"][number]}
        assert all(torch.equal(found[kind], wanted[kind]) for kind in wanted if kind != "step"), (newest, name)
    return newest


def campaign(folder: Path, kills: int, seed: int) -> list[int]:
    """Kill that many times; return the steps that were composed after each. Raises AssertionError."""
    chance = random.Random(seed)
    os.waitpid(forked(lambda: write_truth(folder)), 0)
    truth, steps = torch.load(folder / "truth.pt"), []
    while len(steps) < kills:
        run, node = folder / "run", folder / "node"
        for one in (run, node):
            shutil.rmtree(one, ignore_errors=True)
        begin = 0
        for _ in range(LIVES):
            (run / "made").unlink(missing_ok=True)
            life, wanted = chance.randrange(1 << 30), min(chance.randint(2, LONGEST_LIFE), STEPS - 1 - begin)
            pid = forked(lambda life=life, begin=begin, run=run, node=node: train(run, node, life, begin))
            while not (run / "made").exists() or (run / "made").stat().st_size < wanted:
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"the training has ended: {folder}, life {life}"
                time.sleep(0.001)
            time.sleep(chance.random() * LATEST_S)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            shutil.rmtree(folder / "out", ignore_errors=True)
            begin = check(run, node, folder / "out", truth)
            steps.append(begin)
            if begin >= STEPS - 2:
                break
    return steps


def main(folder: Path) -> None:
    """The folder's name says how many kills, and from which seed: ``6-1``."""
    kills, seed = map(int, folder.name.split("-"))
    (folder / "steps.json").write_text(json.dumps(campaign(folder, kills, seed)))
