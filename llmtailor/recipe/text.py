"""Names in messages: the nearest valid names, and short lists of many parts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from llmtailor.errors import ranges
from llmtailor.model.parts import layer_part

_LAYER = re.compile(r"layer (\d+)")
_LISTED = 12
"""Maximum number of names in a message; a model has thousands of tensors."""
_SHOWN = 60
"""Maximum number of characters of a user's text in a message"""
_COMPARED = 300
"""Maximum number of characters to compare with valid names; the time grows with their square."""


class SelectorError(Exception):
    """A selector or name that is malformed, or that nothing in the model matches. The caller knows its location."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def layer_number(part: str) -> int | None:
    """Return the number of a layer's part, None for any other part."""
    match = _LAYER.fullmatch(part)
    return int(match[1]) if match else None


def quote(value: object) -> str:
    """Return the user's text in Python's quotes, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...{text[-1]}"


def nearest(name: str, valid: Collection[str]) -> str:
    """Return a fix: the closest valid name, if one is close, and the valid names."""
    close = difflib.get_close_matches(name[:_COMPARED], list(valid), n=1)
    listed = condense(valid)
    return f"did you mean {close[0]!r}? Valid here: {listed}" if close else f"valid here: {listed}"


def condense(parts: Iterable[str]) -> str:
    """Return names joined for a message: ``embed_tokens, layers 0, 3-7, norm``. A long list is cut.

    Layers come in ascending order, in the place of the first one.
    """
    listed = list(dict.fromkeys(parts))
    numbers = sorted(number for part in listed if (number := layer_number(part)) is not None)
    names = list(dict.fromkeys(part if layer_number(part) is None else "" for part in listed))
    layers = layer_part(numbers[0]) if len(numbers) == 1 else f"layers {ranges(numbers)}"
    shown = [name or layers for name in names]
    return ", ".join([*shown[:_LISTED], f"and {len(shown) - _LISTED} more"] if len(shown) > _LISTED else shown)
