"""Snapshots of what users and their scripts rely on. Whoever changes it updates those files as well."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from helpers.places import ROOT

FOLDER = ROOT / "tests" / "snapshots"
UPDATE = "LLMTAILOR_UPDATE_SNAPSHOTS"


def check(name: str, content: Any) -> None:
    """Compare with ``NAME.json`` in tests/snapshots, or write that anew."""
    path = FOLDER / f"{name}.json"
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if os.environ.get(UPDATE):
        path.write_text(text, encoding="utf-8")
    kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    changes = [*difflib.unified_diff(kept, text.splitlines(), str(path.name), "as it is now", n=2, lineterm="")]
    hint = f"if this is intended, run {UPDATE}=1 pytest tests/snapshots, and add a line to CHANGELOG.md"
    assert not changes, "\n".join([*changes, hint])


def schema(documents: Iterable[Any], maps: Iterable[str] = ()) -> dict[str, str]:
    """Return path -> types of everything in some JSON documents of a kind.

    ``maps`` are the paths of objects whose keys are data, such as the names of params: these stand as ``*``. A key that
    not all objects of its place have ends in ``?``. Strings called ``schema`` are given with their values.
    """
    found: dict[str, set[str]] = {}
    objects: dict[str, list[set[str]]] = {}
    wide = frozenset(maps)
    for document in documents:
        for path, value in _walk(document, "", wide):
            found.setdefault(path, set()).add(_type(path, value))
            if isinstance(value, Mapping) and path not in wide:
                objects.setdefault(path, []).append(set(value))
    optional = {
        f"{path}.{key}".lstrip(".")
        for path, keys in objects.items()
        for key in set.union(*keys)
        if not all(key in one for one in keys)
    }
    return {path + "?" * (path in optional): " | ".join(sorted(found[path])) for path in sorted(found)}


def _walk(value: Any, path: str, maps: frozenset[str]) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{path}.{'*' if path in maps else key}".lstrip("."), maps)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, f"{path}[]", maps)


def _type(path: str, value: Any) -> str:
    if path.rpartition(".")[2] == "schema":
        return repr(value)
    names = {dict: "object", list: "array", str: "string", type(None): "null", int: "integer", float: "number"}
    return "boolean" if isinstance(value, bool) else names[type(value)]
