"""Results as JSON: the one encoder of what every ``--json`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from llmtailor.errors import Problem


def document(schema: str, content: Mapping[str, object]) -> dict[str, Any]:
    """Return a result as JSON data; the keys are stable within a schema version, such as ``verify/1``."""
    return {"schema": f"llmtailor.{schema}", **encode(content)}


def encode(value: Any) -> Any:
    """Return a value as JSON data: dataclasses by their fields, problems as `Problem.to_json`, paths as text."""
    if isinstance(value, Problem):
        return value.to_json()
    if isinstance(value, Path):
        return f"{value}"
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [encode(item) for item in value]
    return value
