"""Start jobs and find what they left behind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from partial.jobs import Job
from trainings.harness import train


@dataclass(frozen=True)
class Done:
    """A finished job."""

    job: Job
    folder: Path
    ranks: int

    def partial(self, step: int) -> Path:
        return self.folder / "partial" / f"step-{step:08}"

    def stock(self, step: int) -> Path:
        """The checkpoint that the Trainer itself made at that step."""
        return self.folder / "stock" / f"checkpoint-{step}"

    @cached_property
    def saves(self) -> list[int]:
        found = [path.parent.name for path in self.folder.glob("partial/*/manifest.json")]
        return sorted(int(name.removeprefix("step-")) for name in found if "abandoned" not in name)

    def manifest(self, step: int) -> dict[str, Any]:
        return dict(json.loads((self.partial(step) / "manifest.json").read_text()))

    def result(self, rank: int = 0) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"result-{rank}.json").read_text()))

    @property
    def log(self) -> list[dict[str, Any]]:
        """The Trainer's log without what the saver put there."""
        return without_saver(self.result()["log"])

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.result()["log"] if "loss" in line}

    @property
    def messages(self) -> list[str]:
        """What the saver said, apart from what it says in each training: at its beginning and at its end."""
        usual = ("WARNING: partial checkpoints go to ", "WARNING: for a full checkpoint of step ")
        return [message for message in self.result()["messages"] if not message.startswith(usual)]

    def truth(self, step: int) -> dict[str, Any]:
        import torch

        return dict(torch.load(self.folder / "truth" / f"{step}.pt", weights_only=False))


def without_saver(log: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in log if not any(key.startswith("checkpoint/") for key in line)]


def run_jobs(jobs: Iterable[Job], ranks: int, folder: Path) -> dict[str, Done]:
    runs = train(jobs, ranks, folder, program="trainings.attached")
    return {name: Done(run.spec, run.folder, ranks) for name, run in runs.items()}  # type: ignore[arg-type]
