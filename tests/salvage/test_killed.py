"""salvage --replace killed at any moment, also between two renames: nothing is lost, and the same command completes."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from faults.driver import Request, Server
from helpers.cases import diagonal, examples
from helpers.checkpoints import make, optim_states
from salvage.damage import truncate
from thin.scene import SHORT, contents, folders

COMMAND = ["salvage", "run", "--fragments", "--replace"]
CHANGES = ("open", "mkdir", "unlink", "rename", "renameat2")
MOMENTS = int(os.environ.get("LLMTAILOR_KILLS", "3"))
"""Of those before the renames; 1000 kills it before every single change."""
LAST = examples(5, 12)
"""Changes before the end that are all tried: the last of the merge, and the renames."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    for step in (100, 200, 300):
        make(root, step, shape=SHORT)
    return root


def lose_a_rank(run: Path) -> None:
    """A composite of step 300 takes its place."""
    truncate(optim_states(run / "checkpoint-300", 1))


def lose_the_schedule(run: Path) -> None:
    """A composite of step 200, with newer states, takes its place; the newest goes aside."""
    (run / "checkpoint-300" / "scheduler.pt").unlink()


def lose_two(run: Path) -> None:
    """Nothing is composed: an older one is whole, and two go aside."""
    for step in (200, 300):
        shutil.rmtree(run / f"checkpoint-{step}" / f"global_step{step}")


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.mark.parametrize(
    ("can_exchange", "damage"), diagonal([True, False], [lose_a_rank, lose_the_schedule, lose_two])
)
def test_replace(
    server: Server, whole: Path, tmp_path: Path, damage: Callable[[Path], None], can_exchange: bool
) -> None:
    def salvage(**fault: object) -> int:
        said = str(tmp_path / "said")
        return server.run(
            Request(COMMAND, str(tmp_path), no_exchange=not can_exchange, only=CHANGES, said=said, **fault)
        )

    run, record = tmp_path / "run", tmp_path / "record"
    original = Path(shutil.copytree(whole, tmp_path / "original"))
    damage(original)
    before = {tuple(contents(path).items()) for path in original.iterdir()}
    shutil.copytree(original, run)
    assert salvage(fault="count", record=str(record)) == 0
    wanted = {path.name: contents(path) for path in run.iterdir()}
    stays = wanted.keys() & {path.name for path in original.iterdir()}
    count = pickle.loads(record.read_bytes())
    moments = {1 + number * (count - 1) // (MOMENTS - 1) for number in range(MOMENTS)}
    for moment in sorted(moments | set(range(max(1, count - LAST + 1), count + 1))):
        shutil.rmtree(run)
        shutil.copytree(original, run)
        assert salvage(fault="kill", at=moment) == -signal.SIGKILL
        there = {tuple(contents(path).items()) for path in run.iterdir() if path.is_dir()}
        assert before <= there, f"killed at {moment}: {folders(run)}"
        if can_exchange:  # a trainer that starts meanwhile finds each where it was
            assert stays <= {path.name for path in run.iterdir()}, f"killed at {moment}: {folders(run)}"
        for _ in range(2 if moment == count else 1):
            assert salvage() == 0, f"killed at {moment}: {(tmp_path / 'said').read_text()}"
            assert {path.name: contents(path) for path in run.iterdir()} == wanted, f"killed at {moment}"
