"""What saves of `saving.dcp_loop` must hold, and how that is checked."""

from __future__ import annotations

import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from fsspec.core import url_to_fs
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from saving.dcp_loop import LAYERS, load_whole, same, spawn
from trainings.harness import start_ranks

MOMENTS = [f"optim.state.layers.{layer}.weight.{kind}" for layer in (0, 1) for kind in ("step", "exp_avg")]


def oracle(run: Path, step: int) -> dict[str, object]:
    """Return what the folder of a step must hold: moments of one layer in turn, everything else at each save."""
    chain, name = [], f"step-{step}"
    while name:
        truth = torch.load(run / f"truth-{name.removeprefix('step-')}.pt", weights_only=False)
        chain.insert(0, truth)
        name = truth["after"]
    held = dict(chain[0]["state"])
    for number, truth in enumerate(chain[1:]):
        for key, value in truth["state"].items():
            match = re.fullmatch(r"optim\.state\.layers\.(\d)\..*", key)
            if match is None or int(match[1]) == number % LAYERS:
                held[key] = value
    return held


def read(folder: Path) -> dict[str, object]:
    return load_whole(FileSystemReader(folder))


def check(held: dict[str, object], wanted: dict[str, object]) -> None:
    assert held.keys() == wanted.keys()
    assert [key for key in held if not same(held[key], wanted[key])] == []


def train(run: Path, ranks: int, *arguments: object) -> None:
    run.mkdir(exist_ok=True)
    start_ranks("saving.dcp_loop", [run, *arguments], ranks, run)


def tiny(step: int, rows: int = 4) -> dict[str, object]:
    """A state of two layers, in which every value is the step."""
    names = ["layers.0.weight", "layers.1.weight"]
    full = {name: torch.full((rows, 3), float(step)) for name in names}
    states = {name: {"step": torch.tensor(float(step)), "exp_avg": full[name].clone()} for name in names}
    return {"model": full, "optim": {"state": states}, "train": {"step": step}}


def killed(run: Path, arguments: list[str], *, kills: int, saves: int, seconds: float, seed: int) -> Iterator[None]:
    """Train on two ranks, which are killed up to so many seconds after they began; the last ones end by themselves."""
    chance = random.Random(seed)
    run.mkdir()
    for kill in range(kills + 1):
        until = saves if kill == kills else 10 * saves
        processes = spawn([sys.executable, "-m", "saving.dcp_loop", f"{run}", f"{until}", *arguments], 2)
        wait_for(lambda: any(run.glob("began-*")))
        if kill < kills:
            time.sleep(chance.uniform(0, seconds))
            for one in chance.sample(processes, 2):
                one.kill()
        assert {one.wait() for one in processes} == {-signal.SIGKILL if kill < kills else 0}
        for path in run.glob("began-*"):
            path.unlink()
        yield


def wait_for(is_there) -> None:
    until = time.monotonic() + 120
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.01)


def read_store(url: str) -> dict[str, object]:
    url_to_fs(url)[0].invalidate_cache()
    return load_whole(FsspecReader(url))
