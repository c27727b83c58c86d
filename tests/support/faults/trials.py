"""Make merges fail in every way we can think of, see what they leave, run them again, and count the outcomes.

After each trial the output must be absent (or the old one) or complete, the sources as they were, and the same command
must then succeed and yield what an undisturbed one yields, byte for byte.

All but `races` run in forked children whose ``os`` functions are wrapped (driver.py), on a small
checkpoint, with buffers of some kB, so that there are many operations.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from faults.powercut import VIEWS, Disk, read_tree, write_tree
from faults.scene import COMMANDS, Scene
from helpers.places import ROOT
from synthetic import SHAPES

ERRORS: tuple[dict[str, object], ...] = (
    {"fault": "EIO"},
    {"fault": "EIO", "lasting": True},
    {"fault": "EIO", "only": ("preadv", "readv")},
    {"fault": "ENOSPC", "lasting": True, "only": ("write", "open", "mkdir")},
    {"fault": "EACCES", "lasting": True, "only": ("open", "mkdir", "rename", "renameat2", "unlink", "rmdir")},
    {"fault": "EROFS", "lasting": True},
    {"fault": "SIGTERM"},
    {"fault": "SIGINT"},
)
"""What comes at an operation: see `faults.driver.Request`."""


def large_scene(root: Path, command: str, hidden_size: int) -> Scene:
    """A checkpoint whose writing takes long enough to be interrupted, in many files so that there is much to keep."""
    shape = replace(
        SHAPES["tiny"], vocab_size=20_000, hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_heads=8
    )
    return Scene(root, command, shape, world_size=8)


# --- trials ----------------------------------------------------------------------------------------------------------


def steps(scene: Scene, points: Callable[[int], Iterable[int]], **others: object) -> Counter[str]:
    """Kill at chosen operations; ``points`` chooses from 1..their number."""
    counts: Counter[str] = Counter()
    for at in points(scene.count(**others)):
        assert scene.run(fault="kill", at=at, **others) == -signal.SIGKILL, scene.said.read_text()
        counts[_outcome(scene)] += 1
    return counts


def errors(scene: Scene, points: Callable[[int], Iterable[int]], fault: dict[str, object]) -> Counter[str]:
    """Let chosen operations fail, or a polite signal come at them."""
    counts: Counter[str] = Counter()
    allowed = {130} if str(fault["fault"]).startswith("SIG") else {8}
    for at in points(scene.count(**{key: value for key, value in fault.items() if key == "only"})):
        code, said = scene.run(at=at, **fault), scene.said.read_text()
        # 0: it came when the output was complete, and only the staging folder was left to be removed
        assert code in allowed or (code == 0 and scene.state() == "complete"), f"exit code {code}: {said}"
        assert code == 0 or "the disk doesn't confirm" in said or scene.state() != "complete", said
        assert "Traceback" not in said, said
        promised = "to resume with" in said
        outcome = _outcome(scene)
        # a mark whose fsync failed is not promised, and may be there all the same
        assert outcome.endswith("went on") or not promised, said
        counts[f"exit {code}, {outcome}"] += 1
    return counts


def power(scene: Scene, points: Callable[[int], Iterable[int]], **others: object) -> Counter[str]:
    """Cut the power after chosen operations, in every view of what is then left."""
    names = (scene.out.name, scene.staging.name)
    before = read_tree(scene.root, names)
    assert scene.run(fault="trace", **others) == 0
    trace = scene.recorded()
    assert isinstance(trace, list)
    disk, chosen, counts = Disk(scene.root, before), set(points(len(trace))), Counter[str]()
    seen: set[str] = set()
    for number, event in enumerate(trace, 1):
        disk.apply(event)
        for view in VIEWS if number in chosen else ():
            tree = disk.folder.view(view)
            if (key := repr(tree)) not in seen:
                seen.add(key)
                for name in names:
                    shutil.rmtree(scene.root / name, ignore_errors=True)
                write_tree(tree, scene.root)
                counts[f"{view}: {_outcome(scene)}"] += 1
    scene.reset()
    return counts


def races(scene: Scene, rounds: int, racers: int, chance: random.Random) -> Counter[str]:
    """Start several processes at once, half of the rounds on what a killed one has left; one of them must win."""
    counts: Counter[str] = Counter()
    for number in range(rounds):
        if number % 2:
            with _process(scene) as process:
                _wait_for_writing(scene, process)
                time.sleep(chance.uniform(0, 0.1))
                process.kill()
        if scene.state() == "complete":
            scene.reset()
        started = [subprocess.Popen(_words(scene), cwd=scene.root, env=_OURS, **_SILENT) for _ in range(racers)]
        codes = sorted(process.wait() for process in started)
        winners = codes.count(0)
        # with --force whoever comes when the first is done replaces its output
        assert winners == 1 or (winners and scene.kind == "force"), codes
        assert set(codes) <= {0, 6}, codes
        assert scene.state() == "complete"
        assert not scene.staging.exists()
        scene.reset()
        counts[f"{winners} wrote it, the others were refused"] += 1
    return counts


def _outcome(scene: Scene) -> str:
    """Say what is there, and whether the next run went on with something."""
    state = scene.state()
    return f"output {state}, rerun {'went on' if scene.finish() else 'began anew' if state != 'complete' else 'done'}"


# --- processes -------------------------------------------------------------------------------------------------------

_OURS = {**os.environ, "PYTHONPATH": str(ROOT)}
_SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def _words(scene: Scene) -> list[str]:
    return [sys.executable, "-m", "llmtailor", *COMMANDS[scene.kind]]


@contextmanager
def _process(scene: Scene) -> Iterator[subprocess.Popen[bytes]]:
    with scene.said.open("wb") as said:
        process = subprocess.Popen(_words(scene), cwd=scene.root, env=_OURS, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_writing(scene: Scene, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not scene.staging.exists():
        time.sleep(0.001)
