"""Which cases of a large table the short suite tries. The others are marked ``long`` and run with ``pytest --all``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest


def mostly_long(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return cases for `parametrize`, all but the ``kept`` ones marked; a kept one has to be there."""
    listed = list(cases)
    assert all(one in listed for one in kept), f"not all of {kept} are cases"
    return [one if one in kept else pytest.param(one, marks=pytest.mark.long) for one in listed]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`, of which the short suite tries every so manieth, the first one included."""
    return [one if at % step == 0 else pytest.param(one, marks=pytest.mark.long) for at, one in enumerate(cases)]


def diagonal(forms: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all pairs for `parametrize`. The short suite tries each case on one form, and the forms take turns."""
    listed = list(forms)
    return [
        pytest.param(form, case, marks=() if at % len(listed) == number else pytest.mark.long)
        for at, case in enumerate(cases)
        for number, form in enumerate(listed)
    ]


def examples(short: int, long: int) -> int:
    """Return how many examples hypothesis, or a loop of random trials, shall try: more with ``--all``."""
    return long if "--all" in sys.argv else short
