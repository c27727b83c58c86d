"""Lists of names, as messages show them."""

from __future__ import annotations

from collections.abc import Iterable


def some(names: Iterable[str], shown: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
