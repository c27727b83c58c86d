"""Policies with a fixed schedule, which need only the number of the save and keep no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmtailor.balance import deal
from llmtailor.errors import Problem
from llmtailor.model.parts import EMBED, NORM, ModelStructure
from llmtailor.policies.policy import Configured, Situation, whole


@dataclass(frozen=True, slots=True)
class Full(Configured):
    """Every part at every save."""

    name: ClassVar[str] = "full"

    def choose(self, situation: Situation) -> dict[str, str]:
        return dict.fromkeys(situation.parts, "full")

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Parity(Configured):
    """Two halves in turn, as in the LLMTailor paper.

    Odd saves hold the odd layers with ``lm_head`` and other auxiliary parts, even saves the even layers with ``norm``
    and ``embed_tokens``. With ``aux_every=1``, every save holds all parts that are no layers: a stale embedding or head
    costs more than a stale layer (benchmarks/fidelity.md).
    """

    name: ClassVar[str] = "parity"

    aux_every: int = whole(1, 2)

    def contradictions(self) -> list[Problem]:
        if self.aux_every <= 2:
            return []
        return [Problem(f"policy {self.name}", f"aux_every is {self.aux_every}", "give 1, or 2 for the paper's halves")]

    def choose(self, situation: Situation) -> dict[str, str]:
        half = situation.save % 2
        numbers = situation.structure.layers
        evens = {part for part, number in numbers.items() if number % 2 == 0} | {NORM, EMBED}
        why = "odd half" if half else "even half"
        always = self.aux_every == 1
        return {
            part: why if part in numbers or not always else "auxiliary"
            for part in situation.parts
            if (part in evens) != bool(half) or (always and part not in numbers)
        }

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Filter(Configured):
    """The first and last layers at every save, the others less often.

    Every ``every``-th save holds one of ``groups`` shares of the other layers, in turn; a share is every ``groups``-th
    of them. Each auxiliary part comes at every ``aux_every``-th save; they are distributed so that saves are about
    equally large.

    The defaults are the LLMTailor paper's schedule. `aux_every` 3 matches the checkpoint sizes that it reports
    best: docs/policies.md has the calculation.
    """

    name: ClassVar[str] = "filter"

    first: int = whole(0, 2)
    last: int = whole(0, 2)
    every: int = whole(1, 5)
    groups: int = whole(1, 2)
    aux_every: int = whole(1, 3)

    def choose(self, situation: Situation) -> dict[str, str]:
        ends, rest, aux = self._sort(situation.structure, situation.parts)
        chosen = dict(ends)
        turn, between = divmod(situation.save, self.every)
        if not between:
            share = (turn - 1) % self.groups
            chosen |= dict.fromkeys(rest[share :: self.groups], f"share {share + 1} of {self.groups}")
        hands = deal({part: situation.num_bytes[part] for part in aux}, self.aux_every)
        chosen |= dict.fromkeys(hands[(situation.save - 1) % self.aux_every], "auxiliary")
        return chosen

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> int:
        _, rest, aux = self._sort(structure, parts)
        return max(self.every * self.groups - 1 if rest else 0, self.aux_every - 1 if aux else 0)

    def _sort(self, structure: ModelStructure, parts: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
        """Return the layers of every save with their reasons, the other layers, and the auxiliary parts."""
        numbers = structure.layers
        tail = structure.num_layers - self.last
        ends = {
            part: f"first {self.first}" if numbers[part] < self.first else f"last {self.last}"
            for part in parts
            if part in numbers and not self.first <= numbers[part] < tail
        }
        rest = [part for part in parts if part in numbers and part not in ends]
        return ends, rest, [part for part in parts if part not in numbers]


@dataclass(frozen=True, slots=True)
class RoundRobin(Configured):
    """``k`` groups of adjacent parts, about equally large, one per save."""

    name: ClassVar[str] = "round_robin"

    k: int = whole(1)

    def choose(self, situation: Situation) -> dict[str, str]:
        groups = cut(situation.parts, situation.num_bytes, self.k)
        turn = (situation.save - 1) % len(groups)
        return dict.fromkeys(groups[turn], f"group {turn + 1} of {len(groups)}")

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> int:
        return min(self.k, len(parts)) - 1


@dataclass(frozen=True, slots=True)
class MomentsInTurn(RoundRobin):
    """The masters of all parts at every save; the moments of ``k`` groups of adjacent parts, one group per save.

    Old moments cost far less than old masters (benchmarks/fidelity.md). With ``k=4``, a save has half of the bytes of a
    full one: a third for the masters, and a quarter of the other two thirds.
    """

    name: ClassVar[str] = "moments_in_turn"
    saves_masters: ClassVar[bool] = True

    k: int = whole(1, 4)


def cut(parts: Sequence[str], num_bytes: Mapping[str, int], k: int) -> list[list[str]]:
    """Return the parts in min(k, len(parts)) runs, the largest of which has as few bytes as possible."""
    k = min(k, len(parts))
    low, high = max(num_bytes[part] for part in parts), sum(num_bytes[part] for part in parts)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(parts, num_bytes, middle, 1)) <= k:
            high = middle
        else:
            low = middle + 1
    return _fill(parts, num_bytes, low, k)


def _fill(parts: Sequence[str], num_bytes: Mapping[str, int], limit: int, at_least: int) -> list[list[str]]:
    """Return the parts in runs of at most `limit` bytes: as few as possible, but no fewer than `at_least`."""
    runs: list[list[str]] = [[]]
    load = 0
    for at, part in enumerate(parts):
        is_short = len(parts) - at <= at_least - len(runs)
        if load + num_bytes[part] > limit or is_short:
            runs.append([])
            load = 0
        runs[-1].append(part)
        load += num_bytes[part]
    return runs
