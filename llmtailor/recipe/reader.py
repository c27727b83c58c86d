"""Typed access to the YAML tree. Every wrong value becomes a flaw and None, so that reading goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from llmtailor.errors import Problem
from llmtailor.recipe.paths import expand
from llmtailor.recipe.words import Misspelt, nearest, quote
from llmtailor.recipe.yamltext import Flaw, Items, Scalar, Table, Value, is_null, place

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,5})")


class Reader:
    """Reads values of one recipe and collects what is wrong with them."""

    def __init__(self, name: str, folder: Path, environ: Mapping[str, str], flaws: Sequence[Flaw]) -> None:
        self.name = name
        self.folder = folder
        self.environ = environ
        self.flaws = list(flaws)
        self.notices: list[Problem] = []

    def where(self, value: Value, path: str) -> str:
        return place(self.name, value.line, path)

    def flaw(self, line: int, path: str, what: str, fix: str) -> None:
        self.flaws.append(Flaw(line, Problem(place(self.name, line, path), what, fix)))

    def table(
        self,
        value: Value,
        path: str,
        keys: Sequence[str],
        required: Sequence[str] = (),
        no_effect: Mapping[str, str] = MappingProxyType({}),
        refused: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> Table | None:
        """Return the value if it is a mapping; tell of unknown, refused, idle and missing keys."""
        if not isinstance(value, Table):
            self._wrong(value, path, f"a mapping with {' and '.join(required or keys)}")
            return None
        for key, line in value.lines.items():
            inside = f"{path}.{key}" if path else key
            if key in keys or (key in (*no_effect, *refused) and is_null(value.entries[key])):
                continue
            if key in no_effect:
                what = f"{key} has no effect: {no_effect[key]}"
                self.notices.append(Problem(place(self.name, line, inside), what, f"leave {key} out"))
            elif key in refused:
                why, fix = refused[key]
                self.flaw(line, inside, f"{key} {why}", fix)
            else:
                self.flaw(line, inside, f"unknown key {quote(key)}", nearest(key, keys))
        for key in required:
            if key not in value.entries:
                self.flaw(value.line, path, f"{key} is missing", f"add {key}:")
        return value

    def items(self, value: Value, path: str, of: str) -> list[tuple[Value, str]]:
        """Return the items of a list, each with its path; an empty list is a flaw too."""
        if isinstance(value, Items) and value.items:
            return [(item, f"{path}[{at}]") for at, item in enumerate(value.items)]
        if isinstance(value, Items):
            self.flaw(value.line, path, "the list is empty", f"add {of}, or leave the key out")
        else:
            self._wrong(value, path, f"a list of {of}")
        return []

    def text(self, value: Value, path: str, wanted: str) -> str | None:
        """Return a scalar as it was written; quoted or not makes no difference."""
        if isinstance(value, Scalar) and not is_null(value) and value.text.strip():
            return value.text
        self._wrong(value, path, wanted)
        return None

    def integer(self, value: Value, path: str) -> int | None:
        """Return a plain decimal; YAML's other spellings of integers (octal, 1_000, 1:30) are flaws."""
        if isinstance(value, Scalar) and value.kind == "int" and _INTEGER.fullmatch(value.text):
            return int(value.text)
        self._wrong(value, path, "a whole number in plain decimals")
        return None

    def folder_of(self, value: Value, path: str) -> Path | None:
        """Return a path, expanded."""
        text = self.text(value, path, "a path")
        if text is None:
            return None
        try:
            return expand(text, self.folder, self.environ)
        except Misspelt as error:
            self.flaw(value.line, path, error.what, error.fix)
            return None

    def model(self, value: Value, path: str) -> Path | None:
        """Return the checkpoint that a model reference names: a path, ``{path: ...}`` or ``{model: {path: ...}}``."""
        if isinstance(value, Scalar) and "+" in value.text:
            fix = "merge the LoRA into a checkpoint first; if + is part of the folder's name write {path: ...}"
            self.flaw(
                value.line, path, f"{quote(value.text)} adds a LoRA, which has no optimizer state of its own", fix
            )
            return None
        if not isinstance(value, Table):
            return self.folder_of(value, path)
        no_effect = {"override_architecture": "the architecture is the checkpoint's own"}
        refused = {
            "lora": ("has no optimizer state of its own", "merge the LoRA into a checkpoint first"),
            "revision": ("belongs to the Hugging Face Hub, but training checkpoints are folders", "leave it out"),
        }
        nested = isinstance(value, Table) and "model" in value.entries
        key = "model" if nested else "path"
        table = self.table(value, path, [key], [key], no_effect, refused)
        if table is None or key not in table.entries:
            return None
        inner = table.entries[key]
        return self.model(inner, f"{path}.model") if nested else self.folder_of(inner, f"{path}.path")

    def _wrong(self, value: Value, path: str, wanted: str) -> None:
        if isinstance(value, Scalar):
            have = "nothing" if is_null(value) or not value.text.strip() else repr(value.text)
            if value.kind == "str" and _INTEGER.fullmatch(value.text):
                have += " in quotes"
        else:
            have = "a list" if isinstance(value, Items) else "a mapping"
        self.flaw(value.line, path, f"{have} stands where {wanted} is expected", f"write {wanted}")
