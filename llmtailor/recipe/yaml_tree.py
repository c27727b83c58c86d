"""YAML text to a tree that knows the line of every key and value. Nothing is constructed but text.

PyYAML's ``compose`` gives nodes, not objects, so no tag can run anything. Scalars stay as they were written: the
grammar decides what is a number, because YAML 1.1 would read ``010`` as 8 and ``1:30`` as 90.

Typed access to the YAML tree. Every wrong value becomes a flaw and None, so that reading goes on.

Paths as a recipe writes them: relative to its folder, with ``~`` and environment variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from llmtailor.errors import Problem
from llmtailor.recipe.text import Misspelt, nearest, quote

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
"""After expanding aliases. A recipe of a 100-layer model, a slice per layer, has about 1,000."""

CORE_TAG = "tag:yaml.org,2002:"
SCALAR_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
MEND = (
    "check indentation and brackets; quote texts that begin with * ! & { % @ or contain ': ', "
    'e.g. select: ["*.mlp.*", "!norm"]'
)


@dataclass(frozen=True, slots=True)
class Scalar:
    text: str
    kind: str
    """What YAML takes it for: ``str``, ``int``, ``float``, ``bool``, ``null`` or ``timestamp``"""
    line: int


@dataclass(frozen=True, slots=True)
class Items:
    items: tuple[Value, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Table:
    entries: dict[str, Value]
    lines: dict[str, int]
    """Of the keys."""
    line: int


Value = Scalar | Items | Table


def is_null(value: Value | None) -> bool:
    """Tell whether a key is there with nothing behind it; mergekit writes keys that it does not use as ``null``."""
    return isinstance(value, Scalar) and value.kind == "null"


@dataclass(frozen=True, slots=True)
class Flaw:
    """A problem with its line, so that problems can be sorted."""

    line: int
    problem: Problem


def place(name: str, line: int, path: str = "") -> str:
    """Return a recipe location, e.g. ``recipe.yaml:12 slices[0].sources[0]``."""
    return f"{name}:{line} {path}" if path else f"{name}:{line}"


class _TooMuch(Exception):
    pass


class _Loader(yaml.SafeLoader):
    """Gives up early on a text with far too many values; PyYAML takes seconds for a MiB of them."""

    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.num_nodes += 1
        if self.num_nodes > 2 * MAX_NODES:  # keys are nodes too
            raise _TooMuch
        return super().compose_node(parent, index)


def read_yaml(text: str, name: str) -> tuple[Table | None, list[Flaw]]:
    """Read the text of one recipe; `name` is what messages call it.

    Returns the top-level mapping, or None when there is none to go on with, and what is wrong: malformed YAML,
    duplicate keys (the first one stays), keys that aren't text, tags, aliases that blow up or contain themselves.
    """
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        return None, [Flaw(1, Problem(name, "the recipe is larger than 1 MiB", "give the path of a recipe file"))]
    try:
        root = yaml.compose(text, Loader=_Loader)
        reader = _Reader(name)
        value = reader.value(root, "", frozenset()) if root is not None else None
    except yaml.MarkedYAMLError as error:
        return None, [_malformed(error, name)]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"character U+{int(error.character):04X} is not allowed in YAML"
        return None, [Flaw(line, Problem(place(name, line), what, "save the file as plain UTF-8 text"))]
    except (ValueError, OverflowError):  # PyYAML's own, on "\\UFFFFFFFF" or a %YAML of five thousand digits
        what = "malformed YAML: a number or a character in it is out of all bounds"
        return None, [Flaw(1, Problem(name, what, MEND))]
    except RecursionError:
        return None, [Flaw(1, Problem(name, "the YAML is nested too deeply", "a recipe needs five levels"))]
    except _TooMuch:
        what = f"the recipe holds more than {MAX_NODES:,} values, counting each alias as what it stands for"
        return None, [Flaw(1, Problem(name, what, "write it shorter, and without nested aliases"))]
    if root is None or value is None:
        return None, [Flaw(1, Problem(name, "the recipe is empty", "write at least base_model: and parts:"))]
    if not isinstance(value, Table):
        fix = "write keys, e.g. base_model: runs/a/checkpoint-300"
        reader.flaw(root, "", "the recipe must be a mapping of keys to values", fix)
        return None, reader.flaws
    return value, reader.flaws


def _malformed(error: yaml.MarkedYAMLError, name: str) -> Flaw:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = " ".join(filter(None, (error.context, error.problem)))
    return Flaw(line, Problem(place(name, line), f"malformed YAML at column {column}: {what}", MEND))


class _Reader:
    """Turns nodes into values, and collects flaws."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.flaws: list[Flaw] = []
        self.num_nodes = 0

    def flaw(self, node: yaml.Node, path: str, what: str, fix: str) -> None:
        line = node.start_mark.line + 1
        self.flaws.append(Flaw(line, Problem(place(self.name, line, path), what, fix)))

    def value(self, node: yaml.Node, path: str, above: frozenset[int]) -> Value:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise _TooMuch
        line = node.start_mark.line + 1
        kind = node.tag.removeprefix(CORE_TAG)
        if isinstance(node, yaml.ScalarNode):
            if not node.tag.startswith(CORE_TAG) or kind not in SCALAR_TAGS:
                self._unknown_tag(node, path)
                return Scalar(node.value or node.tag, "str", line)  # the text that was meant, so that reading goes on
            return Scalar(self._text(node, path), kind, line)
        if id(node) in above:
            self.flaw(node, path, "an alias refers to what it is part of", "write the value out")
            return Scalar("", "null", line)
        above |= {id(node)}
        if kind not in ("seq", "map"):
            self._unknown_tag(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._table(node, path, above)
        return Items(tuple(self.value(item, f"{path}[{at}]", above) for at, item in enumerate(node.value)), line)

    def _table(self, node: yaml.MappingNode, path: str, above: frozenset[int]) -> Table:
        table = Table({}, {}, node.start_mark.line + 1)
        merged: list[Table] = []
        for key_node, value_node in node.value:
            if key_node.tag == f"{CORE_TAG}merge":
                merged += self._merged(value_node, path, above)
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{CORE_TAG}str":
                self.flaw(key_node, path, "a key must be a plain text", "write key: value")
                continue
            key = self._text(key_node, path)
            inside = f"{path}.{key}" if path else key
            if key in table.entries:
                what = f"the key {quote(key)} is there twice, first in line {table.lines[key]}"
                self.flaw(key_node, inside, what, "keep one of them")
                continue
            table.entries[key] = self.value(value_node, inside, above)
            table.lines[key] = key_node.start_mark.line + 1
        for other in merged:  # of several, the earlier one wins; what is written out wins over all
            for key, value in other.entries.items():
                if key not in table.entries:
                    table.entries[key], table.lines[key] = value, other.lines[key]
        return table

    def _merged(self, node: yaml.Node, path: str, above: frozenset[int]) -> list[Table]:
        value = self.value(node, f"{path}.<<" if path else "<<", above)
        tables = value.items if isinstance(value, Items) else (value,)
        if not all(isinstance(table, Table) for table in tables):
            self.flaw(node, path, "<< takes a mapping, or a list of them", "write <<: *anchor")
        return [table for table in tables if isinstance(table, Table)]

    def _text(self, node: yaml.ScalarNode, path: str) -> str:
        text: str = node.value
        if text.isascii() or text.isprintable() or not any("\ud800" <= character <= "\udfff" for character in text):
            return text
        self.flaw(node, path, "an escape stands for half a character (U+D800 to U+DFFF)", "write the character itself")
        return ""

    def _unknown_tag(self, node: yaml.Node, path: str) -> None:
        tag = node.tag.replace(CORE_TAG, "!!")
        fix = f'quote it if a negation is meant: "{tag}"' if tag[1:2] not in ("!", "") else "leave the tag out"
        self.flaw(node, path, f"the tag {tag} has no meaning in a recipe", fix)


_VARIABLE = re.compile(r"\$(?:\{([^}]*)(\}?)|([A-Za-z_][A-Za-z0-9_]*))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expand(text: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """Expand ``~``, ``$VAR`` and ``${VAR}``, and make the path absolute if `folder` is. Raises Misspelt.

    Symlinks stay: a path means what it meant to whoever wrote it. An empty variable is refused like an undefined one,
    because ``${RUN}/checkpoint-300`` would turn into ``/checkpoint-300``.
    """
    if not text.strip() or "\0" in text:
        raise Misspelt("the path is empty" if not text.strip() else "the path holds a NUL byte", "give a folder")
    home = ""
    if text == "~" or text.startswith("~/"):
        home, text = _value("HOME", environ), text[1:]
    elif text.startswith("~"):
        raise Misspelt(
            f"{quote(text.split('/')[0])} is not expanded", "write the home directory in full, or ~/ for your own"
        )
    expanded = home + _VARIABLE.sub(lambda match: _variable(match, environ), text)
    return Path(os.path.normpath(folder / expanded))


def _variable(match: re.Match[str], environ: Mapping[str, str]) -> str:
    braced, closed, plain = match.groups()
    name = plain or braced
    if plain is None and not (closed and _NAME.fullmatch(braced)):
        raise Misspelt(
            f"{quote(match[0])} is not a variable", "write ${NAME} or $NAME; defaults and the like are not known"
        )
    return _value(name, environ)


def _value(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise Misspelt(f"the environment variable {name} is not set", f"export {name}=..., or write the path out")
    if not environ[name]:
        raise Misspelt(f"the environment variable {name} is empty", f"export {name}=..., or write the path out")
    return environ[name]


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
