"""Lists of names, as messages show them."""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN = 3


def some(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
