"""Compares what saves of everything, rounded, and saves with old moments cost after one failure and after ten.

    python -m study.failures CACHE SETTINGS SEEDS

Old moments are tried with each way to give them a count of Adam's updates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from study.precision import Saves, Uninterrupted
from study.run import OTHER_ORDER, Cells
from study.run import SETTINGS as OF_POLICIES
from study.text import digest
from study.train import Setting, Size, State

SMALL = Size(48, 6, 128)
SETTINGS = {
    **OF_POLICIES,
    **{
        setting.name: setting
        for setting in (
            Setting("young", SMALL, "descriptions", 1e-4, 240, 6, crash=180, before=240, bf16=True),
            Setting("fast", SMALL, "sources", 4e-3, 240, 6, crash=180, bf16=True),
            Setting("lion", SMALL, "sources", 2e-3, 240, 6, crash=180, bf16=True, optimizer="lion"),
            Setting("muon", SMALL, "sources", 4e-3, 240, 6, crash=180, bf16=True, optimizer="muon"),
        )
    },
}
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Counted(Saves):
    """Saves whose old moments go on with a count of updates that is chosen when they are composed."""

    count: str = "newest"
    """``newest``: the step of the save; ``rebase``: the same, and moments scaled to it; ``oldest``: the least of all
    params, as in a group with one count; ``own``: for each param that of its moments"""

    def compose(self, states: Mapping[int, State], at: int) -> State:
        state, newest = super().compose(states, at), max(states[at].adam.values())
        if self.count == "own":
            return state
        if self.count == "oldest":
            return replace(state, adam=dict.fromkeys(state.adam, min(state.adam.values())))
        params = state.params
        if self.count == "rebase":
            params = {name: _rebased(values, state.adam[name], newest) for name, values in params.items()}
        return State(at, params, dict.fromkeys(state.adam, newest))


def _rebased(
    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor], count: float, newest: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return moments that give, with the newest count, the update that they give with their own."""
    mean, square = ((1 - beta**newest) / (1 - beta**count) for beta in BETAS)
    return values[0], values[1] * mean, values[2] * square


CANDIDATES: Mapping[str, Saves] = {
    "fp32 masters, 8-bit moments": Saves("fp32", "8bit"),
    "24-bit masters, 8-bit moments": Saves("24bit", "8bit"),
    "moments of a quarter": Counted("fp32", "fp32", 4),
    "moments of a quarter, rebased": Counted("fp32", "fp32", 4, count="rebase"),
    "moments of a quarter, least count": Counted("fp32", "fp32", 4, count="oldest"),
    "moments of a quarter, own counts": Counted("fp32", "fp32", 4, count="own"),
    "16-bit differences, 8-bit moments of a third": Counted("16bit", "8bit", 3),
}


FEW = ("fp32 masters, 8-bit moments", "moments of a quarter", "moments of a quarter, rebased", OTHER_ORDER)
"""Tried with every seed; the others with the first one"""


def failures(setting: Setting, number: int) -> list[int]:
    """Return the steps after which a training fails: at every second save, or at each where there are too few."""
    between = setting.every * (2 if setting.crash > 2 * number * setting.every else 1)
    return [setting.crash - between * back for back in reversed(range(number))]


def run_seed(setting: Setting, number: int, seed: int, cells: Cells) -> None:
    """Run the cells of a seed that are not there yet."""
    text, key = digest(setting.text, *(["sources"] if setting.before else [])), f"{setting.name} x{number}"
    cells.drop_others(text, key, seed)
    names = FEW if seed else (*CANDIDATES, OTHER_ORDER)
    names = names if setting.optimizer == "adamw" else (FEW[0], OTHER_ORDER)  # without a second moment that is a sum
    missing = [name for name in names if not cells.has(key, seed, name)]
    if not missing:
        return
    whole = Uninterrupted.run(setting, seed)
    training, steps = whole.training, failures(setting, number)
    params = {name: values[0] for name, values in whole.states[setting.crash].params.items()}
    for name in missing:
        training.order = seed + 1000 * (name == OTHER_ORDER)
        found: dict[str, Any] = {"setting": key, "seed": seed, "name": name, "text": text}
        if saves := CANDIDATES.get(name):
            found |= {"bytes": saves.bytes_per_param(params), **whole.fail(saves.compose, steps)}
        else:
            found |= whole.fail(lambda states, step: states[step], steps[:1])
        cells.put(found, key, seed, name)
        print(
            key, seed, name, {one: f"{value:.3g}" for one, value in found.items() if one in ("gap", "kl")}, flush=True
        )


def main() -> None:
    torch.set_num_threads(1)
    cells = Cells(Path(sys.argv[1]) / "failures")
    for seed in range(*map(int, sys.argv[3].split("-"))):
        for name in sys.argv[2].split(","):
            for number in (1, 10):
                run_seed(SETTINGS[name], number, seed, cells)


if __name__ == "__main__":
    main()
