"""Untrusted JSON and names: bounded in size, and every malformed value is a SourceError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.errors import damaged
from llmtailor.storage.local import read_source

MAX_BYTES = 64 << 20
"""Enough for the log of 400,000 steps in trainer_state.json. The Python objects take up to 20 times as much memory."""


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises SourceError for anything else.

    The last one of duplicate keys counts, NaN is a number, and the text is UTF-8 without a byte order mark, as for
    stock software that resumes from the file.
    """
    data = read_source(path, where, MAX_BYTES)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"the file is not JSON ({error})", Code.FILE_DAMAGED) from error
    if not isinstance(content, dict):
        raise damaged(where, "the file is not a JSON object", Code.FILE_DAMAGED)
    return content


def read_strict_json(data: bytes) -> Any:
    """Return decoded JSON without the two things that decoders disagree about: duplicate keys and NaN.

    Raises ValueError or RecursionError.
    """
    return json.loads(data, object_pairs_hook=_no_twins, parse_constant=_no_constant)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a duplicate key")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


MAX_NAME = 1000
MAX_COUNT = 1 << 53
"""Counts are below this, so that they are exact as floats, which Adam's steps are."""


def check_name(name: Any, what: str, where: str) -> str:
    """Return a valid name. Raises SourceError for anything else.

    A valid name can safely be written to JSON, to a digest and to a terminal: it has no control characters and no
    unpaired surrogates.
    """
    if not isinstance(name, str):
        raise damaged(where, f"{what} has a {type(name).__name__} as its name")
    if not is_name(name):
        raise damaged(where, f"{what} has the invalid name {name[:60]!r}")
    return name


def is_name(value: Any) -> bool:
    """Return whether a value is a name that `check_name` accepts."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def is_path_below(path: str) -> bool:
    """Return whether a relative path, with ``/``, stays below its starting folder."""
    words = path.split("/")
    return path.isprintable() and not any(word in ("", ".", "..") for word in words)


def is_count(value: Any) -> bool:
    """Return whether a value is a count; True and False are not, though Python treats them as ints."""
    return type(value) is int and 0 <= value < MAX_COUNT
