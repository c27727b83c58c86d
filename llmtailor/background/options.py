"""The options of a saver, apart from its policy."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

from llmtailor.attestation.compare import FULL, OFF, SAMPLE, STOP, WARN
from llmtailor.errors import Problem, Problems, UsageError, attempt
from llmtailor.model.precision import MASTERS, MOMENTS, Masters, Moments, PrecisionOptions
from llmtailor.policies import DEFAULT_POLICY, Policy, make_policy, precision_of

MIN_HOST_BUFFER = 1 << 20
PREFIX = "LLMTAILOR_"
"""Begins the names of the environment variables"""
WHERE = "attach"
SAME_FIX = "give all ranks the same arguments and LLMTAILOR_ variables"
ATTEST, ON_MISMATCH = (OFF, SAMPLE, FULL), (WARN, STOP)


MOST_IN_FLIGHT = 16
STOCK = ("background", "host_buffer", "when_busy", "write_timeout", "mirror")
"""The fields of `SavingOptions` that ``layout="stock"`` has"""
RESUME = ("attest", "on_mismatch")
"""Those of a resume, which it has in a Trainer"""
LAYOUTS = ("partial", "stock")


class SavingArguments(TypedDict, total=False):
    """The fields of `SavingOptions` as keyword arguments, for type checkers."""

    max_staleness: int | None
    keep_composable: int | None
    background: bool
    host_buffer: int | Literal["auto"]
    when_busy: Literal["wait", "skip"]
    in_flight: int
    write_timeout: float
    staging_dir: str | Path | None
    mirror: str | None
    masters: Masters | None
    moments: Moments | None
    experts: Literal["parts"] | None
    attest: Literal["off", "sample", "full"]
    on_mismatch: Literal["warn", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOptions:
    """The options of a saver. Raises UsageError with all problems.

    ``value`` says what the environment variable of a field holds.
    """

    max_staleness: int | None = field(default=None, metadata={"value": "a number of saves"})
    """The maximum age of a part, in saves. A part that the policy leaves out for longer is added. None means the
    maximum that the policy promises."""
    keep_composable: int | None = field(default=None, metadata={"value": "a number of steps"})
    """After each save, delete partial checkpoints that this number of newest composable steps does not need. None keeps
    all."""
    background: bool = field(default=True, metadata={"value": "1 or 0"})
    """Copy the states while training continues and write them in a thread; False stops training until a save is
    complete."""
    host_buffer: int | Literal["auto"] = field(default="auto", metadata={"value": "a number of bytes, or auto"})
    """Bytes of host memory per rank for copies in the background. ``auto``: this rank's share of the states, but
    together with the other ranks of the node no more than a quarter of the available memory."""
    when_busy: Literal["wait", "skip"] = field(default="wait", metadata={"value": "wait or skip"})
    """What a save does while as many as `in_flight` are still being written"""
    in_flight: int = field(default=1, metadata={"value": "a number of saves"})
    """How many saves may be written at once. Each has a host buffer of its own. They are published in their order, and
    one that fails takes those after it with it."""
    write_timeout: float = field(default=300.0, metadata={"value": "a number of seconds"})
    """Seconds without progress after which a write counts as stuck: training no longer waits for it, and saves are
    skipped until it moves again"""
    staging_dir: str | Path | None = field(default=None, metadata={"value": "a folder"})
    """A folder on a disk of the node. Saves are written and published there first, and copied to the run's folder in
    the background."""
    mirror: str | None = field(default=None, metadata={"value": "a URL"})
    """A URL that fsspec knows, such as ``s3://bucket/run``, to which finished saves are copied in the background"""
    masters: Masters | None = field(default=None, metadata={"value": "fp32, 24bit, 24bit-delta or bf16"})
    """``24bit``: store fp32 master weights without their last 8 bits, 3 instead of 4 bytes per param. bf16 and fp16
    weights that are rounded from them are those of the training. ``24bit-delta``: the same; masters that are saved
    without their moments are compressed differences from those that were saved with them. ``bf16``: store 24 bits of
    masters that are saved with their moments, and 16 bits of the others. ``fp32`` stores masters as they are. None
    leaves it to the policy."""
    moments: Moments | None = field(default=None, metadata={"value": "fp32, bf16 or 8bit"})
    """``bf16``, ``8bit``: store Adam's fp32 moments rounded to bf16, 4 instead of 8 bytes per param, or in blocks of
    8-bit numbers, 2.1 bytes. ``fp32`` stores moments as they are. None leaves it to the policy."""
    experts: Literal["parts"] | None = field(default=None, metadata={"value": "parts"})
    """``parts``: each expert of a mixture-of-experts layer is a part, and the rest of the layer another. None keeps
    layers whole."""
    attest: Literal["off", "sample", "full"] = field(default="sample", metadata={"value": "off, sample or full"})
    """What of a resumed training is compared with its checkpoint before the first step: ``sample``, some elements of
    every state; ``full``, every byte, which reads the states once more"""
    on_mismatch: Literal["warn", "stop"] = field(default="warn", metadata={"value": "warn or stop"})
    """What happens if a resumed training does not hold its checkpoint: a warning, or an error on all ranks"""

    @property
    def precision(self) -> PrecisionOptions:
        return PrecisionOptions(self.masters, self.moments)

    def __post_init__(self) -> None:
        problems = []
        if self.keep_composable is not None and (type(self.keep_composable) is not int or self.keep_composable < 1):
            fix = "give 1 or more, or omit it to keep everything"
            problems.append(Problem("keep_composable", f"it is {self.keep_composable!r}", fix))
        if self.host_buffer != "auto" and (type(self.host_buffer) is not int or self.host_buffer < MIN_HOST_BUFFER):
            fix = f'give a number of bytes, at least {MIN_HOST_BUFFER}, or "auto"'
            problems.append(Problem("host_buffer", f"it is {self.host_buffer!r}", fix))
        if self.when_busy not in ("wait", "skip"):
            problems.append(Problem("when_busy", f"it is {self.when_busy!r}", 'give "wait" or "skip"'))
        if type(self.in_flight) is not int or not 1 <= self.in_flight <= MOST_IN_FLIGHT:
            problems.append(Problem("in_flight", f"it is {self.in_flight!r}", f"give 1 to {MOST_IN_FLIGHT}"))
        if type(self.write_timeout) not in (int, float) or not 0 < self.write_timeout < math.inf:
            problems.append(Problem("write_timeout", f"it is {self.write_timeout!r}", "give a number of seconds"))
        if self.staging_dir is not None and self.mirror is not None:
            what = "saves can be copied to only one other place"
            problems.append(Problem("mirror", what, "omit staging_dir, or omit mirror"))
        if self.masters not in (None, *MASTERS):
            fix = f"give one of {', '.join(MASTERS)}"
            problems.append(Problem("masters", f"it is {self.masters!r}", fix))
        if self.moments not in (None, *MOMENTS):
            problems.append(Problem("moments", f"it is {self.moments!r}", 'give "fp32", "bf16" or "8bit"'))
        if self.experts not in (None, "parts"):
            fix = 'give "parts", or omit it to keep layers whole'
            problems.append(Problem("experts", f"it is {self.experts!r}", fix))
        if self.attest not in ATTEST:
            problems.append(Problem("attest", f"it is {self.attest!r}", 'give "off", "sample" or "full"'))
        if self.on_mismatch not in ON_MISMATCH:
            problems.append(Problem("on_mismatch", f"it is {self.on_mismatch!r}", 'give "warn" or "stop"'))
        if problems:
            raise UsageError(problems)


def stock_options(given: Mapping[str, Any], valid: Sequence[str] = STOCK) -> SavingOptions:
    """Return the options of ``layout="stock"``. Raises UsageError with all problems."""
    what = 'layout="stock" has no option {!r:.40}'
    if wrong := [Problem(WHERE, what.format(name), _meant(name, valid)) for name in given if name not in valid]:
        raise UsageError(wrong)
    return SavingOptions(**given)


def _meant(name: str, valid: Collection[str]) -> str:
    """Return a fix for an option that does not exist."""
    close = difflib.get_close_matches(name[:40], valid, n=1)
    return f"{f'did you mean {close[0]!r}?' if close else 'omit it.'} Valid options: {', '.join(valid)}"


@dataclass(frozen=True, slots=True)
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
        for name in [name for name in rest if name not in VARIABLES]:
            del rest[name]
            wrong.append(Problem(WHERE, f"there is no option {name!r:.40}", _meant(name, VARIABLES)))
        if wrong:
            problems.add(UsageError(wrong))
        made = attempt(lambda: make_policy(policy), problems, UsageError)
        options = attempt(lambda: SavingOptions(**rest), problems, UsageError)
        problems.raise_if_any()
        assert made is not None and options is not None, "else it was raised why"
        precision_of(made, options.precision)
        every = save_steps if isinstance(save_steps, int) else None
        return cls(made, every, overhead if save_steps == "auto" else None, on_restart, options)


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
