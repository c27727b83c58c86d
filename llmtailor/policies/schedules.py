"""Policies with a fixed schedule, which need only the number of the save and keep no state.

Also the adaptive policy, which chooses the parts that have changed most since they were last saved, and what makes a
policy from a user's spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from llmtailor.errors import Problem, UsageError
from llmtailor.model.parts import EMBED, NORM, ModelStructure, nearest
from llmtailor.policies.policy import Configured, Policy, Situation, number, whole


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
    and ``embed_tokens``.
    """

    name: ClassVar[str] = "parity"

    def choose(self, situation: Situation) -> dict[str, str]:
        half = situation.save % 2
        numbers = situation.structure.layers
        evens = {part for part, number in numbers.items() if number % 2 == 0} | {NORM, EMBED}
        why = "odd half" if half else "even half"
        return {part: why for part in situation.parts if (part in evens) != bool(half)}

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
        hand = (situation.save - 1) % self.aux_every
        chosen |= dict.fromkeys(deal(aux, situation.num_bytes, self.aux_every)[hand], "auxiliary")
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


def deal(parts: Sequence[str], num_bytes: Mapping[str, int], hands: int) -> list[list[str]]:
    """Return the parts in `hands` lists: the largest first, each added to the list with the fewest bytes so far."""
    dealt: list[list[str]] = [[] for _ in range(hands)]
    loads = [0] * hands
    for part in sorted(parts, key=lambda part: -num_bytes[part]):
        lightest = loads.index(min(loads))
        dealt[lightest].append(part)
        loads[lightest] += num_bytes[part]
    return dealt


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


@dataclass(frozen=True, slots=True)
class Update(Configured):
    """Parts by their relative change since *they* were last saved.

    ``threshold``: all parts that have changed by more than this. ``budget_bytes``: the parts that have changed most, up
    to this number of bytes per save; a part that does not fit is skipped for the next one that does. Both: of the parts
    above the threshold, those that have changed most. Of parts with the same change, the first in the model comes
    first. A part that can't be measured, or whose change is NaN, counts as changed without limit.
    """

    name: ClassVar[str] = "update"
    needs_drift: ClassVar[bool] = True
    default_max_staleness: ClassVar[int] = 20

    threshold: float | None = number(0.0, None)
    budget_bytes: int | None = whole(1, None)

    def contradictions(self) -> list[Problem]:
        if self.threshold is not None or self.budget_bytes is not None:
            return []
        fix = "give threshold (a relative change, e.g. 0.01), budget_bytes (for each save), or both"
        return [Problem(f"policy {self.name}", "it has neither a threshold nor a budget", fix)]

    def choose(self, situation: Situation) -> dict[str, str]:
        drift = {part: _drift(situation, part) for part in situation.parts}
        changed = [part for part in situation.parts if drift[part] > (self.threshold or 0.0)]
        left = math.inf if self.budget_bytes is None else self.budget_bytes
        chosen: dict[str, str] = {}
        for part in sorted(changed, key=lambda part: -drift[part]):
            if situation.num_bytes[part] <= left:
                left -= situation.num_bytes[part]
                chosen[part] = f"changed by {drift[part]:.2%}" if math.isfinite(drift[part]) else "change unknown"
        return chosen

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[str]) -> None:
        return None


def _drift(situation: Situation, part: str) -> float:
    assert situation.drift is not None, "measured for policies that need it"
    drift = situation.drift.get(part, math.inf)
    return math.inf if math.isnan(drift) else drift


POLICIES: Mapping[str, type[Full | Parity | Filter | RoundRobin | Update]] = {
    kind.name: kind for kind in (Full, Parity, Filter, RoundRobin, Update)
}
WHERE = "policy"
MEMBERS = ("name", "needs_drift", "choose", "worst_staleness", "settings")
"""The members of `Policy`"""


def make_policy(spec: str | Mapping[str, object] | Policy) -> Policy:
    """Return the policy that a spec describes.

    A spec is a name, ``parity``; a name with options, ``filter:first=2,last=2`` (a value without a name sets the first
    option: ``round_robin:4``); a mapping, ``{"name": "filter", "first": 2}``; or an object that follows `Policy`.

    Raises UsageError, with all problems, for an unknown name or option, a value out of range, or an object that is not
    a policy.
    """
    if isinstance(spec, str):
        name, _, text = spec.partition(":")
        words = [word.strip() for word in text.split(",")] if text.strip() else []
        return _make(name, [_split(word) for word in words], spec)
    if isinstance(spec, Mapping):
        title: object = spec.get("name")
        if not isinstance(title, str):
            fix = f"add 'name': {', '.join(POLICIES)}"
            raise UsageError.at(WHERE, f"the mapping {dict(spec)!r} names no policy", fix)
        return _make(title, [(key, value) for key, value in spec.items() if key != "name"], title)
    if isinstance(spec, type):
        raise UsageError.at(WHERE, f"{spec.__name__} is a class", f"make one: {spec.__name__}(...)")
    if lacking := [member for member in MEMBERS if not hasattr(spec, member)]:
        what = f"{spec!r} is not a policy: it has no {', '.join(lacking)}"
        raise UsageError.at(WHERE, what, f"give a name ({', '.join(POLICIES)}) or an object that follows Policy")
    return spec


def _split(word: str) -> tuple[str | None, object]:
    key, sign, value = word.partition("=")
    return (key.strip(), _read(value.strip())) if sign else (None, _read(word))


def _read(text: str) -> object:
    """Return the text as a number if possible, else the text, which the policy refuses with a fix."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def named_policy(spec: str) -> type[Full | Parity | Filter | RoundRobin | Update] | None:
    """Return the policy that a spec names, even if its options are invalid."""
    return POLICIES.get(spec.partition(":")[0].strip().lower().replace("-", "_"))


def _make(name: str, given: list[tuple[Any, object]], spec: str) -> Policy:
    kind = named_policy(name)
    if kind is None:
        raise UsageError.at(WHERE, f"there is no policy {name.strip()!r}", nearest(name, POLICIES))
    where = f"policy {kind.name}"
    options = {one.name: one for one in fields(kind)}
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for at, (key, value) in enumerate(given):
        option = options.get(next(iter(options), "") if key is None and at == 0 else key)
        if option is None:
            what = f"{value!r} is not an option" if key is None else f"there is no option {key!r}"
            problems.append(Problem(where, f"{what} (in {spec!r})", nearest(key or "", options)))
        elif option.name in values:
            problems.append(Problem(where, f"{option.name} is given twice (in {spec!r})", "give it once"))
        else:
            values[option.name] = _whole(value) if option.metadata["kind"] is int else value
    for option in options.values():
        if option.name not in values and option.default is MISSING:
            what = f"{option.name} is missing (in {spec!r})"
            problems.append(Problem(where, what, f"write {kind.name}:{option.name}=4"))
            values[option.name] = option.metadata["least"]
    try:
        policy = kind(**values)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    return policy


def _whole(value: object) -> object:
    """Return a float such as 2e9 as the whole number that it stands for."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
