"""Single values of a manifest that may be damaged: each is returned as what it should be, or raises ValueError."""

from __future__ import annotations

import math
import re
from typing import Any

from llmtailor.formats.names import is_count, is_name, is_path_below
from llmtailor.formats.safetensors_files import MAX_DIMENSIONS

_CRC = re.compile(r"[0-9a-f]{8}")


def a_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is no list")
    return value


def a_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is no object")
    return value


def a_name(value: Any) -> str:
    if not is_name(value):
        raise ValueError(f"{value!r:.80} is no name")
    return str(value)


def a_plain_name(value: Any) -> str:
    if "/" in a_name(value) or not is_path_below(value):
        raise ValueError(f"{value!r:.80} is no plain name")
    return str(value)


def a_shape(value: Any) -> tuple[int, ...]:
    if len(a_list(value)) > MAX_DIMENSIONS:
        raise ValueError("a shape has too many dimensions")
    shape = tuple(map(a_count, value))
    a_count(math.prod(shape))
    return shape


def a_count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r:.80} is no count")
    return int(value)


def a_crc(value: Any) -> int:
    if not _CRC.fullmatch(value):
        raise ValueError(f"{value!r:.80} is no CRC-32")
    return int(value, 16)


def one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if type(value) is not type(choices[0]) or value not in choices:
        raise ValueError(f"{value!r:.80} is none of {choices[:4]}")
    return value
