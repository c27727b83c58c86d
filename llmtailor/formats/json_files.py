"""JSON that others wrote: bounded in size, and every way to be malformed is a SourceError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.errors import SourceError
from llmtailor.io.sources import read_source

MAX_BYTES = 64 << 20
"""The log of 400,000 steps in trainer_state.json fits. Python's objects take up to 20 times as much."""
_COPY_AGAIN = "copy the file again, or leave this checkpoint out"


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Read a JSON object. Raises SourceError for anything else.

    Of a key that is there twice the last one counts, NaN is a number, and the text is UTF-8 without a mark at its
    beginning: so reads whoever resumes from the file.
    """
    data = read_source(path, where, MAX_BYTES)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SourceError.at(where, f"the file is no JSON ({error})", _COPY_AGAIN, Code.FILE_DAMAGED) from error
    if not isinstance(content, dict):
        raise SourceError.at(where, "the file is no JSON object", _COPY_AGAIN, Code.FILE_DAMAGED)
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
