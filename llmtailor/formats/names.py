"""Names that come from elsewhere: of params, states, tensors and folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmtailor.errors import SourceError

MAX_NAME = 1000
MAX_COUNT = 1 << 53
"""Counts are below this, so that they are exact as floats, which Adam's steps are."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FIX = "copy the file again, or leave this checkpoint out"


def check_name(name: Any, what: str, where: str) -> str:
    """Return a name that is one. Raises SourceError for anything else.

    What it may hold is what can be written to JSON, to a digest and to a terminal without a second thought: no control
    characters, no half of a surrogate pair.
    """
    if not isinstance(name, str):
        raise SourceError.at(where, f"{what} has a {type(name).__name__} for a name", _FIX)
    if not is_name(name):
        raise SourceError.at(where, f"{what} has the name {name[:60]!r}, which can't be one", _FIX)
    return name


def is_name(value: Any) -> bool:
    """Tell whether a value is a name as `check_name` wants it."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def is_path_below(path: str) -> bool:
    """Tell whether a relative path, with ``/``, stays below the folder that it starts from."""
    words = path.split("/")
    return path.isprintable() and not any(word in ("", ".", "..") for word in words)


def is_count(value: Any) -> bool:
    """Tell whether a value is a number of something; True and False are none, though Python takes them for ints."""
    return type(value) is int and 0 <= value < MAX_COUNT


def step_of(checkpoint: Path) -> int | None:
    """Return the step that a folder's name tells, or None if it is not that of a checkpoint."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else None
