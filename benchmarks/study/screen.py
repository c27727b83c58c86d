"""Compares ways to rank parts, by the gap right after each failure of one training. Minutes, not hours.

python -m study.screen [SEED]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from llmtailor.policies import Adaptive, Policy, Situation, make_policy
from study.composites import Left, ask, compose, parts_of
from study.train import Setting, Size, State, Training

SETTING = Setting("screen", Size(64, 8, 176), "sources", 2e-3, 400, 20, crash=300)
_FIRST = 120
"""The first failure"""

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Measure = Callable[[Triple, Triple], float]
"""(weight, exp_avg, exp_avg_sq of a param now; as of its last save) -> what its change costs"""
MEASURES: dict[str, Measure] = {
    "age": lambda now, saved: float(now[0].numel()),
    "squared change": lambda now, saved: float((now[0] - saved[0]).square().sum()),
    "exp_avg x change": lambda now, saved: abs(float((now[1] * (now[0] - saved[0])).sum())),
    "exp_avg_sq x squared change": lambda now, saved: float((now[2] * (now[0] - saved[0]).square()).sum()),
    "root of exp_avg_sq x change": lambda now, saved: float((now[2].sqrt() * (now[0] - saved[0]).abs()).sum()),
}
POWERS = (0.0, 0.5, 1.0)
"""Of the age"""


class Ranked(Adaptive):
    """`Adaptive` with another measure, and another power of the age."""

    def __init__(self, share: float, measure: Measure, power: float, states: dict[int, State], part_of: dict[str, str]):
        super().__init__(share)
        self._measured = measure, states, part_of
        self._power = power

    def choose(self, situation: Situation) -> dict[str, str]:
        measure, states, part_of = self._measured
        steps = sorted(states)
        if steps[situation.save : situation.save + 1] != [situation.step]:  # check_policy invents saves
            return super().choose(situation)
        cost = dict.fromkeys(situation.parts, 0.0)
        for param, now in states[situation.step].params.items():
            part = part_of[param]
            cost[part] += measure(now, states[steps[situation.last[part]]].params[param])
        for part in cost:  # Adaptive multiplies by the root of the age
            cost[part] *= situation.age(part) ** (self._power - 0.5)
        return super().choose(replace(situation, expected_loss=cost))


def candidates(states: dict[int, State], part_of: dict[str, str]) -> Iterator[tuple[str, Policy]]:
    for spec in ("parity", "parity:aux_every=1", "filter", "round_robin:4", "adaptive:0.5", "adaptive:0.25"):
        yield spec, make_policy(spec)
    for share in (0.5, 0.25):
        for name, measure in MEASURES.items():
            for power in POWERS if name != "age" else (1.0,):
                yield f"{name} x age^{power:g}, {share:g}", Ranked(share, measure, power, states, part_of)


def gaps(left: Left, training: Training, states: dict[int, State], part_of: dict[str, str]) -> Sequence[float]:
    found = []
    for step in (one for one in sorted(states) if _FIRST <= one < SETTING.steps):
        losses = []
        for held in (dict.fromkeys(part_of.values(), step), left.held[step]):
            training.load(compose(states, {param: held[part] for param, part in part_of.items()}, step))
            losses.append(training.loss())
        found.append(losses[1] - losses[0])
    return found


def main() -> None:
    torch.set_num_threads(1)
    training = Training(SETTING, seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    states: dict[int, State] = {}
    training.run_to(
        SETTING.steps, lambda step: states.update({step: training.state()}) if step % SETTING.every == 0 else None
    )
    model = parts_of(training)
    for name, policy in candidates(states, model.part_of):
        left = ask(policy, model, states)
        found = gaps(left, training, states, model.part_of)
        half = len(found) // 2
        print(
            f"{name:44} {left.share:.3f}  {1000 * fmean(found):+6.1f}"
            f"  ({1000 * fmean(found[:half]):+.1f}, {1000 * fmean(found[half:]):+.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
