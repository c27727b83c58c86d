"""Selectors: each form, each mistake, and all of them against a slow oracle."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.model.parts import ModelStructure, layer_part
from llmtailor.recipe.selectors import select
from recipe.structures import EMBED_NAME, HEAD_NAME, check, llama


def layers(*numbers: int) -> list[str]:
    return [f"layer {number}" for number in numbers]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (["first: 5"], layers(0, 1, 2, 3, 4)),
        (["1 - 1"], layers(1)),
        (["layers 2-3"], layers(2, 3)),
        (["layer 0-1"], layers(0, 1)),
        (["layers 0, 2-3"], layers(0, 2, 3)),
        ([" wpe "], ["wpe"]),
        (["all"], ["embed_tokens", *layers(0, 1, 2, 3, 4), "norm", "lm_head", "wpe"]),
        (["odd", "norm", "first:1"], [*layers(0, 1, 3), "norm"]),
        (["!layers", "2"], ["embed_tokens", "layer 2", "norm", "lm_head", "wpe"]),
        (["! layers", "!wpe"], ["embed_tokens", "norm", "lm_head"]),
        (["odd", "!3", "3"], layers(1, 3)),
    ],
)
def test_forms(selectors: list[str], expected: list[str]):
    """What the oracle below does not draw, and how a list adds up."""
    structure = llama(5, extra={"wpe.weight": "wpe"})
    chosen, problems = select(selectors, structure)
    assert not problems
    assert chosen == {name for part in expected for name in structure.names(part)}


def test_the_tied_name_is_understood_though_no_tensor_has_it():
    structure = llama(2, tied=True)
    part_of = {name: part for name, part in structure.part_of.items() if name != HEAD_NAME}
    unlisted = ModelStructure(part_of, structure.parts, 2, tied=True)
    for selector in ("lm_head", HEAD_NAME):
        assert select([selector], unlisted) == ({EMBED_NAME}, ())


@pytest.mark.parametrize(
    ("selectors", "what", "fix"),
    [
        (["5"], "'5' is out of range", "5 layers, 0-4"),
        (["layers 1, 5"], "'layers 1, 5' is out of range", "5 layers, 0-4"),
        (["first:6"], "'first:6' is out of range", "5 layers, 0-4"),
        (["last:" + "9" * 5000], "is out of range", "5 layers, 0-4"),
        (["0-" + "9" * 5000], "is out of range", "5 layers, 0-4"),
        (["first:x"], "'first:x' lacks a number", "first:2"),
        (["nrom"], "no part or tensor 'nrom'", "did you mean 'norm'?"),
        (["evn"], "no part or tensor 'evn'", "layers 0-4"),
        (["model.layers.0.mlp.up_prj.weight"], "no part or tensor", "did you mean 'model.layers.0.mlp.up_proj.weight'"),
        (["*.experts.*"], "'*.experts.*' matches no tensor name", "model.embed_tokens.weight"),
        (["*.MLP.*"], "matches no tensor name", ""),
        (["mlp*"], "matches no tensor name", ""),
        (["even", "!3"], "'!3' excludes nothing", "after a selector"),
        (["odd", "!odd"], "exclude everything that they select", "select something"),
        (["!all"], "exclude everything that they select", "select something"),
        (["all", "!nrom"], "no part or tensor 'nrom'", "did you mean 'norm'?"),
        ([], "there is no selector", "even"),
    ],
)
def test_mistakes(selectors: list[str], what: str, fix: str):
    _, found = select(selectors, llama(5), "recipe.yaml:3 parts[0]")
    check(found, (":3 parts[0]", what, fix))


@pytest.mark.parametrize("word", ["{}", "!{}", "{}*", "first:{}", "{}:", "4-0{}", "first:0{}", "{}.weight"])
def test_a_long_selector_is_not_echoed_whole(word: str):
    """Nor compared with every name to its end, which takes the square of its length."""
    for filling in ("9", "0", "x"):
        text = word.format(filling * 30_000)
        _, problems = select(["all", text], llama(5))
        assert all(len(problem.what) < 200 and len(problem.fix) < 1000 for problem in problems)


def test_all_mistakes_of_a_list_are_told_and_the_rest_is_selected():
    structure = llama(5)
    chosen, problems = select(["9", "odd", "nrom", "first:0"], structure)
    assert len(problems) == 3
    assert {structure.part_of[name] for name in chosen} == set(layers(1, 3))


@pytest.mark.parametrize(("num_layers", "told"), [(0, "no layers"), (1, "1 layer, number 0")])
def test_small_models_are_described_rightly(num_layers: int, told: str):
    assert told in select(["7"], llama(num_layers))[1][0].fix
    assert told in select(["odd"], llama(num_layers))[1][0].fix


def test_a_span_is_no_matter_of_size():
    """A hostile file can claim a huge layer number; nothing is counted out one by one."""
    last = layer_part(999999)
    huge = ModelStructure({"model.layers.999999.mlp.w": last}, (last,), 1_000_000, tied=False)
    assert select(["odd"], huge)[0] == {"model.layers.999999.mlp.w"}


# The oracle: what each selector says about one name, decided name by name in the plainest way.


def says(word: str, name: str, structure: ModelStructure) -> bool:
    part = structure.part_of[name]
    names = structure.names(part) if structure.tied and part == "embed_tokens" else [name]
    number = int(part.split(" ")[1]) if part.startswith("layer ") else None
    if any(sign in word for sign in "*?["):
        return any(fnmatchcase(each, word) for each in names)
    if word == "all":
        return True
    if word == "lm_head" and structure.tied:
        word = "embed_tokens"
    if word in (part, *names):
        return True
    if number is None:
        return False
    count = structure.num_layers
    if word in ("even", "odd", "layers"):
        return {"even": number % 2 == 0, "odd": number % 2 == 1, "layers": True}[word]
    if word.startswith("first:"):
        return number < int(word[6:])
    if word.startswith("last:"):
        return number >= count - int(word[5:])
    if "-" in word and word.replace("-", "").isdigit():
        low, high = word.split("-")
        return int(low) <= number <= int(high)
    return word == str(number)


def oracle(selectors: list[str], structure: ModelStructure) -> set[str]:
    chosen = set()
    for name in structure.part_of:
        inside = selectors[0].startswith("!")
        for text in selectors:
            if says(text.removeprefix("!"), name, structure):
                inside = not text.startswith("!")
        if inside:
            chosen.add(name)
    return chosen


@st.composite
def selector_lists(draw: st.DrawFn, num_layers: int) -> list[str]:
    index = st.integers(0, num_layers - 1)
    count = st.integers(1, num_layers)
    plain = st.sampled_from(
        ["even", "odd", "layers", "all", "*", "norm", "lm_head", "embed_tokens", "wpe", "*.mlp.*", "*norm*", "lm_*",
         "model.layers.0.mlp.up_proj.weight", HEAD_NAME, EMBED_NAME,
         "*.bias", "lm_head.*", "*embed_tokens*", "*.[02].*", "model.layers.?.*_proj.weight"]
    )  # fmt: skip
    word = st.one_of(
        plain,
        index.map(str),
        index.map("layer {}".format),
        count.map("first:{}".format),
        count.map("last:{}".format),
        st.tuples(index, index).map(lambda pair: f"{min(pair)}-{max(pair)}"),
    )
    return draw(st.lists(st.tuples(st.sampled_from(["", "", "!"]), word).map("".join), min_size=1, max_size=6))


@given(st.data(), st.integers(1, 12), st.booleans())
def test_selecting_equals_the_oracle(data: st.DataObject, num_layers: int, tied: bool):
    structure = llama(num_layers, tied=tied, extra={"wpe.weight": "wpe", "model.embed_tokens.bias": "embed_tokens"})
    selectors = data.draw(selector_lists(num_layers))
    chosen, problems = select(selectors, structure)
    expected = oracle(selectors, structure)
    assert chosen == expected  # with problems too: selectors that select or take out nothing change nothing
    assert expected or problems
    idle = ("excludes nothing", "selects nothing", "exclude everything", "matches no tensor name")
    assert all(any(words in problem.what for words in idle) for problem in problems), problems
