"""Measures how far each part has moved since it was last saved, from a sample of the masters.

Every `STRIDE`-th element of each rank's fragment is kept in fp32: 1/16 byte per param. Small fragments are kept whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from llmtailor.saving.training import Fragment

STRIDE = 64
WHOLE = 4096
"""Fragments with at most this number of elements are kept whole: few elements make a poor sample."""


Sums = dict[str, tuple[float, float]]
Samples = dict[tuple[str, int], torch.Tensor]


def relative_change(ranks: Sequence[Sums]) -> dict[str, float]:
    """Return |w - saved| / |saved| of every recorded part from the sums of all ranks."""
    drift = {}
    for part in sorted({part for sums in ranks for part in sums}):
        sums = [one.get(part, (0.0, 0.0)) for one in ranks]
        moved, size = math.fsum(one[0] for one in sums), math.fsum(one[1] for one in sums)
        drift[part] = math.sqrt(moved / size) if size else math.inf if moved else 0.0
    return drift


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

    def sums(self, masters: Iterable[Fragment]) -> Sums:
        """Return this rank's part of the measurement: for each recorded part, squares of its change and of its size."""
        mine: Sums = {}
        for part, moved, size in self._squares(masters):
            before = mine.get(part, (0.0, 0.0))
            mine[part] = (before[0] + moved, before[1] + size)
        return mine

    def _squares(self, masters: Iterable[Fragment]) -> Iterator[tuple[str, float, float]]:
        for one in masters:
            kept = self._kept.get((one.param, one.begin))
            if kept is not None:
                sample = _sample(one.tensor).float()
                weight = one.tensor.numel() / max(1, kept.numel())  # elements per sampled one
                moved, size = (sample - kept).square().sum().item(), kept.square().sum().item()
                yield self.part_of[one.param], moved * weight, size * weight


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.numel() <= WHOLE else tensor[::STRIDE]
