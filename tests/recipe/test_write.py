"""Recipes written as YAML: they read well, and read back as what they were written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cases import examples
from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe import Assignment, Recipe
from llmtailor.recipe.emit import selectors_for, write_normal_form, write_recipe
from llmtailor.recipe.parse import parse_recipe
from llmtailor.recipe.resolve import resolve
from llmtailor.recipe.selectors import select
from llmtailor.recipe.strategies import StrategyOptions, assign
from recipe.structures import EMBED_NAME, HEAD_NAME, check, full, llama, params_of, problems_of, read

STRANGE = {
    "wpe.weight": "wpe", "cls_token": "cls_token", "cls_token.bias": "cls_token", "visual.blocks.0.w": "v.blocks.0",
    "odd.[x]*.weight": "odd one", "odd.[x]*.bias": "odd one", "odd.[x]*.scale": "odd one", "odd.x.weight": "x",
    "a: b": "null", "7": "seven", "even": "first:2", "lm_head.scale": "# no comment",
}  # fmt: skip
"""Tensors whose names, or whose parts' names, mean something else to YAML or in a selector."""
BASE, A, B = Path("/w/base"), Path("/w/a"), Path("/w/b")


RUN = [full(step) for step in (100, 200, 300, 400)]


def read_back(text: str, folder: Path | None) -> Recipe:
    """Parse it; no variable is set, and ``~`` is someone's home."""
    return parse_recipe(text, name="r.yaml", folder=folder or Path("/elsewhere"), environ={"HOME": "/home/me"})


def mlp(*layers: int) -> list[str]:
    return [f"model.layers.{number}.mlp.up_proj.weight" for number in layers]


def layers(*numbers: int) -> list[str]:
    return [f"layer {number}" for number in numbers]


OTHERS = ["embed_tokens", "norm", "lm_head"]
NAMED = llama(2, extra={**STRANGE, "x[0]": "x[0]"})


@pytest.mark.parametrize(
    ("structure", "names_or_parts", "expected"),
    [
        (llama(7), layers(0, 2, 4, 6), ["even"]),
        (llama(7), [*layers(1, 3, 5), "norm"], ["odd", "norm"]),
        (llama(7), layers(2, 3, 4), ["2-4"]),
        (llama(7), layers(0, 1, 4, 6), ["0-1", "4", "6"]),
        (llama(7), layers(*range(7)), ["layers"]),
        (llama(1), layers(0), ["layers"]),
        (llama(2), layers(1), ["1"]),
        (llama(7), [*layers(*range(6)), *OTHERS], ["0-5", *OTHERS]),
        # tensors of parts by name
        (llama(7), mlp(0, 1, 3), mlp(0, 1, 3)),
        (llama(7), ["norm", "layer 2", *mlp(4)], ["2", "norm", *mlp(4)]),
        # names that look like something else
        (NAMED, ["odd.[x]*.weight", "x[0]"], ["odd.[[]x][*].weight", "x[[]0]"]),
        (NAMED, ["a: b", "7", "even"], ["null", "seven", "[e]ven"]),
        (llama(2, extra={"!a": "!a", "!b": "!b"}), [*layers(0, 1), *OTHERS], ["layers", *OTHERS]),
        (llama(2, extra={"!a": "!a", "!b": "!b"}), ["!a"], None),
    ],
)  # fmt: skip
def test_spelling(structure, names_or_parts, expected):
    names = {name for name, part in structure.part_of.items() if not {name, part}.isdisjoint(names_or_parts)}
    if expected is None:
        refused = problems_of(lambda: selectors_for(names, structure))
        check(refused, ("!a", "selectors can't distinguish these tensors from others: '!a'", "from the base"))
    else:
        assert list(selectors_for(names, structure)) == expected
        assert select(expected, structure) == (names, ())


@st.composite
def structures(draw: st.DrawFn) -> ModelStructure:
    extra = draw(st.dictionaries(st.sampled_from(sorted(STRANGE)), st.none()))
    found = llama(draw(st.integers(1, 9)), tied=draw(st.booleans()), extra={name: STRANGE[name] for name in extra})
    gone = draw(st.none() | st.integers(0, found.num_layers - 1))  # a layer may have no tensors
    if gone is None or found.num_layers == 1:
        return found
    part_of = {name: part for name, part in found.part_of.items() if part != f"layer {gone}"}
    return ModelStructure(
        part_of, tuple(part for part in found.parts if part != f"layer {gone}"), found.num_layers, found.tied
    )


@given(structure=structures(), data=st.data())
def test_a_spelling_selects_exactly_what_it_was_made_from(structure, data):
    names = data.draw(st.sets(st.sampled_from(list(structure.part_of)), min_size=1))
    if structure.tied and names & {EMBED_NAME, HEAD_NAME}:
        names |= {EMBED_NAME, HEAD_NAME}
    assert select(selectors_for(names, structure), structure) == (names, ())


def test_a_recipe_reads_like_this():
    structure = llama(4)
    text = write_recipe(assign(RUN, structure, StrategyOptions("parity")), structure, Path("/w"))
    assert (
        text
        == """\
# strategy parity at step 400
# step 400: embed_tokens, norm, lm_head (newest); layers 0, 2 (even: newest); schedule, random
# number states and trainer state
# step 300: layers 1, 3 (odd: one before)
merge_method: passthrough
base_model: run/checkpoint-400
parts:
- {from: run/checkpoint-300, select: odd}
"""
    )


def test_sources_come_newest_first():
    structure = llama(6)
    steps = {"layer 0": 200, "layer 1": 300, "layer 2": 100}
    source_of = {part: full(steps.get(part, 400)) for part in structure.parts}
    found = Assignment(full(400), source_of, dict.fromkeys(source_of, "why"), "x")
    entries = yaml.safe_load(write_recipe(found, structure, Path("/w/run")))["parts"]
    assert [entry["from"] for entry in entries] == ["checkpoint-300", "checkpoint-200", "checkpoint-100"]


def test_a_base_that_supplies_everything_or_nothing():
    structure = llama(2)
    text = write_recipe(assign(RUN, structure, StrategyOptions("latest")), structure, None)
    assert yaml.safe_load(text) == {"merge_method": "passthrough", "base_model": "/w/run/checkpoint-400"}
    nothing = Assignment(
        full(400), dict.fromkeys(structure.parts, full(401)), dict.fromkeys(structure.parts, "why"), ""
    )
    text = write_recipe(nothing, structure, None)
    assert yaml.safe_load(text)["parts"] == [{"from": "/w/run/checkpoint-401", "select": "all"}]
    assert "# step 400: schedule" in text and "# step 401: embed_tokens, " in text
    assert resolve(read(text), structure, full(400).path, params_of(structure)).filled == ()


def test_the_header_stays_a_comment():
    structure = llama(2)
    header = [
        "skipped: /r/a\nbase_model: x",
        "\x85- from: y",
        "z\u2028parts: 1\r\x00\udcff",
        "",
        "w" * 300,
        "a b " * 50,
    ]
    text = write_recipe(assign(RUN, structure, StrategyOptions("latest")), structure, None, header)
    assert yaml.safe_load(text).keys() == {"merge_method", "base_model"}
    assert "strategy latest" not in text  # the header takes its place
    for line in ("# base_model: x", "# - from: y", "# parts: 1", "# \\x00\\udcff", "# " + "w" * 300):
        assert line in text.splitlines()
    assert all(len(line) <= 100 for line in text.splitlines() if "www" not in line)


@pytest.mark.parametrize(
    ("path", "folder", "written"),
    [
        ("/w/run/checkpoint-1", None, "/w/run/checkpoint-1"),
        ("/w/run/checkpoint-1", "/w/run", "checkpoint-1"),
        ("/w/run/checkpoint-1", "/w", "run/checkpoint-1"),
        ("/w/run/checkpoint-1", "/w/recipes", "../run/checkpoint-1"),
        ("/w/run/checkpoint-1", "/w/recipes/old", "/w/run/checkpoint-1"),
        ("/w/run/checkpoint-1", "/w/run/checkpoint-1", "."),
        ("/w/run/../x/checkpoint-1", "/w", "x/checkpoint-1"),
        ("/w/my run/a b", "/w", "my run/a b"),
        ("/w/~/c", "/w", "./~/c"),
        ("/w/null", "/w", "null"),
        ("/w/base", "/w", "./base"),
        ("/w/a: b #c", "/w", "a: b #c"),
        ('/w/"q"\\n', "/w", '"q"\\n'),
        ("/w/a\tb\nc\x07", "/w", "a\tb\nc\x07"),
        ("/w/\U0001f600\ufeff\u2028", "/w", "\U0001f600\ufeff\u2028"),
        ("/w/a+b", "/w", {"path": "a+b"}),
        ("/w/$RUN/${a", "/w", "$$RUN/$${a"),
        ("/w/-a", "/w", "-a"),
        ("/w/{a}, [b]", "/w", "{a}, [b]"),
    ],
)
def test_paths(path, folder, written):
    structure = llama(1)
    found = assign([RunCheckpoint(Path(path), 5, None)], structure, StrategyOptions("latest"))
    where = Path(folder) if folder else None
    text = write_recipe(found, structure, where)
    assert yaml.safe_load(text)["base_model"] == written
    recipe = read_back(text, where)
    assert str(recipe.base) == path.replace("/run/..", "")


def test_paths_that_can_not_be_written():
    structure = llama(2)
    run = [RunCheckpoint(Path("/w/\udcff") / name, step, None) for step, name in enumerate("ab")]
    found = assign(run, structure, StrategyOptions("parity"))
    refused = problems_of(lambda: write_recipe(found, structure, Path("/elsewhere")))
    check(refused, ("/w/\\udcff/b", "not UTF-8", "symlink"), ("/w/\\udcff/a", "not UTF-8", "symlink"))


FOLDER_NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=6)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[ModelStructure, Assignment]:
    structure = draw(structures())
    names = draw(
        st.lists(FOLDER_NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4, unique=True)
    )
    paths = [Path("/w") / draw(st.sampled_from(["", "a", "b/c", "x y"])) / name for name in names]
    run = [RunCheckpoint(path, draw(st.integers(0, 3)), None) for path in paths]
    source_of = {part: draw(st.sampled_from(run)) for part in structure.parts}
    reason = {part: draw(st.sampled_from(["newest", "odd", "# x\ny: z"])) for part in structure.parts}
    return structure, Assignment(draw(st.sampled_from(run)), source_of, reason, draw(st.text()))


@settings(max_examples=examples(30, 300))
@given(case=assignments(), folder=st.sampled_from([None, "/w", "/w/a", "/w/b/c", "/far/away/from"]))
def test_the_recipe_of_an_assignment_and_its_text_mean_the_same(case, folder):
    structure, assignment = case
    where = Path(folder) if folder else None
    recipe = read_back(write_recipe(assignment, structure, where), where)
    assert recipe.base == assignment.base.path
    assert recipe.notices == ()
    of = Recipe.of(assignment, "r")
    assert of.base == recipe.base and set(of.sources()) == {of.base, *recipe.sources()}
    expected = {name: assignment.source_of[part].path for name, part in structure.part_of.items()}
    for each in (recipe, of):
        assert resolve(each, structure, recipe.base, params_of(structure)).source_of == expected
    assert resolve(of, structure, recipe.base, params_of(structure)).filled == ()


def normal_form(
    text: str, structure: ModelStructure, folder: Path | None = Path("/w"), base: Path = BASE, **more: bool
) -> str:
    """Read a recipe, write its normal form, and see that this means the same."""
    recipe = read(text)
    choice = resolve(recipe, structure, base, params_of(structure), **more)
    written = write_normal_form(recipe, choice.source_of, base, structure, folder, weights_of=choice.weights_of)
    again = read_back(written, folder)
    assert again.base == base
    assert (again.dtype, again.output, again.tokenizer, again.chat_template) == (
        recipe.dtype, recipe.output, recipe.tokenizer, recipe.chat_template,
    )  # fmt: skip
    second = resolve(again, structure, base, params_of(structure), **more)
    assert (second.source_of, second.weights_of) == (choice.source_of, choice.weights_of)
    return written


def test_the_normal_form_of_the_originals_yaml():
    original = """
slices:
  - sources: [{model: run/checkpoint-300, layer_range: [0, 0]}]
  - sources: [{model: run/checkpoint-300, layer_range: [0, 2]}]
  - sources: [{model: run/checkpoint-400, layer_range: [2, 4]}]
  - sources: [{model: run/checkpoint-400, layer_range: [5, 5]}]
  - sources: [{model: run/checkpoint-400, layer_range: [6, 6]}]
pre_weights: [{name: model.norm.weight, model: run/checkpoint-300}]
dtype: bf16
output: out/checkpoint-400
"""
    assert (
        normal_form(original, llama(4), base=Path("/w/run/checkpoint-400"))
        == """\
# the short form of recipe.yaml
merge_method: passthrough
base_model: run/checkpoint-400
parts:
- from: run/checkpoint-300
  select: [0-1, norm]
dtype: bfloat16
output: out/checkpoint-400
"""
    )


ODD_NAME = "model.layers.0.a, b}: #"
TEMPLATE = "{% for one in messages %}" + "{{ one.content }} " * 200 + "{% endfor %}"
SLICE = "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]"


@pytest.mark.parametrize(
    ("text", "structure", "expected"),
    [
        ("parts: [{from: a, select: ['*.mlp.*', '!*.0.*', norm]}]", llama(4),
         {"parts": [{"from": "a", "select": ["norm", *mlp(1, 2, 3)]}]}),
        ("tokenizer_source: tok/x\nchat_template: |\n  {% if a %}: #x\n    {{ b }}\ndtype: half\n", llama(1),
         {"tokenizer_source": "tok/x", "chat_template": "{% if a %}: #x\n  {{ b }}\n", "dtype": "float16"}),
        # longer than what messages show of a text
        (f"chat_template: '{TEMPLATE}'", llama(1), {"chat_template": TEMPLATE}),
        # sources that nothing comes from are left out
        ("parts: [{from: a, select: all}, {from: b, select: all}]", llama(2),
         {"parts": [{"from": "b", "select": "all"}]}),
        # weights without their optimizer states
        ("""\
slices:
  - sources: [{model: a, layer_range: [0, 0]}]
  - sources: [{model: a, layer_range: [0, 3]}]
post_weights:
  - {name: model.norm.weight, model: b}
  - {name: model.layers.1.mlp.up_proj.weight, model: b}
  - {name: lm_head, model: b}
""", llama(4),
         {"parts": [{"from": "a", "select": "even"}, {"from": "b", "select": "lm_head"}],
          "slices": [{"sources": [{"model": "a", "layer_range": bounds}]} for bounds in ([1, 2], [0, 0])],
          "post_weights": [{"name": mlp(1)[0], "model": "b"}, {"name": "norm", "model": "b"}]}),
        (f'{SLICE}\npost_weights: [{{name: "{ODD_NAME}", model: b}}]', llama(1, extra={ODD_NAME: "layer 0"}),
         {"slices": [{"sources": [{"model": "a", "layer_range": [0, 1]}]}],
          "post_weights": [{"name": ODD_NAME, "model": "b"}]}),
    ],
)  # fmt: skip
def test_the_normal_form(text, structure, expected):
    written = normal_form(f"base_model: base\n{text}", structure, allow_split=True)
    assert yaml.safe_load(written) == {"merge_method": "passthrough", "base_model": "./base"} | expected


def test_what_the_normal_form_can_not_say():
    structure = llama(2, extra={"wpe.weight": "wpe"})
    recipe = read("base_model: base")
    same: Mapping[str, Path] = dict.fromkeys(structure.part_of, BASE)
    torn = {**same, mlp(0)[0]: B}
    weights = {EMBED_NAME: A, "model.layers.0.input_layernorm.weight": A}
    unsaid = "can't express different sources"
    for source_of, output, weights_of, expected in (
        (same, None, {"wpe.weight": A}, [("wpe", unsaid, "keep")]),
        (torn, Path("/\udcff"), weights, [("layer 0", unsaid, "keep"), ("/\\udcff", "not UTF-8", "")]),
    ):
        write = partial(write_normal_form, replace(recipe, output=output), source_of, BASE, structure, None)
        check(problems_of(partial(write, weights_of=weights_of)), *expected)
