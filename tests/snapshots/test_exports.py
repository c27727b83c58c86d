"""The names that programs import, with their signatures, fields and bases."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import llmtailor
import llmtailor.param_groups
import llmtailor.saving
from helpers.snapshots import check
from llmtailor.codes import Code
from llmtailor.errors import TailorError


def test_exported_names() -> None:
    found = {module.__name__: exports(module) for module in (llmtailor, llmtailor.saving, llmtailor.param_groups)}
    check("exports", {**found, "errors": dict(errors(TailorError)), "codes": [one.value for one in Code]})


def errors(kind: type[TailorError]) -> Iterator[tuple[str, str]]:
    yield kind.__name__, f"{', '.join(one.__name__ for one in kind.__bases__)}, exit code {kind.exit_code}"
    below = [one for one in kind.__subclasses__() if one.__module__ == TailorError.__module__]
    for one in sorted(below, key=lambda one: one.__name__):
        yield from errors(one)


def exports(module: ModuleType) -> dict[str, Any]:
    return {name: describe(getattr(module, name)) for name in sorted(module.__all__)}


def describe(thing: Any) -> Any:
    if not inspect.isclass(thing):
        return signature(thing) if callable(thing) else type(thing).__name__
    ours = [one for one in thing.__mro__ if one.__module__.split(".")[0] == "llmtailor"]
    names = {name for one in ours for name in vars(one) if not name.startswith("_")}
    members = {name: describe_member(inspect.getattr_static(thing, name, None)) for name in sorted(names)}
    found = {"bases": [one.__name__ for one in thing.__bases__], "call": signature(thing)}
    if dataclasses.is_dataclass(thing):  # what calling it takes
        return {**found, "members": {name: members[name] for name in sorted(members.keys() - fields(thing))}}
    return {**found, "members": members}


def fields(kind: Any) -> set[str]:
    return {one.name for one in dataclasses.fields(kind)}


def describe_member(thing: Any) -> str:
    if isinstance(thing, property):
        return f"property -> {inspect.signature(thing.fget).return_annotation}" if thing.fget else "property"
    if isinstance(thing, (classmethod, staticmethod)):
        return f"{type(thing).__name__} {signature(thing.__func__)}"
    return signature(thing) if inspect.isfunction(thing) else type(thing).__name__


def signature(thing: Any) -> str:
    """Return a signature with the annotations as they are written, so without the modules of the types."""
    found = inspect.signature(thing)
    words = []
    for param in found.parameters.values():
        word = {param.VAR_POSITIONAL: "*", param.VAR_KEYWORD: "**"}.get(param.kind, "") + param.name
        word += f": {param.annotation}" if param.annotation is not param.empty else ""
        if param.default is not param.empty:
            word += " = " + ("a function" if callable(param.default) else repr(param.default))
        is_first_keyword = param.kind is param.KEYWORD_ONLY and not any(one.startswith("*") for one in words)
        words += ["*"] * is_first_keyword + [word]
    returned = f" -> {found.return_annotation}" if found.return_annotation is not found.empty else ""
    return f"({', '.join(words)}){returned}"
