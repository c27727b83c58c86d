"""Runs the cells of the study: a training that fails, is composed from what a policy has saved, and goes on to its end.

Every cell is kept in a file, so that a stopped study goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from llmtailor.policies import make_policy
from study.composites import Left, ask, composite, parts_of
from study.text import digest
from study.train import Setting, Size, State, Training

DEEP, WIDE = Size(48, 12, 128), Size(96, 6, 256)
SETTINGS = {
    one.name: one
    for one in (
        Setting("deep", DEEP, "sources", 2e-3, 320, 16, crash=240),
        Setting("wide", WIDE, "sources", 2e-3, 320, 16, crash=240),
        Setting("experts", Size(48, 4, 64, experts=8), "sources", 2e-3, 320, 16, crash=240),
        Setting("continued", WIDE, "descriptions", 2e-4, 200, 10, crash=150, before=300),
    )
}
POLICIES = (
    "parity",
    "parity:aux_every=1",
    "filter",
    "filter:aux_every=1",
    "round_robin:4",
    "adaptive:0.67",
    "adaptive:0.5",
    "adaptive:0.25",
    "moments_in_turn:4",
    "moments_in_turn:8",
)
LIKE_FILTER = "adaptive, filter's bytes"
OTHER_ORDER, SHORTER = "other order of data", "shorter"
"""Rivals that are no policies: the exact state continued with other batches; a whole training that has fewer steps"""


class Cells:
    """Results by key, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, *key: object) -> Path:
        return self.folder / ("_".join(str(one).replace(" ", "-").replace(":", "-") for one in key) + ".json")

    def has(self, *key: object) -> bool:
        return self.path(*key).exists()

    def put(self, content: Mapping[str, Any], *key: object) -> None:
        path = self.path(*key)
        path.with_suffix(".new").write_text(json.dumps(content, indent=1))
        path.with_suffix(".new").replace(path)

    def drop_others(self, text: int, *key: object) -> None:
        """Remove the cells of a seed that were made with another text, which nothing can be compared with."""
        for path in self.folder.glob(self.path(*key, "*").name):
            if json.loads(path.read_text()).get("text") != text:
                path.unlink()

    def all(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("*.json")):
            yield json.loads(path.read_text())


def rivals() -> list[str]:
    return [*POLICIES, LIKE_FILTER, OTHER_ORDER]


def run_seed(setting: Setting, seed: int, cells: Cells) -> None:
    """Run the cells of a seed that are not there yet."""
    text = digest(setting.text, *(["sources"] if setting.before else []))
    cells.drop_others(text, setting.name, seed)
    missing = [name for name in rivals() if not cells.has(setting.name, seed, name)]
    is_shorter_too = not cells.has(setting.name, seed, SHORTER)
    if not missing and not is_shorter_too:
        return
    states: dict[int, State] = {}
    looks = setting.looks()
    losses: dict[int, float] = {}

    def keep(step: int) -> None:
        if step % setting.every == 0:
            states[step] = training.state()
        if step in looks:
            losses[step] = training.loss()

    training = Training(setting, seed)
    training.run_to(setting.steps, keep)
    end = training.loss()
    model = parts_of(training)
    common = {"setting": setting.name, "seed": seed, "end": end, "losses": losses, "text": text}
    left: dict[str, Left] = {}

    def saves_of(name: str) -> Left:
        if name not in left:
            spec = f"adaptive:{saves_of('filter').share:.3f}" if name == LIKE_FILTER else name
            left[name] = ask(make_policy(spec), model, states)
        return left[name]

    for name in missing:
        cell: dict[str, Any] = {**common, "name": name}
        if name == OTHER_ORDER:
            training.load(states[setting.crash])
            training.order = seed + 1000
        else:
            saves = saves_of(name)
            now = {}
            for step in looks:
                training.load(composite(saves, model, states, step))
                now[step] = training.loss() - losses[step]
            cell |= {
                "share": saves.share,
                "largest": max(saves.num_bytes) / saves.full,
                "oldest": {step: (step - min(saves.held[step].values())) // setting.every for step in looks},
                "now": now,
            }
            if not saves.has_masters:  # of moments alone there is no estimate
                cell["expected"] = {step: saves.expected[step] for step in looks}
                cell["rate"] = {step: saves.rate[step] for step in looks}
            training.load(composite(saves, model, states, setting.crash))
            training.order = seed
        training.run_to(setting.steps)
        cell["gap"] = training.loss() - end
        cells.put(cell, setting.name, seed, name)
        print(setting.name, seed, name, f"{cell['gap']:+.4f}", cell.get("now"), flush=True)
    if is_shorter_too:
        fewer = setting.shorter()
        other = Training(fewer, seed)
        other.run_to(fewer.steps)
        cell = {**common, "name": SHORTER, "steps": setting.steps - fewer.steps, "gap": other.loss() - end}
        cells.put(cell, setting.name, seed, SHORTER)


def main() -> None:
    torch.set_num_threads(1)
    cells = Cells(Path(sys.argv[1]))
    for seed in range(*map(int, sys.argv[3].split("-"))):
        for name in sys.argv[2].split(","):
            run_seed(SETTINGS[name], seed, cells)


if __name__ == "__main__":
    main()
