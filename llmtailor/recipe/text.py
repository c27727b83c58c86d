"""How messages name things: nearest valid names, and many parts in a few words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from llmtailor.model.parts import layer_part

LAYER = re.compile(r"layer (\d+)")

MANY = 12
"""Lists of valid names are cut here; a model has thousands of tensors."""


_SHOWN = 60
"""Characters of a word that are echoed."""
_NAME = 300
"""Characters of a word that are compared with names; the time grows with their square."""


class Misspelt(Exception):
    """A word of a recipe that can't be read, or that names nothing: what is wrong and how to mend it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def layer_number(part: str) -> int | None:
    """Return the number of a layer's part, None for any other part."""
    match = LAYER.fullmatch(part)
    return int(match[1]) if match else None


def quote(value: object) -> str:
    """Return something of the user's as Python writes it, cut if it is long."""
    told = repr(value)
    return told if len(told) <= _SHOWN else f"{told[:_SHOWN]}...{told[-1]}"


def nearest(name: str, valid: Collection[str]) -> str:
    """Return a fix: the valid name that is closest, if one is close, and the valid names."""
    close = difflib.get_close_matches(name[:_NAME], list(valid), n=1)
    listed = condense(valid)
    return f"did you mean {close[0]!r}? Valid here: {listed}" if close else f"valid here: {listed}"


def condense(parts: Iterable[str]) -> str:
    """Join names for a message; layers become one ``layers 0, 3-7``, and a long list is cut.

    Layers come in ascending order, at the place of the first of them.
    """
    listed = list(dict.fromkeys(parts))
    numbers = sorted(number for part in listed if (number := layer_number(part)) is not None)
    out: list[str] = []
    layers_told = False
    for part in listed:
        if layer_number(part) is None:
            out.append(part)
        elif not layers_told:
            out.append(_runs(numbers))
            layers_told = True
    if len(out) > MANY:
        out = [*out[:MANY], f"and {len(out) - MANY} more"]
    return ", ".join(out)


def _runs(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(numbers) == 1:
        return layer_part(numbers[0])
    return "layers " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
