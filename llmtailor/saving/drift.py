"""Measures how far each part has moved since it was last saved, and what that means for the loss, from a sample.

A sample of each rank's masters is kept in fp32: at least `LEAST` elements of each fragment, one in 1021 of large ones.
Small fragments are kept whole.

If the weights w of a part are replaced by saved ones, the loss changes by about ``sum(g * (saved - w))``, where g are
gradients. These change from batch to batch, so ``sum(sqrt(exp_avg_sq) * |w - saved|)`` is measured instead: Adam's
debiased ``exp_avg_sq`` is the mean of their squares. benchmarks/fidelity.md compares it with other measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from llmtailor.model.states import EXP_AVG_SQ, MASTER
from llmtailor.saving.training import Fragment, Training

STRIDES = (3, 7, 13, 31, 61, 127, 251, 509, 1021)
"""Primes, so that a sample has elements of all columns of a matrix"""
LEAST = 1024
"""A sample has at least this number of elements. It has few more up to the largest stride, because each costs a read
from memory."""
WHOLE = 4096
"""Fragments with at most this number of elements are kept whole."""


Sums = dict[str, tuple[float, float, float]]
"""Part -> the sum of squares of its change, that of its size, and its expected loss"""
Samples = dict[tuple[str, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Change:
    """What was measured of the parts since each was last saved."""

    drift: Mapping[str, float] = field(default_factory=dict)
    """Part -> |w - saved| / |saved|"""
    expected_loss: Mapping[str, float] = field(default_factory=dict)
    """Part -> see `policies.Situation`"""


def change_of(ranks: Sequence[Sums]) -> Change:
    """Return the change of every recorded part from the sums of all ranks.

    Without ``exp_avg_sq`` (Lion), the relative change stands for the expected loss.
    """
    drift, expected = {}, {}
    for part in sorted({part for sums in ranks for part in sums}):
        sums = [one.get(part, (0.0, 0.0, 0.0)) for one in ranks]
        moved, size, weighed = (math.fsum(one[at] for one in sums) for at in range(3))
        drift[part] = math.sqrt(moved / size) if size else math.inf if moved else 0.0
        expected[part] = weighed
    if not any(expected.values()):
        expected = dict(drift)
    return Change(drift, expected)


class Drift:
    """Samples of the masters when they were last saved, on the same device."""

    def __init__(self, part_of: Mapping[str, str]) -> None:
        self.part_of = part_of
        self._kept: Samples = {}

    def samples(self, masters: Iterable[Fragment], parts: Iterable[str]) -> Samples:
        """Return samples of the masters of these parts."""
        wanted = set(parts)
        return {
            (one.param, one.begin): _sample(one.tensor).float().clone()
            for one in masters
            if self.part_of[one.param] in wanted
        }

    def remember(self, samples: Samples) -> None:
        """Record what was sampled as saved."""
        self._kept.update(samples)

    def measure(self, training: Training) -> Sums:
        """Return this rank's part of the measurement of a training, which has moments."""
        fragments = training.fragments(self.part_of.keys())
        return self.sums(fragments, bias_correction(training.optimizers()))

    def sums(self, fragments: Iterable[Fragment], correction: float) -> Sums:
        """Return this rank's part of the measurement, for each recorded part.

        Args:
            fragments: masters and moments of the trained params, as `Training.fragments` yields them.
            correction: what ``exp_avg_sq`` is divided by; see `bias_correction`.
        """
        mine: Sums = {}
        for param, found in self._squares(fragments):
            before = mine.get(self.part_of[param], (0.0, 0.0, 0.0))
            moved, size, weighed = (one + other for one, other in zip(before, found, strict=True))
            mine[self.part_of[param]] = moved, size, weighed
        return {part: (moved, size, weighed / math.sqrt(correction)) for part, (moved, size, weighed) in mine.items()}

    def _squares(self, fragments: Iterable[Fragment]) -> Iterator[tuple[str, list[float]]]:
        found_at: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        for one in fragments:
            if one.kind in (MASTER, EXP_AVG_SQ):
                found_at.setdefault((one.param, one.begin), {})[one.kind] = one.tensor
        known = [(at, states) for at, states in found_at.items() if at in self._kept]
        by_device: dict[torch.device, list[tuple[tuple[str, int], dict[str, torch.Tensor]]]] = {}
        for at, states in known:
            by_device.setdefault(self._kept[at].device, []).append((at, states))
        for own in by_device.values():
            kept = [self._kept[at] for at, _ in own]
            masters = [_sample(states[MASTER]).float() for _, states in own]
            squares = [states.get(EXP_AVG_SQ) for _, states in own]
            roots = torch._foreach_sqrt(
                [
                    torch.zeros_like(old) if one is None else _sample(one).float()
                    for old, one in zip(kept, squares, strict=True)
                ]
            )
            change = torch._foreach_sub(masters, kept)
            norms = [torch._foreach_norm(change), torch._foreach_norm(kept)]
            norms.append(torch._foreach_norm(torch._foreach_mul(roots, change), 1))
            # one transfer, because each waits for all work of the device
            moved, size, weighed = torch.stack([torch.stack(of_kind) for of_kind in norms]).tolist()
            for number, (at, states) in enumerate(own):
                every = states[MASTER].numel() / max(1, kept[number].numel())  # elements per sampled one
                yield at[0], [moved[number] ** 2 * every, size[number] ** 2 * every, weighed[number] * every]


def bias_correction(optimizers: Iterable[Any]) -> float:
    """Return ``1 - beta2**step``, Adam's bias correction of ``exp_avg_sq``; 1 for another optimizer.

    Of several params the first one's step: on a GPU, each that is read is a transfer.
    """
    for optimizer in optimizers:
        # under ZeRO-3, groups do not list what the states belong to
        states = chain(optimizer.state.values(), optimizer.param_groups)
        step = next((float(one["step"]) for one in states if "step" in one), 0.0)
        betas = next((group["betas"] for group in optimizer.param_groups if len(group.get("betas", ())) == 2), None)
        if step and betas:
            return 1.0 - math.pow(betas[1], step)
    return 1.0


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    numel = tensor.numel()
    return tensor if numel <= WHOLE else tensor[:: max(one for one in STRIDES if one * LEAST <= numel)]
