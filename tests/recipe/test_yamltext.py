"""The YAML reader: lines of everything, and hostile or broken texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.recipe.yaml_tree import MAX_BYTES, Document, Value, read_yaml
from recipe.structures import check, problems_of


def read(text: str) -> Value:
    document = Document("r.yaml", Path("/w"), {})
    value = read_yaml(text, document)
    document.raise_problems()
    return value


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1", "int"), ("010", "int"), ("1.5", "float"), ("yes", "bool"), ("~", "null"), ("''", "str"), ("'1'", "str"),
     ("2024-01-01", "timestamp"), ("x", "str"), ("!!str 1", "str")],
)  # fmt: skip
def test_scalars_stay_text_and_have_the_type_that_yaml_gives_them(text: str, kind: str):
    value = read(f"a: {text}").entries["a"]
    assert (value.kind, value.text) == (kind, text.removeprefix("!!str ").strip("'"))


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: [1\nb: 2\n", "r.yaml:2", "malformed YAML at column"),
        ("a: b: c\n", "r.yaml:1", "mapping values are not allowed"),
        ("a:\n\t- b\n", "r.yaml:2", "cannot start any token"),
        ("ok: 1\na: *.mlp.*\n", "r.yaml:2", "malformed YAML at column 5"),
        ("ok: 1\na: *gone\n", "r.yaml:2", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "r.yaml:3", "a second YAML document"),
        ("a: 1\nb: \x07\n", "r.yaml:2", "character U+0007 is not allowed in YAML"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "r.yaml:4 b.c", "the key 'c' is repeated, first in line 3"),
        ("- a\n", "r.yaml:1", "must be a mapping"),
        ("text\n", "r.yaml:1", "must be a mapping"),
        ("", "r.yaml:1", "empty"),
        ("# nothing\n", "r.yaml:1", "empty"),
        ("a: 1\n2: x\n", "r.yaml:2", "a key must be plain text"),
        ("a: 1\n[x]: x\n", "r.yaml:2", "a key must be plain text"),
        ("a: !!python/object/apply:os.system [ls]\n", "r.yaml:1 a", "!!python/object/apply:os.system"),
        ("a:\n  - !norm\n", "r.yaml:2 a[0]", "the tag !norm"),
        ("a: !!set {x, y}\n", "r.yaml:1 a", "!!set"),
        *((text, "r.yaml:1", "an alias refers to a value that contains it")
          for text in ("a: &a [x, *a]\n", "a: &a {b: *a}\n", "a: &a {<<: *a}\n", "a: &a [*a, *a]\n")),
        ("a:\n  <<: text\n", "r.yaml:2 a", "<< takes a mapping"),
        ("[\n" * 1_500, "r.yaml:1", "nested too deeply"),
        ("a: " + "{b: " * 1_500, "r.yaml:1", "nested too deeply"),
        ("a: '" + "x" * MAX_BYTES + "'", "r.yaml:1", "larger than 1 MiB"),
        ("a: '" + "ä" * (MAX_BYTES // 2) + "'", "r.yaml:1", "larger than 1 MiB"),
    ],
)  # fmt: skip
def test_problems_are_reported_with_their_line(text: str, where: str, what: str):
    check(problems_of(lambda: read(text)), (where, what, '"!norm"' if "norm" in text else ""))


def test_aliases_and_merges_are_expanded():
    top = read("base: &b {model: x, n: 1}\nlist: [*b, *b]\nmore: {<<: *b, n: 2}\nboth: {<<: [{n: 3}, *b]}\n")
    mappings = [top.entries["base"], *top.entries["list"].items, top.entries["more"], top.entries["both"]]
    found = [{key: value.text for key, value in mapping.entries.items()} for mapping in mappings]
    base = {"model": "x", "n": "1"}
    assert found == [base, base, base, {"n": "2", "model": "x"}, {"n": "3", "model": "x"}]
    assert top.entries["more"].entries["model"].path == "more.model"


@given(st.text(alphabet="ab:-[]{}&*!|>'\"# \n\t\x00ä", max_size=60))
def test_any_text_gives_a_mapping_or_problems(text: str):
    read_it: list[Value] = []
    assert problems_of(lambda: read_it.append(read(text))) or read_it[0].kind == "mapping"
