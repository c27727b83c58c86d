"""The YAML of a recipe as a tree of values with locations. Problems are collected, so that reading continues.

PyYAML's ``compose`` returns nodes, not objects, so no tag can run anything. Scalars stay text, because YAML 1.1 reads
``010`` as 8 and ``1:30`` as 90. A value in a mapping has the line of its key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeVar

import yaml

from llmtailor.errors import Problem, RecipeError, UsageError
from llmtailor.model.parts import nearest
from llmtailor.recipe.selectors import quote
from llmtailor.storage.local import with_tag
from llmtailor.storage.remote import open_location

MAX_BYTES = 1 << 20

_SPARE = 10_000
"""Values that aliases may add to those which a recipe's text has room for"""
_PATH = 64
"""Characters of a value's path that count as much as another value"""
_CORE = "tag:yaml.org,2002:"
_KINDS: Mapping[type[yaml.Node], tuple[str, ...]] = {
    yaml.ScalarNode: ("str", "int", "float", "bool", "null", "timestamp", "merge", "value"),
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,5})")
_VARIABLE = re.compile(r"\$(?:(\$)|\{([^}]*)(\}?)|([A-Za-z_][A-Za-z0-9_]*))")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that no file or path can hold; YAML has escapes for them."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_T = TypeVar("_T")


class Document:
    """A recipe that is being read: its name, the folder and variables for its paths, and the problems so far."""

    def __init__(self, name: str, folder: Path, environ: Mapping[str, str]) -> None:
        self.name, self.folder, self.environ = name, folder, environ
        self.notices: list[Problem] = []
        self.room = 0
        """How many more values there may be"""
        self._refused: list[tuple[int, Problem]] = []

    def place(self, line: int, path: str = "") -> str:
        """Return a location for messages, e.g. ``recipe.yaml:12 slices[0].sources[0]``."""
        return f"{self.name}:{line} {path}" if path else f"{self.name}:{line}"

    def refuse(self, line: int, path: str, what: str, fix: str) -> None:
        self._refused.append((line, Problem(self.place(line, path), what, fix)))

    def fail(self, line: int, what: str, fix: str) -> NoReturn:
        """Raise RecipeError with this problem, which makes the rest unreadable, and all earlier ones."""
        self.refuse(line, "", what, fix)
        self.raise_problems()
        raise AssertionError

    def raise_problems(self) -> None:
        """Raise RecipeError if there are problems, in the order of their lines."""
        if self._refused:
            in_order = sorted(self._refused, key=lambda pair: pair[0])
            raise RecipeError(dict.fromkeys(problem for _, problem in in_order))

    def value(self, node: yaml.Node, line: int, path: str) -> Value:
        """Return the value of a node, with aliases and merge keys expanded.

        Raises RecursionError if an alias refers to a value that contains it, and RecipeError if aliases stand for many
        more values than the text itself can hold.
        """
        self.room -= 1 + len(path) // _PATH
        if self.room < 0:
            what = "aliases (*name) stand for too many values, or an alias refers to a value that contains it"
            self.fail(line, what, "write the values that you need without aliases")
        kind, text = node.tag.removeprefix(_CORE), node.value
        if not node.tag.startswith(_CORE) or kind not in _KINDS[type(node)]:
            tag = node.tag.replace(_CORE, "!!")
            fix = "leave the tag out" if tag[1:2] in ("", "!") else f'quote it if you mean a negation: "{tag}"'
            self.refuse(line, path, f"the tag {tag} has no meaning in a recipe", fix)
            kind, text = "str", node.value or tag  # the text that was meant, so that reading continues
        if isinstance(node, yaml.ScalarNode):
            return Value(self, line, path, kind, text)
        if isinstance(node, yaml.MappingNode):
            return Value(self, line, path, "mapping", entries=self._entries(node, path))
        items = (self.value(item, _line(item), f"{path}[{at}]") for at, item in enumerate(node.value))
        return Value(self, line, path, "list", items=tuple(items))

    def _entries(self, node: yaml.MappingNode, path: str) -> dict[str, Value]:
        entries: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if key_node.tag == f"{_CORE}merge":
                is_list = isinstance(value_node, yaml.SequenceNode)
                for mapping in value_node.value if is_list else [value_node]:
                    value = self.value(mapping, line, path)
                    if value.kind != "mapping":
                        self.refuse(line, path, "<< takes a mapping, or a list of them", "write <<: *anchor")
                    merged = value.entries | merged  # the earlier one wins
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_CORE}str":
                self.refuse(line, path, "a key must be plain text", "write key: value")
                continue
            key = key_node.value
            inside = f"{path}.{key}" if path else key
            if key in entries:
                what = f"the key {quote(key)} is repeated, first in line {entries[key].line}"
                self.refuse(line, inside, what, "keep one of them")
            else:
                entries[key] = self.value(value_node, line, inside)
        return {**entries, **{key: value for key, value in merged.items() if key not in entries}}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a recipe. Its methods return it as one type, or record a problem and return None."""

    document: Document
    line: int
    path: str
    """E.g. ``slices[0].sources``; empty for the recipe as a whole"""
    kind: str
    """``mapping``, ``list``, or YAML's type of the scalar: ``str``, ``int``, ``null``, ..."""
    text: str = ""
    """The scalar as written, without quotes"""
    items: tuple[Value, ...] = ()
    entries: dict[str, Value] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return self.document.place(self.line, self.path)

    @property
    def is_null(self) -> bool:
        """Whether the key has no value; mergekit writes keys that it does not use as ``null``."""
        return self.kind == "null"

    def refuse(self, what: str, fix: str) -> None:
        self.document.refuse(self.line, self.path, what, fix)

    def notice(self, what: str, fix: str) -> None:
        self.document.notices.append(Problem(self.where, what, fix))

    def read(self, key: str, how: Callable[[Value], _T]) -> _T | None:
        """Return an entry of a mapping, read with ``how``; None if it is missing."""
        return how(self.entries[key]) if key in self.entries else None

    def drop_nulls(self, keys: Collection[str]) -> None:
        """Remove entries without a value, as if the keys were missing."""
        for key in [key for key, value in self.entries.items() if key in keys and value.is_null]:
            del self.entries[key]

    def mapping(
        self,
        keys: Sequence[str],
        required: Sequence[str] = (),
        no_effect: Mapping[str, str] = MappingProxyType({}),
        refused: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> bool:
        """Return whether this is a mapping; report unknown, refused and missing keys, and those without effect."""
        if self.kind != "mapping":
            self._expected(f"a mapping with {' and '.join(required) or ' or '.join(keys)}")
            return False
        for key, value in self.entries.items():
            if key in keys or (value.is_null and (key in no_effect or key in refused)):
                continue
            if key in no_effect:
                value.notice(f"{key} has no effect: {no_effect[key]}", f"leave {key} out")
            elif key in refused:
                value.refuse(f"{key} {refused[key][0]}", refused[key][1])
            else:
                value.refuse(f"unknown key {quote(key)}", nearest(key, keys))
        for key in required:
            if key not in self.entries:
                self.refuse(f"{key} is missing", f"add {key}:")
        return True

    def list_of(self, what: str) -> tuple[Value, ...]:
        """Return the items of a list, which must not be empty."""
        if self.kind != "list":
            self._expected(f"a list of {what}")
        elif not self.items:
            self.refuse("the list is empty", f"add {what}, or leave the key out")
        return self.items

    def word(self, expected: str) -> str | None:
        """Return a scalar as written, without quotes."""
        if _UNWRITABLE.search(self.text):
            self.refuse("it contains a NUL or half of a character (U+D800 to U+DFFF)", "write plain text")
        elif self.kind not in ("mapping", "list", "null") and self.text.strip():
            return self.text
        else:
            self._expected(expected)
        return None

    def integer(self) -> int | None:
        """Return a plain decimal; YAML's other integers (octal, 1_000, 1:30) are refused."""
        if self.kind == "int" and _INTEGER.fullmatch(self.text):
            return int(self.text)
        self._expected("a whole number in plain decimals")
        return None

    def folder(self) -> Path | None:
        """Return a path with ``~``, ``$VAR`` and ``${VAR}`` expanded, below the document's folder if it is relative.

        ``$$`` is a plain ``$``. Symlinks are not followed. An empty variable is refused like an undefined one, because
        ``${RUN}/checkpoint-300`` would become ``/checkpoint-300``.
        """
        text = self.word("a path")
        if text is None:
            return None
        home = text.partition("/")[0]
        if home.startswith("~") and home != "~":
            self.refuse(f"{quote(home)} is not expanded", "write that home directory in full, or ~/ for your own")
            return None
        text = f"$HOME{text[1:]}" if home == "~" else text
        if False in [self._is_variable(match) for match in _VARIABLE.finditer(text)]:  # all are reported
            return None
        expanded = _VARIABLE.sub(lambda match: match[1] or self.document.environ[match[2] or match[4]], text)
        if "://" in expanded:
            try:
                return open_location(expanded)
            except UsageError as error:  # a URL of an unknown kind; a store that does not answer ends the command
                for problem in error.problems:
                    self.refuse(problem.what, problem.fix)
                return None
        return with_tag(Path(os.path.normpath(self.document.folder / expanded)))

    def _is_variable(self, match: re.Match[str]) -> bool:
        dollar, braced, closed, plain = match.groups()
        name = braced or plain
        is_name = plain or (closed and _NAME.fullmatch(braced))
        if dollar or (is_name and self.document.environ.get(name)):
            return True
        if not is_name:
            fix = "write ${NAME} or $NAME, without a default or other operators; write $$ for a plain $"
            self.refuse(f"{quote(match[0])} is not a variable", fix)
        else:
            state = "empty" if name in self.document.environ else "not set"
            self.refuse(f"the environment variable {name} is {state}", f"export {name}=..., or write the path in full")
        return False

    def _expected(self, expected: str) -> None:
        description = f"a {self.kind}"
        if self.kind not in ("mapping", "list"):
            description = "nothing" if self.is_null or not self.text.strip() else repr(self.text)
            description += " in quotes" * (self.kind == "str" and _INTEGER.fullmatch(self.text) is not None)
        self.refuse(f"{description} found where {expected} is expected", f"write {expected}")


def read_yaml(text: str, document: Document) -> Value:
    """Return the top-level mapping of a recipe.

    Duplicate keys (the first one is kept), keys that are not text, and tags are recorded in the document. Raises
    RecipeError, with all problems, if the rest can't be read.
    """
    fix = (
        "check indentation and brackets; quote text that begins with * ! & { % @ or contains ': ', "
        'e.g. select: ["*.mlp.*", "!norm"]'
    )
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        document.fail(1, "the recipe is larger than 1 MiB", "give the path of a recipe file")
    document.room = len(text) + _SPARE
    try:
        roots = yaml.compose_all(text, Loader=yaml.SafeLoader)
        root, second = next(roots, None), next(roots, None)
        value = document.value(root, 1, "") if root is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = " ".join(filter(None, (error.context, error.problem)))
        document.fail(line, f"malformed YAML at column {column}: {what}", fix)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"character U+{int(error.character):04X} is not allowed in YAML"
        document.fail(line, what, "save the file as plain UTF-8 text")
    except (ValueError, OverflowError):  # from PyYAML, for "\\UFFFFFFFF" or a %YAML directive with five thousand digits
        document.fail(1, "malformed YAML: a number or character is out of range", fix)
    except RecursionError:
        what = "the YAML is nested too deeply, or an alias refers to a value that contains it"
        document.fail(1, what, "a recipe needs five levels; write such values in full")
    if second is not None:
        what = "a second YAML document begins here, as in a file for mergekit-multi; a recipe is one document"
        document.fail(_line(second), what, "put each document into a file of its own, and merge one after the other")
    if value is None:
        document.fail(1, "the recipe is empty", "write at least base_model: and parts:")
    if value.kind != "mapping":
        document.fail(value.line, "the recipe must be a mapping", "write keys, e.g. base_model: runs/a/checkpoint-300")
    return value


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line + 1
    return line
