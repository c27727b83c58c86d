"""How messages name things: the nearest valid names, and many parts in a few words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from llmtailor.errors import ranges
from llmtailor.model.parts import layer_part

_LAYER = re.compile(r"layer (\d+)")
_LISTED = 12
"""Names that a message lists; a model has thousands of tensors."""
_SHOWN = 60
"""Characters of a user's text that a message quotes."""
_COMPARED = 300
"""Characters that are compared with valid names; the time grows with their square."""


class SelectorError(Exception):
    """A selector or name that is malformed, or that the model has nothing for. The caller knows its location."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def layer_number(part: str) -> int | None:
    """Return the number of a layer's part, None for any other part."""
    match = _LAYER.fullmatch(part)
    return int(match[1]) if match else None


def quote(value: object) -> str:
    """Return what the user wrote in Python's quotes, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...{text[-1]}"


def nearest(name: str, valid: Collection[str]) -> str:
    """Return a fix: the closest valid name, if one is close, and the valid names."""
    close = difflib.get_close_matches(name[:_COMPARED], list(valid), n=1)
    listed = condense(valid)
    return f"did you mean {close[0]!r}? Valid here: {listed}" if close else f"valid here: {listed}"


def condense(parts: Iterable[str]) -> str:
    """Join names for a message: ``embed_tokens, layers 0, 3-7, norm``. A long list is cut.

    Layers come in ascending order, where the first of them stands.
    """
    listed = list(dict.fromkeys(parts))
    numbers = sorted(number for part in listed if (number := layer_number(part)) is not None)
    names = list(dict.fromkeys(part if layer_number(part) is None else "" for part in listed))
    layers = layer_part(numbers[0]) if len(numbers) == 1 else f"layers {ranges(numbers)}"
    shown = [name or layers for name in names]
    return ", ".join([*shown[:_LISTED], f"and {len(shown) - _LISTED} more"] if len(shown) > _LISTED else shown)
