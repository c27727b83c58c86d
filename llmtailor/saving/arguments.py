"""The arguments of `attach` and of the callbacks: as they are given, and as the environment gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

from llmtailor.background.options import STOCK, WHERE, SavingOptions, other_than, stock_options
from llmtailor.errors import Problem, Problems, UsageError, attempt
from llmtailor.policies import DEFAULT_POLICY, Policy, make_policy, precision_of

PREFIX = "LLMTAILOR_"
"""Begins the names of the environment variables"""
RESUME = ("attest", "on_mismatch")
"""The fields of `SavingOptions` that decide how a resume is attested, also with ``layout="stock"``"""
LAYOUTS = ("partial", "stock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `PartialSaving`, checked."""

    policy: Policy
    save_steps: int | None
    """None: the training arguments decide, or ``overhead`` does."""
    overhead: float | None
    """None unless ``save_steps`` is ``auto``"""
    on_restart: str
    options: SavingOptions

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Return the arguments, by name, with the defaults of those not given. Raises UsageError with all problems."""
        rest, problems, wrong = dict(given), Problems(), []
        policy, save_steps = rest.pop("policy", DEFAULT_POLICY), rest.pop("save_steps", None)
        overhead, on_restart = rest.pop("overhead", 0.02), rest.pop("on_restart", "refuse")
        if (layout := rest.pop("layout", LAYOUTS[0])) != LAYOUTS[0]:
            fix = "omit it, or give it to attach or to llmtailor run"
            wrong.append(Problem(WHERE, f"layout is {layout!r}, but this callback saves partial checkpoints", fix))
        if save_steps not in (None, "auto") and (type(save_steps) is not int or save_steps < 1):
            fix = 'give a number of steps, 1 or more, or "auto"'
            wrong.append(Problem(WHERE, f"save_steps is {save_steps!r}", fix))
        if type(overhead) not in (int, float) or not 0 < overhead <= 1:
            wrong.append(Problem(WHERE, f"overhead is {overhead!r}", "give a fraction of the time, such as 0.02"))
        if on_restart not in ("refuse", "compose"):
            wrong.append(Problem(WHERE, f"on_restart is {on_restart!r}", 'give "refuse" or "compose"'))
        wrong += other_than(VARIABLES, rest, "there is no option {!r:.40}")
        rest = {name: value for name, value in rest.items() if name in VARIABLES}
        if wrong:
            problems.add(UsageError(wrong))
        made = attempt(lambda: make_policy(policy), problems, UsageError)
        options = attempt(lambda: SavingOptions(**rest), problems, UsageError)
        problems.raise_if_any()
        assert made is not None and options is not None, "else it was raised why"
        precision_of(made, options.precision)
        every = save_steps if isinstance(save_steps, int) else None
        overhead = overhead if save_steps == "auto" else None
        return cls(policy=made, save_steps=every, overhead=overhead, on_restart=on_restart, options=options)


def _number(text: str) -> int | str:
    return text if text == "auto" else int(text)


_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_READERS: Mapping[Any, Callable[[str], object]] = {
    int | None: int,
    int | Literal["auto"]: _number,
    bool: lambda text: _SWITCH[text.lower()],
    float: float,
}
"""Type of a field of `SavingOptions`, if it is no text -> what reads it"""
_TYPES = get_type_hints(SavingOptions)
VARIABLES: Mapping[str, tuple[Callable[[str], object], str]] = {
    "policy": (
        lambda text: json.loads(text) if text.startswith("{") else text,
        "a policy such as parity or round_robin:4, or a JSON object",
    ),
    "layout": (str, "partial or stock"),
    "save_steps": (_number, "a number of steps, or auto"),
    "overhead": (float, "a fraction of the time, such as 0.02"),
    "on_restart": (str, "refuse or compose"),
    **{one.name: (_READERS.get(_TYPES[one.name], str), one.metadata["value"]) for one in fields(SavingOptions)},
}
"""The arguments of `attach` that environment variables may give, what reads each, and what its value is"""


def stock_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], SavingOptions]:
    """Return the options of saves among the arguments of `attach` if ``layout`` is ``stock``, and those of a resume.

    Raises UsageError with all problems.
    """
    rest = {name: value for name, value in given.items() if name != "layout"}
    policy = rest.pop("policy", "full")
    problems = Problems()
    if getattr(policy, "name", policy) != "full":
        fix = 'give policy="full", or omit it'
        problems.add(UsageError.at(WHERE, f'layout="stock" saves everything, but the policy is {policy!r:.40}', fix))
    attempt(lambda: stock_options(rest, (*STOCK, *RESUME)), problems, UsageError)
    problems.raise_if_any()
    resume = {name: rest.pop(name) for name in RESUME if name in rest}
    return rest, SavingOptions(**resume)


def resume_options(environ: Mapping[str, str]) -> SavingOptions:
    """Return the options of a resume that the environment gives. Raises UsageError."""
    return SavingOptions(**{name: value for name, value in from_environment(environ).items() if name in RESUME})


def check_layout(layout: object) -> None:
    if layout not in (None, *LAYOUTS):
        raise UsageError.at(WHERE, f"layout is {layout!r:.40}", f"give one of {', '.join(LAYOUTS)}")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check the arguments of `attach`, by name. Raises UsageError with all problems."""
    check_layout(given.get("layout"))
    if given.get("layout") == "stock":
        stock_arguments(given)
    else:
        Arguments.of(given)


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `attach` that are in the environment: ``LLMTAILOR_POLICY`` gives ``policy``.

    An empty variable counts as absent. Raises UsageError with every value that can't be read.
    """
    found: dict[str, Any] = {}
    problems = []
    for name, (read, what) in VARIABLES.items():
        variable = PREFIX + name.upper()
        if text := environ.get(variable, ""):
            try:
                found[name] = read(text)
            except (ValueError, KeyError):
                problems.append(Problem(variable, f"it is {text!r}", f"give {what}"))
    if problems:
        raise UsageError(problems)
    return found
