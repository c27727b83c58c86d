"""How messages about policies name what is valid."""

from __future__ import annotations

import difflib
from collections.abc import Collection

MANY = 12


def nearest(name: object, valid: Collection[str]) -> str:
    """Return a fix: the valid name that is closest, if one is close, and the valid names."""
    close = difflib.get_close_matches(str(name), list(valid), n=1)
    listed = list(valid)[:MANY] + ([f"and {len(valid) - MANY} more"] if len(valid) > MANY else [])
    head = f"did you mean {close[0]!r}? Valid here: " if close else "valid here: "
    return head + (", ".join(listed) or "none")
