"""YAML text to a tree that knows the line of every key and value. Nothing is constructed but text.

PyYAML's ``compose`` gives nodes, not objects, so no tag can run anything. Scalars stay as they were written: the
grammar decides what is a number, because YAML 1.1 would read ``010`` as 8 and ``1:30`` as 90.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from llmtailor.errors import Problem
from llmtailor.recipe.words import quote

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
