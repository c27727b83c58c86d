"""Makes a policy from a user's spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeAlias

from llmtailor.errors import Problem, UsageError
from llmtailor.model.parts import nearest
from llmtailor.policies.by_change import Adaptive
from llmtailor.policies.policy import Policy
from llmtailor.policies.schedules import Filter, Full, MomentsInTurn, Parity, RoundRobin

AnyPolicy: TypeAlias = Full | Parity | Filter | RoundRobin | MomentsInTurn | Adaptive
POLICIES: Mapping[str, type[AnyPolicy]] = {
    kind.name: kind for kind in (Full, Parity, Filter, RoundRobin, MomentsInTurn, Adaptive)
}
REMOVED = {"update": "use adaptive, which loses less at the same bytes"}
"""Policies that llmtailor had and has no more: what to use instead"""
DEFAULT_POLICY = MomentsInTurn.name
"""Half of the bytes at the least cost; see benchmarks/fidelity.md"""
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


def named_policy(spec: str) -> type[AnyPolicy] | None:
    """Return the policy that a spec names, even if its options are invalid."""
    return POLICIES.get(spec.partition(":")[0].strip().lower().replace("-", "_"))


def _make(name: str, given: list[tuple[Any, object]], spec: str) -> Policy:
    kind = named_policy(name)
    if kind is None and (instead := REMOVED.get(name.strip().lower())):
        raise UsageError.at(WHERE, f"there is no policy {name.strip()!r} any more", instead)
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
