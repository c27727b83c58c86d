"""The options of a saver, apart from its policy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from llmtailor.attestation.compare import FULL, OFF, SAMPLE, STOP, WARN
from llmtailor.errors import Problem, UsageError
from llmtailor.model.precision import MASTERS, MOMENTS, Masters, Moments, PrecisionOptions

MIN_HOST_BUFFER = 1 << 20
WHERE = "attach"
SAME_FIX = "give all ranks the same arguments and LLMTAILOR_ variables"


MOST_IN_FLIGHT = 16
STOCK = ("background", "host_buffer", "when_busy", "write_timeout", "mirror")
"""The fields of `SavingOptions` that ``layout="stock"`` has"""


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


def _holds(value: str, is_valid: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
    """Return what a field holds, also as an environment variable, and whether it does."""
    return {"value": value, "is_valid": is_valid}


def _one_of(*values: str, or_none: bool = False) -> dict[str, Any]:
    return _holds(
        f"{', '.join(values[:-1])} or {values[-1]}", lambda given: given in values or (or_none and given is None)
    )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOptions:
    """The options of a saver. Raises UsageError with all problems."""

    max_staleness: int | None = field(default=None, metadata=_holds("a number of saves"))
    """The maximum age of a part, in saves. A part that the policy leaves out for longer is added. None means the
    maximum that the policy promises."""
    keep_composable: int | None = field(
        default=None, metadata=_holds("a number of steps, 1 or more", lambda value: value is None or _is_count(value))
    )
    """After each save, delete partial checkpoints that this number of newest composable steps does not need. None keeps
    all."""
    background: bool = field(default=True, metadata=_holds("1 or 0"))
    """Copy the states while training continues and write them in a thread; False stops training until a save is
    complete."""
    host_buffer: int | Literal["auto"] = field(
        default="auto",
        metadata=_holds(
            f"a number of bytes, at least {MIN_HOST_BUFFER}, or auto",
            lambda value: value == "auto" or (_is_count(value) and value >= MIN_HOST_BUFFER),
        ),
    )
    """Bytes of host memory per rank for copies in the background. ``auto``: this rank's share of the states, but
    together with the other ranks of the node no more than a quarter of the available memory."""
    when_busy: Literal["wait", "skip"] = field(default="wait", metadata=_one_of("wait", "skip"))
    """What a save does while as many as `in_flight` are still being written"""
    in_flight: int = field(
        default=1,
        metadata=_holds(
            f"a number of saves, 1 to {MOST_IN_FLIGHT}", lambda value: _is_count(value) and value <= MOST_IN_FLIGHT
        ),
    )
    """How many saves may be written at once. Each has a host buffer of its own. They are published in their order, and
    one that fails takes those after it with it."""
    write_timeout: float = field(
        default=300.0,
        metadata=_holds("a number of seconds", lambda value: type(value) in (int, float) and 0 < value < math.inf),
    )
    """Seconds without progress after which a write counts as stuck: training no longer waits for it, and saves are
    skipped until it moves again"""
    staging_dir: str | Path | None = field(default=None, metadata=_holds("a folder"))
    """A folder on a disk of the node. Saves are written and published there first, and copied to the run's folder in
    the background."""
    mirror: str | None = field(default=None, metadata=_holds("a URL"))
    """A URL that fsspec knows, such as ``s3://bucket/run``, to which finished saves are copied in the background"""
    masters: Masters | None = field(default=None, metadata=_one_of(*MASTERS, or_none=True))
    """``24bit``: store fp32 master weights without their last 8 bits, 3 instead of 4 bytes per param. bf16 and fp16
    weights that are rounded from them are those of the training. ``24bit-delta``: the same; masters that are saved
    without their moments are compressed differences from those that were saved with them. ``bf16``: store 24 bits of
    masters that are saved with their moments, and 16 bits of the others. ``fp32`` stores masters as they are. None
    leaves it to the policy."""
    moments: Moments | None = field(default=None, metadata=_one_of(*MOMENTS, or_none=True))
    """``bf16``, ``8bit``: store Adam's fp32 moments rounded to bf16, 4 instead of 8 bytes per param, or in blocks of
    8-bit numbers, 2.1 bytes. ``fp32`` stores moments as they are. None leaves it to the policy."""
    experts: Literal["parts"] | None = field(
        default=None, metadata=_holds("parts", lambda value: value in (None, "parts"))
    )
    """``parts``: each expert of a mixture-of-experts layer is a part, and the rest of the layer another. None keeps
    layers whole."""
    attest: Literal["off", "sample", "full"] = field(default="sample", metadata=_one_of(OFF, SAMPLE, FULL))
    """What of a resumed training is compared with its checkpoint before the first step: ``sample``, some elements of
    every state; ``full``, every byte, which reads the states once more"""
    on_mismatch: Literal["warn", "stop"] = field(default="warn", metadata=_one_of(WARN, STOP))
    """What happens if a resumed training does not hold its checkpoint: a warning, or an error on all ranks"""

    @property
    def precision(self) -> PrecisionOptions:
        return PrecisionOptions(self.masters, self.moments)

    def __post_init__(self) -> None:
        problems = [
            Problem(option.name, f"it is {value!r}", f"give {option.metadata['value']}")
            for option in fields(self)
            if not option.metadata["is_valid"](value := getattr(self, option.name))
        ]
        if self.staging_dir is not None and self.mirror is not None:
            what = "saves can be copied to only one other place"
            problems.append(Problem("mirror", what, "omit staging_dir, or omit mirror"))
        if problems:
            raise UsageError(problems)


def stock_options(given: Mapping[str, Any], valid: Sequence[str] = STOCK) -> SavingOptions:
    """Return the options of ``layout="stock"``. Raises UsageError with all problems."""
    if wrong := other_than(valid, given, 'layout="stock" has no option {!r:.40}'):
        raise UsageError(wrong)
    return SavingOptions(**given)


def other_than(valid: Collection[str], given: Collection[str], what: str) -> list[Problem]:
    """Return the problem ``what`` of each name that is not ``valid``, with the one that may be meant."""
    problems = []
    for name in given:
        if name not in valid:
            close = difflib.get_close_matches(name[:40], valid, n=1)
            fix = f"{f'did you mean {close[0]!r}?' if close else 'omit it.'} Valid options: {', '.join(valid)}"
            problems.append(Problem(WHERE, what.format(name), fix))
    return problems
