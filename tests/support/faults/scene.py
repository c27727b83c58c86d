"""A run's folder, a command that writes into it, and what must hold whatever goes wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from faults.driver import NAMES, Request, ask
from helpers.checkpoints import SMALL, make
from synthetic import Shape

RECIPE = "base_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: [odd, norm]}\n"
COMMANDS = {
    "merge": ["merge", "recipe.yaml", "out", "--quiet"],
    "convert": ["convert", "checkpoint-200", "out", "--num-gpu", "3", "--quiet"],
    "checksum": ["merge", "recipe.yaml", "out", "--quiet", "--checksum"],
    "force": ["merge", "recipe.yaml", "out", "--quiet", "--force"],
}
"""Under ``force`` there is an old output."""
OLD = {"trainer_state.json": xxh3_128(b"old").hexdigest()}


class Scene:
    """Two checkpoints and a recipe in ``root``, and a command whose output is ``out``."""

    def __init__(self, root: Path, kind: str, shape: Shape = SMALL, world_size: int = 2):
        self.root, self.kind = root, kind
        self.is_small = shape is SMALL
        self.out, self.staging = root / "out", root / ".out.llmtailor-staging"
        self.said = root / "said"
        self.record = root / "record"
        for step in (100, 200):
            if not (root / f"checkpoint-{step}").exists():
                make(root, step, shape=shape, world_size=world_size)
        (root / "recipe.yaml").write_text(RECIPE)
        self.sources = contents(root / "checkpoint-100"), contents(root / "checkpoint-200")
        self.reset()
        assert self.run() == 0, self.said.read_text()
        self.wanted = contents(self.out)
        assert len(self.wanted) > 10
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning."""
        for path in (self.out, self.staging):
            shutil.rmtree(path, ignore_errors=True)
        if self.kind == "force":
            self.out.mkdir()
            (self.out / "trainer_state.json").write_text("old")

    def run(self, *options: str, **fault: object) -> int:
        """Run the command, with more options and a fault; return its exit code."""
        request = Request([*COMMANDS[self.kind], *options], str(self.root), small=self.is_small, **fault)
        (code,) = ask({}, [replace(request, said=str(self.said), record=str(self.record))])
        return code

    def recorded(self) -> object:
        return pickle.loads(self.record.read_bytes())

    def count(self, **fault: object) -> int:
        """Return how many operations an undisturbed run has."""
        assert self.run(fault="count", **fault) == 0
        self.reset()
        count = self.recorded()
        assert isinstance(count, int)
        return count

    def state(self) -> str:
        """Return ``absent``, ``old`` or ``complete``; nothing else may be."""
        assert (contents(self.root / "checkpoint-100"), contents(self.root / "checkpoint-200")) == self.sources
        if not self.out.exists():
            return "absent"
        found = contents(self.out)
        if self.kind == "force" and found == OLD:
            return "old"
        assert found == self.wanted, "the output is neither absent nor complete"
        return "complete"

    def finish(self) -> bool:
        """Run the command again, undisturbed, and begin a new trial; return whether it went on with something."""
        was_complete = self.state() == "complete"
        code = self.run()
        said = self.said.read_text()
        if was_complete and self.kind != "force":
            assert code == 6, said
            assert "already exists" in said
        else:
            assert code == 0, said
            assert not self.staging.exists(), f"left: {sorted(map(str, self.staging.rglob('*')))}\n{said}"
        assert self.state() == "complete"
        self.reset()
        return "resuming the merge" in said


def contents(folder: Path) -> dict[str, str]:
    """Return digests by relative path; of the manifest without its date."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "llmtailor.json":
                data = json.dumps({**json.loads(data), "created": "", "merge": ""}).encode()
            found[str(path.relative_to(folder))] = xxh3_128(data).hexdigest()
    return found


KILLS = int(os.environ.get("LLMTAILOR_KILLS", "3"))
"""Moments at which a command is killed, all over; 1000 kills it before every single change of the disk"""


class Killing:
    """A command on ``root/run``, a copy of ``root/original``, that is killed before changes of the disk."""

    def __init__(
        self,
        root: Path,
        words: Sequence[str],
        outcome: Callable[[Path], Any],
        no_exchange: bool = False,
    ):
        self.root, self.outcome = root, outcome
        self.run, self.said, self.record = root / "run", root / "said", root / "record"
        only = (*NAMES, "open")
        self.request = Request([words[0], "run", *words[1:]], str(root), no_exchange=no_exchange, only=only)
        self.original = root / "original"
        self.reset()
        self.command(fault="count")
        self.count = pickle.loads(self.record.read_bytes())
        assert self.count > KILLS
        self.wanted: Any = outcome(self.run)

    def reset(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.original, self.run)

    def command(self, expected: int = 0, **fault: Any) -> None:
        (code,) = ask({}, [replace(self.request, said=str(self.said), record=str(self.record), **fault)])
        assert code == expected, f"{fault}: {self.said.read_text()}"

    def trials(self, last: int = 0) -> Iterator[int]:
        """Kill it at some moments, and at each of the ``last``; yield the moment, and then let the command complete."""
        spread = {1 + number * (self.count - 1) // (KILLS - 1) for number in range(KILLS)}
        for moment in sorted(spread | set(range(max(1, self.count - last + 1), self.count + 1))):
            self.reset()
            self.command(-signal.SIGKILL, fault="kill", at=moment)
            yield moment
            for _ in range(2 if moment == self.count else 1):
                self.command()
                assert self.outcome(self.run) == self.wanted, f"killed at {moment}"
