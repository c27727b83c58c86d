"""The YAML reader: lines of everything, and hostile or broken texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.recipe.yaml_tree import MAX_BYTES, Items, Scalar, Table, read_yaml


def flaws_of(text: str) -> list[str]:
    return [f"{flaw.problem.where}: {flaw.problem.what}" for flaw in read_yaml(text, "r.yaml")[1]]


def test_every_key_and_value_knows_its_line():
    table, flaws = read_yaml("a: 1\nb:\n  - x\n  - c: y\n\nd: >\n  text\n", "r.yaml")
    assert not flaws
    assert table is not None
    assert table.lines == {"a": 1, "b": 2, "d": 6}
    assert table.entries["a"] == Scalar("1", "int", 1)
    items = table.entries["b"]
    assert isinstance(items, Items)
    assert [item.line for item in items.items] == [3, 4]
    inner = items.items[1]
    assert isinstance(inner, Table)
    assert inner.entries["c"] == Scalar("y", "str", 4)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1", "int"), ("010", "int"), ("1.5", "float"), ("yes", "bool"), ("~", "null"), ("''", "str"), ("'1'", "str"),
     ("2024-01-01", "timestamp"), ("x", "str"), ("!!str 1", "str")],
)  # fmt: skip
def test_scalars_stay_text_and_say_what_yaml_takes_them_for(text: str, kind: str):
    table, flaws = read_yaml(f"a: {text}", "r.yaml")
    assert not flaws
    assert table is not None
    value = table.entries["a"]
    assert isinstance(value, Scalar)
    assert value.kind == kind
    assert value.text == text.removeprefix("!!str ").strip("'")


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: [1\nb: 2\n", "r.yaml:2", "malformed YAML at column"),
        ("a: b: c\n", "r.yaml:1", "mapping values are not allowed"),
        ("a:\n\t- b\n", "r.yaml:2", "cannot start any token"),
        ("ok: 1\na: *.mlp.*\n", "r.yaml:2", "malformed YAML at column 5"),
        ("ok: 1\na: *gone\n", "r.yaml:2", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2", "single document"),
        ("a: 1\nb: \x07\n", "r.yaml:2", "character U+0007 is not allowed in YAML"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "r.yaml:4 b.c", "the key 'c' is there twice, first in line 3"),
        ("- a\n", "r.yaml:1", "must be a mapping"),
        ("text\n", "r.yaml:1", "must be a mapping"),
        ("", "r.yaml", "empty"),
        ("# nothing\n", "r.yaml", "empty"),
        ("a: 1\n2: x\n", "r.yaml:2", "a key must be a plain text"),
        ("a: 1\n[x]: x\n", "r.yaml:2", "a key must be a plain text"),
        ("a: !!python/object/apply:os.system [ls]\n", "r.yaml:1 a", "!!python/object/apply:os.system"),
        ("a:\n  - !norm\n", "r.yaml:2 a[0]", "the tag !norm"),
        ("a: !!set {x, y}\n", "r.yaml:1 a", "!!set"),
        ("a: &a [x, *a]\n", "r.yaml:1 a[1]", "an alias refers to what it is part of"),
        ("a: &a {b: *a}\n", "r.yaml:1 a.b", "an alias refers to what it is part of"),
        ("a:\n  <<: text\n", "r.yaml:2 a", "<< takes a mapping"),
        ("[" * 20_000, "r.yaml", "nested too deeply"),
        ("a: " + "{b: " * 20_000, "r.yaml", "nested too deeply"),
        ("a: '" + "x" * MAX_BYTES + "'", "r.yaml", "larger than 1 MiB"),
        ("a: '" + "ä" * (MAX_BYTES // 2) + "'", "r.yaml", "larger than 1 MiB"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(text: str, where: str, what: str):
    _, flaws = read_yaml(text, "r.yaml")
    problem = flaws[0].problem
    assert (problem.where.split(": ")[0], what in problem.what, bool(problem.fix)) == (where, True, True), problem


def test_a_forgotten_quote_of_a_negation_is_explained():
    _, (flaw,) = read_yaml("select:\n  - !norm\n", "r.yaml")
    assert '"!norm"' in flaw.problem.fix


def test_a_bomb_of_aliases_is_refused():
    # expanded, these are 10^12 values: whatever does not stop counting never ends
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]" for at in range(1, 12)]
    assert "more than 50,000 values" in flaws_of("\n".join(lines))[0]


def test_a_text_of_far_too_many_values_is_refused():
    assert "more than 50,000 values" in flaws_of(("a: [" + "x," * MAX_BYTES)[: MAX_BYTES - 1] + "]")[0]


def test_aliases_and_merges_are_expanded():
    text = "base: &b {model: x, n: 1}\nlist: [*b, *b]\nmore: {<<: *b, n: 2}\nboth: {<<: [{n: 3}, *b]}\n"
    table, flaws = read_yaml(text, "r.yaml")
    assert not flaws
    assert table is not None
    items = table.entries["list"]
    assert isinstance(items, Items)
    assert items.items[0] == items.items[1] == table.entries["base"]
    told = {}
    for key in ("more", "both"):
        inner = table.entries[key]
        assert isinstance(inner, Table)
        told[key] = {name: value.text for name, value in inner.entries.items() if isinstance(value, Scalar)}
    assert told == {"more": {"n": "2", "model": "x"}, "both": {"n": "3", "model": "x"}}


def test_several_flaws_are_told_together():
    found = flaws_of("a: 1\na: 2\nb: !x y\n3: z\n")
    assert [line.split(" ")[0].rstrip(":") for line in found] == ["r.yaml:2", "r.yaml:3", "r.yaml:4"]


@given(st.text(alphabet="ab:-[]{}&*!|>'\"# \n\t\x00ä", max_size=60))
def test_any_text_gives_a_table_or_a_flaw(text: str):
    table, flaws = read_yaml(text, "r.yaml")
    assert table is not None or flaws
    assert all(flaw.problem.what and flaw.problem.fix and flaw.line >= 1 for flaw in flaws)
