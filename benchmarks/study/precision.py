"""Compares saves with fewer bytes per param: masters and moments of fewer bits, and moments in turn.

    python -m study.precision CACHE SETTINGS SEEDS

SETTINGS are names in `SETTINGS`, each with a number of failures: ``tuned:1,low:10``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from llmtailor.policies import make_policy
from llmtailor.policies.schedules import cut
from study.composites import ask, composite, parts_of
from study.run import OTHER_ORDER, SHORTER, Cells
from study.text import digest
from study.train import Setting, Size, State, Training

SIZE = Size(64, 4, 176)
SETTINGS = {
    one.name: one
    for one in (
        Setting("tuned", SIZE, "sources", 2e-3, 640, 20, crash=480),
        Setting("1e-5", SIZE, "descriptions", 1e-5, 300, 10, crash=200, before=640, bf16=True),
        Setting("1e-6", SIZE, "descriptions", 1e-6, 300, 10, crash=200, before=640, bf16=True),
    )
}
REVERSED = "batches reversed"


def to_24_bits(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 numbers without their last 8 bits. A last bit is set if any dropped one was, so that a second
    rounding, to bf16 or fp16, gives what it gives for the original."""
    bits = x.view(torch.int32)
    return (bits & ~0xFF | ((bits & 0xFF) != 0).int() << 8).view(torch.float32)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def to_8_bits(x: torch.Tensor, block: int = 128, *, is_square: bool = False, least: int = 1) -> torch.Tensor:
    """Return numbers rounded to 8 bits and a scale per block of elements.

    Squares are rounded as their roots, and one above zero to ``least`` at least: a second moment of zero makes Adam's
    step as large as epsilon allows.
    """
    rows = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)
    values = rows.sqrt() if is_square else rows
    largest = 255 if is_square else 127
    scale = values.abs().amax(1, keepdim=True) / largest
    codes = torch.where(scale > 0, values / scale, 0).round()
    if is_square:
        codes = torch.where(values > 0, codes.clamp(min=least), codes)
    decoded = codes * scale
    return (decoded.square() if is_square else decoded).flatten()[: x.numel()].view_as(x)


def under(weight: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return a master for a bf16 weight, given the master of an earlier step, such that it rounds to the weight.

    That is the earlier master if it does, else the nearest number that does, if the weight has moved by one step of
    bf16, else the weight.
    """
    before = master.bfloat16()
    middle = (weight.float() + before.float()) / 2
    edge = torch.where(middle.bfloat16() == weight, middle, torch.nextafter(middle, weight.float()))  # ties are even
    is_next = torch.nextafter(before, weight) == weight
    return torch.where(before == weight, master, torch.where(is_next, edge, weight.float()))


def numbers_of(master: torch.Tensor) -> torch.Tensor:
    """Number masters of 24 bits in the order of their values."""
    bits = to_24_bits(master).view(torch.int32)
    return torch.where(bits < 0, -((bits & 0x7FFFFFFF) >> 8), bits >> 8)


def differing(master: torch.Tensor, before: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Return what is left of masters if blocks hold differences of 16 bits from earlier masters, or bf16 weights."""
    off = torch.nn.functional.pad((numbers_of(master) - numbers_of(before)).flatten(), (0, -master.numel() % block))
    fits = (off.view(-1, block).abs() < 1 << 15).all(1, keepdim=True).expand(-1, block)
    return torch.where(
        fits.flatten()[: master.numel()].view_as(master), to_24_bits(master), under(master.bfloat16(), before)
    )


@dataclass(frozen=True)
class Saves:
    """All masters at each save, and moments of one of ``k`` groups of params in turn."""

    masters: str
    """``fp32``, ``24bit``, or ``bf16`` and ``16bit``: then the 24 bits of the masters are saved with the moments, and
    each other time bf16 weights, or differences of 16 bits from the 24 where these fit"""
    moments: str
    """``fp32``, ``bf16``, ``8bit``, ``none``: those of a new optimizer, or ``zero``: none, but Adam's step"""
    k: int = 1
    block: int = 128
    least: int = 1

    def groups(self, params: Mapping[str, torch.Tensor]) -> list[list[str]]:
        return cut([*params], {name: one.numel() for name, one in params.items()}, self.k)

    def bytes_per_param(self, params: Mapping[str, torch.Tensor]) -> float:
        """Return the mean size of a save."""
        total = sum(one.numel() for one in params.values())
        scales = sum(2 * 4 * -(-one.numel() // self.block) for one in params.values()) / total
        moments = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + scales, "none": 0.0, "zero": 0.0}[self.moments]
        every, in_turn = {"fp32": (4, 0), "24bit": (3, 0), "bf16": (2, 1), "16bit": (65 / 32, 31 / 32)}[self.masters]
        return every + (in_turn + moments) / len(self.groups(params))

    def compose(self, states: Mapping[int, State], at: int) -> State:
        """Return what the saves until a step make; the first is complete."""
        steps = sorted(step for step in states if step <= at)
        groups = self.groups({name: values[0] for name, values in states[at].params.items()})
        params, adam = {}, {}
        for number, names in enumerate(groups):
            saves = [save for save in range(1, len(steps)) if (save - 1) % len(groups) == number]
            held = steps[saves[-1]] if saves else steps[0]
            for name in names:
                weight = states[at].params[name][0]
                master, mean, square = states[held].params[name]
                params[name] = (self._master(weight, master), *self._decoded(mean, square))
                adam[name] = 0.0 if self.moments == "none" else states[held].adam[name]
        return State(at, params, adam)

    def _master(self, weight: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        if self.masters == "fp32":
            return weight
        if self.masters == "16bit":
            return differing(weight, to_24_bits(held))
        return to_24_bits(weight) if self.masters == "24bit" else under(weight.bfloat16(), to_24_bits(held))

    def _decoded(self, mean: torch.Tensor, square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.moments == "8bit":
            squares = to_8_bits(square, self.block, is_square=True, least=self.least)
            return to_8_bits(mean, self.block), squares
        change: Callable[[torch.Tensor], torch.Tensor] = {
            "fp32": torch.Tensor.clone,
            "bf16": to_bf16,
            "none": torch.zeros_like,
            "zero": torch.zeros_like,
        }[self.moments]
        return change(mean), change(square)


CANDIDATES = {
    f"{one.masters} {one.moments} {one.k}": one
    for one in (
        Saves("fp32", "fp32", 4),
        Saves("24bit", "8bit"),
        Saves("fp32", "fp32", 8),
        Saves("24bit", "fp32", 8),
        Saves("fp32", "zero"),
        Saves("24bit", "none"),
        Saves("24bit", "8bit", 2),
        Saves("24bit", "8bit", 4),
        Saves("24bit", "bf16", 8),
        Saves("24bit", "8bit", 8),
        Saves("24bit", "bf16", 16),
        Saves("24bit", "8bit", 16),
        Saves("16bit", "8bit", 2),
        Saves("16bit", "8bit", 3),
        Saves("16bit", "8bit", 4),
        Saves("16bit", "8bit", 8),
        Saves("bf16", "8bit", 8),
    )
}
NAMES = ("parity", *CANDIDATES, OTHER_ORDER, REVERSED)
FEW = (
    "parity",
    "fp32 fp32 4",
    "fp32 fp32 8",
    "24bit 8bit 1",
    "24bit 8bit 2",
    "24bit 8bit 4",
    "24bit 8bit 8",
    "24bit 8bit 16",
    "16bit 8bit 2",
    "16bit 8bit 3",
    "16bit 8bit 4",
    "16bit 8bit 8",
    "bf16 8bit 8",
    "fp32 zero 1",
    "24bit none 1",
    OTHER_ORDER,
)
"""For trainings that fail more than once"""


def failures(setting: Setting, number: int) -> list[int]:
    """Return the steps after which a training fails, the last being that of the setting: at each second save, or half
    of the training apart if there are two."""
    between = setting.crash // 2 if number == 2 else 2 * setting.every
    return [setting.crash - between * back for back in reversed(range(number))]


@dataclass(frozen=True)
class Uninterrupted:
    """A training without failures."""

    training: Training
    states: Mapping[int, State]
    """At each save, and at the end"""
    losses: Mapping[int, float]
    predictions: torch.Tensor

    @classmethod
    @lru_cache(1)
    def run(cls, setting: Setting, seed: int) -> Uninterrupted:
        states: dict[int, State] = {}
        losses: dict[int, float] = {}

        def keep(step: int) -> None:
            if step % setting.every == 0:
                states[step] = training.state()
                losses[step] = training.loss()

        training = Training(setting, seed)
        training.run_to(setting.steps, keep)
        return cls(training, states, losses, training.predictions())

    def fail(self, compose: Callable[[Mapping[int, State], int], State], steps: Sequence[int]) -> dict[str, float]:
        """Fail after some steps, each time going on from what the saves make, and compare the ends."""
        setting, training = self.training.setting, self.training
        states = {step: state for step, state in self.states.items() if step <= steps[0]}
        now = math.nan

        def keep(step: int) -> None:
            if step % setting.every == 0:
                states[step] = training.state()

        for step, until in pairwise([*steps, setting.steps]):
            training.load(compose(states, step))
            now = training.loss() - self.losses[step]
            training.run_to(until, keep)
        return {"now": now, **self.compared(steps[0])}

    def compared(self, since: int) -> dict[str, float]:
        """Return how the training differs from the uninterrupted one at the end, having been apart since a step."""
        steps = self.training.setting.steps
        ends = [_masters(one) for one in (self.training.state(), self.states[steps], self.states[since])]
        mine = self.training.predictions()
        return {
            "gap": self.training.loss() - self.losses[steps],
            "distance": float((ends[0] - ends[1]).norm() / ends[1].norm()),
            "moved": float((ends[2] - ends[1]).norm() / ends[1].norm()),
            "kl": float((self.predictions.exp() * (self.predictions - mine)).sum(-1).mean()),
        }


def _masters(state: State) -> torch.Tensor:
    return torch.cat([values[0].flatten() for values in state.params.values()]).double()


def run_seed(setting: Setting, number: int, seed: int, cells: Cells) -> None:
    """Run the cells of a seed that are not there yet."""
    text, key = digest(setting.text, *(["sources"] if setting.before else [])), f"{setting.name} x{number}"
    cells.drop_others(text, key, seed)
    names = (*NAMES, SHORTER) if number == 1 else FEW
    missing = [name for name in names if not cells.has(key, seed, name)]
    if not missing:
        return
    whole = Uninterrupted.run(setting, seed)
    training, steps = whole.training, failures(setting, number)
    model, params = parts_of(training), {name: values[0] for name, values in whole.states[setting.crash].params.items()}
    parity = ask(make_policy("parity"), model, whole.states)
    for name in missing:
        training.order, training.is_reversed = seed + 1000 * (name == OTHER_ORDER), name == REVERSED
        common = {"setting": key, "seed": seed, "name": name, "text": text, "end": whole.losses[setting.steps]}
        saves = CANDIDATES.get(name)
        found: dict[str, Any]
        if saves:
            found = {"bytes": saves.bytes_per_param(params), **whole.fail(saves.compose, steps)}
        elif name == "parity":
            found = {"bytes": 12 * parity.share}
            found |= whole.fail(lambda states, step: composite(parity, model, states, step), steps)
        elif name == SHORTER:
            other = Training(setting.shorter(), seed)
            other.run_to(other.setting.steps)
            found = {"steps": setting.steps - other.setting.steps, "gap": other.loss() - common["end"]}
        else:
            found = whole.fail(lambda states, step: states[step], steps[:1])
        cells.put({**common, **found}, key, seed, name)
        print(key, seed, name, {one: f"{value:.3g}" for one, value in found.items()}, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    cells = Cells(Path(sys.argv[1]) / "precision")
    for seed in range(*map(int, sys.argv[3].split("-"))):
        for word in sys.argv[2].split(","):
            name, _, number = word.partition(":")
            run_seed(SETTINGS[name], int(number), seed, cells)


if __name__ == "__main__":
    main()
