"""The policies: fixed schedules, and `Adaptive`, which chooses by how parts have changed; what stale parts cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias

from llmtailor.balance import deal
from llmtailor.errors import Problem, UsageError, counted
from llmtailor.model.parts import EMBED, NORM, ModelStructure, Part, nearest
from llmtailor.model.precision import EXACT, Precision
from llmtailor.policies.policy import Configured, Policy, Situation, number, whole


@dataclass(frozen=True, slots=True)
class Full(Configured):
    """Every part at every save."""

    name: ClassVar[str] = "full"

    def choose(self, situation: Situation) -> dict[str, str]:
        return dict.fromkeys(situation.parts, "full")

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Rounded(Full):
    """Every part at every save: masters in fp32, Adam's moments in 8 bits. The default.

    So each save is a complete state, in half of the bytes (6.06 of 12 per param), and nothing in it is old. States of
    other optimizers stay exact.
    """

    name: ClassVar[str] = "rounded"
    precision: ClassVar[Precision] = Precision("fp32", "8bit")


@dataclass(frozen=True, slots=True)
class Parity(Configured):
    """Two halves in turn, as in the LLMTailor paper.

    Odd saves hold the odd layers with ``lm_head`` and other auxiliary parts, even saves the even layers with ``norm``
    and ``embed_tokens``. With ``aux_every=1``, every save holds all parts that are not layers: a stale embedding or
    head costs more than a stale layer (benchmarks/fidelity.md).
    """

    name: ClassVar[str] = "parity"

    aux_every: int = whole(1, 2)

    def contradictions(self) -> list[Problem]:
        if self.aux_every <= 2:
            return []
        return [Problem(f"policy {self.name}", f"aux_every is {self.aux_every}", "give 1, or 2 for the paper's halves")]

    def choose(self, situation: Situation) -> dict[str, str]:
        half = situation.save % 2
        evens = {part for part in situation.parts if part.layer is not None and part.layer % 2 == 0} | {NORM, EMBED}
        why = "odd half" if half else "even half"
        always = self.aux_every == 1
        return {
            part: why if part.layer is not None or not always else "auxiliary"
            for part in situation.parts
            if (part in evens) != bool(half) or (always and part.layer is None)
        }

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Filter(Configured):
    """The first and last layers at every save, the others less often.

    Every ``every``-th save holds one of ``groups`` shares of the other layers, in turn; a share is every ``groups``-th
    of them. Each auxiliary part is in every ``aux_every``-th save; they are distributed so that saves have about the
    same size.

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
        ends, middle, aux = self._sort(situation.structure, situation.parts)
        chosen = dict(ends)
        turn, between = divmod(situation.save, self.every)
        if not between:
            share = (turn - 1) % self.groups
            chosen |= dict.fromkeys(middle[share :: self.groups], f"share {share + 1} of {self.groups}")
        hands = deal({part: situation.num_bytes[part] for part in aux}, self.aux_every)
        chosen |= dict.fromkeys(hands[(situation.save - 1) % self.aux_every], "auxiliary")
        return chosen

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> int:
        _, middle, aux = self._sort(structure, parts)
        return max(self.every * self.groups - 1 if middle else 0, self.aux_every - 1 if aux else 0)

    def _sort(self, structure: ModelStructure, parts: Sequence[Part]) -> tuple[dict[str, str], list[Part], list[Part]]:
        """Return the layers of every save with their reasons, the other layers, and the auxiliary parts."""
        tail = structure.num_layers - self.last
        ends: dict[str, str] = {
            part: f"first {self.first}" if part.layer < self.first else f"last {self.last}"
            for part in parts
            if part.layer is not None and not self.first <= part.layer < tail
        }
        middle = [part for part in parts if part.layer is not None and part not in ends]
        return ends, middle, [part for part in parts if part.layer is None]


@dataclass(frozen=True, slots=True)
class RoundRobin(Configured):
    """``k`` groups of adjacent parts, of about the same size, one per save."""

    name: ClassVar[str] = "round_robin"

    k: int = whole(1)

    def choose(self, situation: Situation) -> dict[str, str]:
        groups = cut(situation.parts, situation.num_bytes, self.k)
        turn = (situation.save - 1) % len(groups)
        return dict.fromkeys(groups[turn], f"group {turn + 1} of {len(groups)}")

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> int:
        return min(self.k, len(parts)) - 1


@dataclass(frozen=True, slots=True)
class MomentsInTurn(RoundRobin):
    """The masters of all parts at every save; the moments of ``k`` groups of adjacent parts, one group per save.

    Stale moments cost far less than stale masters (benchmarks/fidelity.md). With ``k=4``, a save has half of the bytes
    of a full one: a third for the masters, and a quarter of the other two thirds.
    """

    name: ClassVar[str] = "moments_in_turn"
    saves_masters: ClassVar[bool] = True

    k: int = whole(1, 4)


_FRESH = (
    EXACT,
    Precision("fp32", "bf16"),
    Precision("24bit", "bf16"),
    Precision("fp32", "8bit"),
    Precision("24bit", "8bit"),
)
"""Precisions of saves that hold everything, in the order in which a budget prefers them"""
_MOST_GROUPS = 16
_IN_TURN = ((Precision("24bit", "8bit"), 4), (Precision("bf16", "8bit"), _MOST_GROUPS))
_EXACT_IN_TURN = ((Precision("fp32", "8bit"), _MOST_GROUPS),)
"""Precisions of saves that hold moments in turn, and in how many groups at most: older moments cost more than fewer
bits of masters (benchmarks/fidelity.md)"""


@dataclass(frozen=True, slots=True)
class Budget(Configured):
    """The most exact saves of ``size`` bytes per param on average, or of that share of a full save if it is at most 1.

    For AdamW with fp32 states, 12 bytes per param. A budget for fewer first rounds moments to bf16, then masters to 24
    bits, then moments to 8 bits. Below 5.1 bytes, these moments are saved in turn, and below 3.52 only 16 bits of the
    masters of the other groups.
    """

    name: ClassVar[str] = "budget"
    saves_masters: ClassVar[bool] = True

    size: float = number(0.0)
    exact: int = whole(0, 0)
    """1 if masters must stay fp32, because the forward pass multiplies with them"""

    def contradictions(self) -> list[Problem]:
        if self._fitting():
            return []
        full, least = _bytes(EXACT, 1), _bytes(*self._in_turn[-1])
        what = f"size is {self.size!r}" + (", but the fp32 masters are the weights" if self.exact else "")
        fix = f"give {math.ceil(100 * least) / 100} or more bytes per param, or a share, more than {least / full:.2g}"
        return [Problem(f"policy {self.name}", what, fix)]

    @property
    def _in_turn(self) -> tuple[tuple[Precision, int], ...]:
        return _EXACT_IN_TURN if self.exact else _IN_TURN

    def _fitting(self) -> tuple[Precision, int] | None:
        """Return the precision, and the number of groups whose moments are saved in turn."""
        size = self.size if self.size > 1 else self.size * _bytes(EXACT, 1)
        for precision in _FRESH:
            if _bytes(precision, 1) <= size and (precision.masters == EXACT.masters or not self.exact):
                return precision, 1
        for precision, most in self._in_turn:
            alone = precision.master_bytes(with_moments=False)
            if size > alone and (k := math.ceil((_bytes(precision, 1) - alone) / (size - alone))) <= most:
                return precision, k
        return None

    @property
    def _found(self) -> tuple[Precision, int]:
        fitting = self._fitting()
        assert fitting is not None, "refused when it was made"
        return fitting

    @property
    def precision(self) -> Precision:
        """Precision of the saves"""
        return self._found[0]

    def choose(self, situation: Situation) -> dict[str, str]:
        return RoundRobin(self._found[1]).choose(situation)

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> int:
        """Raises UsageError if the model has too few parts to meet the budget."""
        precision, k = self._found
        if k > len(parts):
            least = _bytes(precision, len(parts))
            what = f"size {self.size:g} needs the moments in {k} groups, but the model has {len(parts)} parts"
            raise UsageError.at(
                f"policy {self.name}", what, f"give {math.ceil(100 * least) / 100} or more bytes per param"
            )
        return k - 1

    def __str__(self) -> str:
        precision, k = self._found
        each, old = "everything", "nothing is old"
        if k > 1:
            each, old = f"one of {k} groups at a time", f"moments are up to {counted(k - 1, 'save')} old"
        rounded = f"masters in {precision.masters}, moments in {precision.moments}, of {each}"
        return f"{self.name}:{self.size:g} saves {rounded}: {_bytes(precision, k):.3g} bytes per param, and {old}"


def fitted(policy: Policy, *, weights_are_masters: bool) -> Policy:
    """Return the policy for a training whose forward pass does, or does not, multiply with the fp32 masters."""
    return replace(policy, exact=1) if isinstance(policy, Budget) and weights_are_masters else policy


def _bytes(precision: Precision, k: int) -> float:
    """Return the bytes per param of a save that holds the moments of one of ``k`` groups."""
    whole = precision.master_bytes(with_moments=True) + precision.moment_bytes
    return precision.master_bytes(with_moments=False) * (1 - 1 / k) + whole / k


def cut(parts: Sequence[Part], num_bytes: Mapping[str, int], k: int) -> list[list[str]]:
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


def _fill(parts: Sequence[Part], num_bytes: Mapping[str, int], limit: int, at_least: int) -> list[list[str]]:
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


def setbacks(expected_loss: Mapping[str, float], steps: Mapping[str, int]) -> dict[str, float]:
    """Return part -> by how many steps training falls back if this part alone is taken from its last save.

    A checkpoint in which every part is n steps old is n steps behind. Each part is responsible for a share of this, in
    proportion to what its change means for the loss; see benchmarks/fidelity.md for how near this comes.

    Args:
        expected_loss: part -> see `Situation`; parts whose change is unknown are left out of the result.
        steps: part -> the number of steps in which it has changed that much.
    """
    known = {part: loss for part, loss in expected_loss.items() if math.isfinite(loss) and steps.get(part, 0) > 0}
    a_step = math.fsum(loss / steps[part] for part, loss in known.items())
    return {part: loss / a_step for part, loss in known.items()} if a_step > 0 else {}


STALENESS = 4
"""By default, `Adaptive` saves every part at least once in as many saves as have the bytes of this number of models."""


@dataclass
class Adaptive(Configured):
    """A share of the bytes at every save: the parts that would cost most if they were left out.

    Parts are ranked by ``expected_loss / bytes * sqrt(age)`` (see `Situation`). The age makes the choice account for
    later saves, as in I. Kadota et al., "Scheduling Policies for Minimizing Age of Information in Broadcast Wireless
    Networks", 2018. Without it, small budgets let parts starve; with a higher power than the root, the parts almost
    take turns (benchmarks/fidelity.md). There is no threshold to tune.

    Later saves compensate for a save with more or fewer bytes than its share, also for parts that were added because
    they were too old.
    """

    name: ClassVar[str] = "adaptive"
    needs_drift: ClassVar[bool] = True

    share: float = number(0.0, 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._credit = 0
        """Bytes that earlier saves left unused; negative if they used more than their share"""
        self._asked = 0
        """Number of the save that was chosen last"""

    def contradictions(self) -> list[Problem]:
        if 0 < self.share <= 1:
            return []
        fix = "give the share of the bytes that a save may hold: more than 0, at most 1"
        return [Problem(f"policy {self.name}", f"share is {self.share!r}", fix)]

    @property
    def default_max_staleness(self) -> int:
        return math.ceil(STALENESS / self.share)

    def choose(self, situation: Situation) -> dict[str, str]:
        sizes = situation.num_bytes
        total = sum(sizes[part] for part in situation.parts)
        allowance = round(self.share * total)
        if self._asked and self._asked == situation.save - 1:
            saved = sum(sizes[part] for part in situation.parts if situation.last.get(part) == self._asked)
            self._credit = max(-total, min(self._credit + allowance - saved, allowance))
        self._asked = situation.save
        left = allowance + self._credit
        chosen: dict[str, str] = {}
        assert situation.expected_loss is not None, "measured for policies that need it"
        measured = {part: situation.expected_loss.get(part, math.inf) for part in situation.parts}
        cost = {part: math.inf if math.isnan(loss) else loss for part, loss in measured.items()}

        def rank(part: Part) -> tuple[float, float]:
            age = situation.age(part) if part in situation.last else math.inf
            return cost[part] * math.sqrt(age) / max(1, sizes[part]), age  # the age decides if nothing has changed

        for part in sorted(situation.parts, key=rank, reverse=True):
            if not chosen or 2 * left >= sizes[part]:  # rounded to the nearest
                left -= sizes[part]
                chosen[part] = "change unknown" if math.isinf(cost[part]) else f"costs {cost[part]:.2g}"
        return chosen

    def worst_staleness(self, structure: ModelStructure, parts: Sequence[Part]) -> None:
        return None

    def state_dict(self) -> dict[str, int]:
        return {"credit": self._credit, "asked": self._asked}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._credit, self._asked = int(state["credit"]), int(state["asked"])


AnyPolicy: TypeAlias = Full | Rounded | Parity | Filter | RoundRobin | MomentsInTurn | Budget | Adaptive
POLICIES: Mapping[str, type[AnyPolicy]] = {
    kind.name: kind for kind in (Full, Rounded, Parity, Filter, RoundRobin, MomentsInTurn, Budget, Adaptive)
}
DEFAULT_POLICY = Rounded.name
"""Of the policies with half of the bytes, the one that costs least; see benchmarks/fidelity.md"""
EXACT_POLICY = Full.name
"""The default where saves can't be rounded"""
_WHERE = "policy"


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
            raise UsageError.at(_WHERE, f"the mapping {dict(spec)!r} names no policy", fix)
        return _make(title, [(key, value) for key, value in spec.items() if key != "name"], title)
    if isinstance(spec, type):
        raise UsageError.at(_WHERE, f"{spec.__name__} is a class", f"make one: {spec.__name__}(...)")
    members = ("name", "needs_drift", "choose", "worst_staleness", "settings")
    if lacking := [member for member in members if not hasattr(spec, member)]:
        what = f"{spec!r} is not a policy: it has no {', '.join(lacking)}"
        raise UsageError.at(_WHERE, what, f"give a name ({', '.join(POLICIES)}) or an object that follows Policy")
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


def named_policy(spec: str) -> type[AnyPolicy] | None:
    """Return the policy that a spec names, even if its options are invalid."""
    return POLICIES.get(spec.partition(":")[0].strip().lower().replace("-", "_"))


def _make(name: str, given: list[tuple[Any, object]], spec: str) -> Policy:
    kind = named_policy(name)
    if kind is None:
        raise UsageError.at(_WHERE, f"there is no policy {name.strip()!r}", nearest(name, POLICIES))
    where = f"policy {kind.name}"
    options = {option.name: option for option in fields(kind)}
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
            values[option.name] = value
            if option.metadata["kind"] is int and isinstance(value, float) and value.is_integer():  # such as 2e9
                values[option.name] = int(value)
    for option in options.values():
        if option.name not in values and option.default is MISSING:
            what = f"{option.name} is missing (in {spec!r})"
            problems.append(Problem(where, what, f"write {kind.name}:{option.name}=4"))
            values[option.name] = 4  # valid for all
    try:
        policy = kind(**values)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    return policy
