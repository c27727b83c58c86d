"""JSON and names from elsewhere: bounded in size, and every malformed value is a SourceError."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.errors import COPY_FILE, SourceError
from llmtailor.storage.local import read_source

MAX_BYTES = 64 << 20
"""The log of 400,000 steps in trainer_state.json fits. Python's objects take up to 20 times as much."""


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Read a JSON object. Raises SourceError for anything else.

    Of a key that is there twice the last one counts, NaN is a number, and the text is UTF-8 without a mark at its
    beginning: so reads whoever resumes from the file.
    """
    data = read_source(path, where, MAX_BYTES)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SourceError.at(where, f"the file is not JSON ({error})", COPY_FILE, Code.FILE_DAMAGED) from error
    if not isinstance(content, dict):
        raise SourceError.at(where, "the file is no JSON object", COPY_FILE, Code.FILE_DAMAGED)
    return content


def read_strict_json(data: bytes) -> Any:
    """Decode JSON without the two things that decoders disagree about: a key that is there twice, and NaN.

    Raises ValueError or RecursionError.
    """
    return json.loads(data, object_pairs_hook=_no_twins, parse_constant=_no_constant)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


MAX_NAME = 1000
MAX_COUNT = 1 << 53
"""Counts are below this, so that they are exact as floats, which Adam's steps are."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def check_name(name: Any, what: str, where: str) -> str:
    """Return a name that is one. Raises SourceError for anything else.

    What it may hold is what can be written to JSON, to a digest and to a terminal without a second thought: no control
    characters, no half of a surrogate pair.
    """
    if not isinstance(name, str):
        raise SourceError.at(where, f"{what} has a {type(name).__name__} for a name", COPY_FILE)
    if not is_name(name):
        raise SourceError.at(where, f"{what} has the name {name[:60]!r}, which can't be one", COPY_FILE)
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
