"""A recipe over a model: one source for each tensor, by tables made by hand."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from llmtailor.model.parts import ModelStructure, Part
from llmtailor.recipe.resolve import Choice, resolve
from recipe.structures import EMBED_NAME, HEAD_NAME, check, llama, params_of, problems_of, qwen_vl, read

BASE, A, B = Path("/w/base"), Path("/w/a"), Path("/w/b")
NORM_NAME, MLP = "model.norm.weight", "model.layers.{}.mlp.up_proj.weight"
FOUR, TIED, VL, UNKNOWN_VL = llama(4), llama(4, tied=True), qwen_vl(), qwen_vl(known=False)


def choose(text: str, structure: ModelStructure, params: Collection[str] = (), **more: bool) -> Choice:
    recipe = read(text)
    return resolve(recipe, structure, recipe.base or BASE, params or params_of(structure), **more)


def by_source(choice: Choice, structure: ModelStructure) -> dict[str, str]:
    """Return folder -> what comes from it: ``3`` for layer 3, parts and tensors by name; without what is the base's.

    Weights with another source than their optimizer states are under ``weights of FOLDER``.
    """
    assert choice.source_of.keys() == structure.part_of.keys()
    found: dict[str, list[str]] = {}
    for part in structure.parts:
        names = structure.names(part)
        sources = [(str(choice.source_of[name]), str(choice.weights_of.get(name, ""))) for name in names]
        alike = [names] if len(set(sources)) == 1 else [(name,) for name in names]
        for same in alike:
            what = part.removeprefix("layer ") if len(alike) == 1 else same[0]
            found.setdefault(str(choice.source_of[same[0]]), []).append(what)
            if same[0] in choice.weights_of:
                found.setdefault(f"weights of {choice.weights_of[same[0]]}", []).append(what)
    return {path.replace("/w/", ""): " ".join(these) for path, these in found.items() if path != "/w/base"}


def slices(*ranges: str, more: str = "") -> str:
    """Return slices as YAML; each is ``SOURCE START STOP``."""
    words = [text.split() for text in ranges]
    lines = [f"  - sources: [{{model: {model}, layer_range: [{start}, {stop}]}}]" for model, start, stop in words]
    return "\n".join(["base_model: base", "slices:", *lines, more])


def parts(*rules: str) -> str:
    """Return parts as YAML; each is ``SOURCE SELECTORS``."""
    listed = [f"{{from: {source}, select: [{rest}]}}" for source, _, rest in (rule.partition(" ") for rule in rules)]
    return f"base_model: base\nparts: [{', '.join(listed)}]\n"


def module(name: str, *bounds: int) -> str:
    if not bounds:
        return f"base_model: base\nmodules: {{{name}: {{models: [{{model: a}}]}}}}"
    return (
        f"base_model: base\nmodules: {{{name}: {{slices: [{{sources: [{{model: a, layer_range: {list(bounds)}}}]}}]}}}}"
    )


def weight(key: str, name: str, model: str = "a") -> str:
    return f"base_model: base\n{key}: [{{name: {name}, model: {model}}}]\n"


ALL = "embed_tokens 0 1 2 3 norm lm_head"
TOWER = "visual.patch_embed.proj visual.blocks.0 visual.blocks.1 visual.blocks.2 visual.blocks.3"
MERGER = "visual.merger.ln_q visual.merger.mlp.0 visual.merger.mlp.2"
BLOCKS = TOWER.partition(" ")[2]
ORIGINAL = slices(
    *("a 0 0", "a 0 2", "b 2 4", "b 5 5", "a 6 6"),
    more="pre_weights: [{name: model.norm.weight, model: a}]\n"
    "post_weights: [{name: lm_head.weight, model: b}, {name: model.embed_tokens.weight, model: a}]",
).replace("base_model: base\n", "")

CHOICES = [
    # text, structure, what comes from where
    # parts: later ones win, also over slices and weights
    (parts("a model.layers.1.mlp.*"), FOUR, {"a": MLP.format(1)}),
    (slices("base 0 4", more="pre_weights: [{name: norm, model: base}]\nparts: [{from: a, select: [1, norm]}]"), FOUR,
     {"a": "1 norm"}),
    ("parts: [{from: a, select: all}]", FOUR, {"a": ALL}),
    ("base_model: base\nslices: [{sources: [{model: a}]}]", FOUR, {"a": "0 1 2 3"}),
    # numbers of auxiliary parts
    *((slices(f"a {number} {number}"), structure, {"a": part})
      for structure, numbers in ((FOUR, {0: "norm", 5: "lm_head", 6: "embed_tokens"}),
                                 (TIED, {0: "norm", 5: "embed_tokens"}))
      for number, part in numbers.items()),
    (ORIGINAL, FOUR, {"a": "embed_tokens 0 1 norm", "b": "2 3 lm_head"}),
    # single weights: a tensor, or a part
    (weight("pre_weights", NORM_NAME), llama(4, extra={"model.norm.bias": "norm"}), {"a": NORM_NAME}),
    (weight("post_weights", "norm"), llama(4, extra={"model.norm.bias": "norm"}), {"a": "norm"}),
    *((weight("pre_weights", name), TIED, {"a": "embed_tokens"})
      for name in ("lm_head", HEAD_NAME, EMBED_NAME, "embed_tokens")),
    (slices("a 0 0", more="pre_weights: [{name: model.norm.weight, model: ./a/}]"), FOUR, {"a": "norm"}),
    # one model gives everything
    *((f"base_model: base\n{text}", FOUR, {"a": taken}) for text, taken in (
        ("models: [{model: a}]", ALL),
        ("models: [{model: a}]\nparts: [{from: base, select: norm}]", ALL.replace("norm ", "")))),
    ("base_model: base\nmodels: [{model: a}]", TIED, {"a": "embed_tokens 0 1 2 3 norm"}),
    ("base_model: base\nmodels: [{model: a}]", VL, {"a": f"{ALL} {TOWER} {MERGER}"}),
    # the text model by any of its names, whether mergekit knows the model or not
    *((module(name, 1, 3), structure, {"a": "1 2"}) for structure in (VL, UNKNOWN_VL, FOUR)
      for name in ("text_decoder", "language_model", "decoder", "default", "model", "llm")),
    *((module("text_decoder"), structure, {"a": ALL}) for structure in (VL, UNKNOWN_VL)),
    # submodels by mergekit's name, and by their path
    (module("vision_tower"), VL, {"a": TOWER}),
    (module("multi_modal_projector"), VL, {"a": MERGER}),
    *((module(name), structure, {"a": taken}) for structure in (VL, UNKNOWN_VL)
      for name, taken in (("visual", f"{TOWER} {MERGER}"), ("visual.blocks", BLOCKS), ("merger", MERGER))),
    # slices of a tower are its layers
    *((module(name, *bounds), structure, {"a": taken})
      for name, structure in (("vision_tower", VL), ("visual", UNKNOWN_VL), ("blocks", UNKNOWN_VL))
      for bounds, taken in (((0, 2), "visual.blocks.0 visual.blocks.1"), ((3, 4), "visual.blocks.3"))),
    ("base_model: base\nmodules: {vision_tower: {slices: [{sources: [{model: a}]}]}}", VL, {"a": BLOCKS}),
    ("""\
base_model: base
modules:
  text_decoder: {slices: [{sources: [{model: a, layer_range: [2, 4]}]}]}
  vision_tower: {slices: [{sources: [{model: b, layer_range: [0, 1]}]}]}
  multi_modal_projector: {models: [{model: a}]}
""", VL, {"a": f"2 3 {MERGER}", "b": "visual.blocks.0"}),
    # averages; parts override them
    ("merge_method: linear\nbase_model: base\nmodels: [{model: a, parameters: {weight: 1}}]\n"
     "parts: [{from: b, select: norm}]", FOUR, {"average of a (1)": ALL.replace("norm ", ""), "b": "norm"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "structure", "expected"), CHOICES)
def test_what_comes_from_where(text, structure, expected):
    assert by_source(choose(text, structure), structure) == expected


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("base_model: base", ALL),
        (parts("a model.layers.1.mlp.*"), "embed_tokens 0 1 (partly) 2 3 norm lm_head"),
        (parts("base norm", "a layers"), "embed_tokens lm_head"),
        (slices("a 0 0", more="pre_weights: [{name: lm_head, model: b}]"), "embed_tokens 0 1 2 3"),
        (ORIGINAL, ""),
        ("parts: [{from: a, select: all}]", ""),
    ],
)
def test_what_the_base_fills_is_listed(text: str, filled: str):
    assert " ".join(choose(text, FOUR).filled).replace("layer ", "") == filled


SPLITS = [
    # text, structure, what comes from where, the parts that are split
    (slices("a 0 0", more="pre_weights: [{name: model.norm.weight, model: b}]"), FOUR,
     {"a": "norm", "weights of b": "norm"}, "norm"),
    (slices("a 0 4", more="post_weights: [{name: layer 1, model: b}]"), FOUR,
     {"a": "0 1 2 3", "weights of b": "1"}, "layer 1"),
    (slices("a 2 3", more=f"post_weights: [{{name: {MLP.format(2)}, model: b}}]"), FOUR,
     {"a": " ".join(FOUR.names("layer 2")), "weights of b": MLP.format(2)}, "layer 2 (partly)"),
    ("models: [{model: a}]\nbase_model: base\npre_weights: [{name: norm, model: b}]", FOUR,
     {"a": ALL, "weights of b": "norm"}, "norm"),
    ("pre_weights: [{name: norm, model: b}]\n" + slices("a 0 0"), FOUR, {"a": "norm", "weights of b": "norm"}, "norm"),
    (slices("a 0 0", more="pre_weights: [{name: norm, model: base}]"), FOUR,
     {"a": "norm", "weights of base": "norm"}, "norm"),
    (slices("a 5 5", more="post_weights: [{name: lm_head.weight, model: b}]"), TIED,
     {"a": "embed_tokens", "weights of b": "embed_tokens"}, "embed_tokens"),
    # a weight that no other rule names takes its optimizer along; agreement splits nothing; parts override both
    (weight("pre_weights", "norm"), FOUR, {"a": "norm"}, ""),
    (slices("b 0 0", more="pre_weights: [{name: norm, model: b}]"), FOUR, {"b": "norm"}, ""),
    (slices("a 0 0", more="pre_weights: [{name: norm, model: b}]\nparts: [{from: c, select: norm}]"), FOUR,
     {"c": "norm"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "structure", "expected", "split"), SPLITS)
def test_weights_and_optimizer_from_different_checkpoints(text, structure, expected, split):
    choice = choose(text, structure, allow_split=True)
    assert by_source(choice, structure) == expected
    assert ", ".join(choice.split) == split
    assert not set(expected.get("a", "").split()) & set(choice.filled)


PRE, POST = "pre_weights", "post_weights"
HEADLESS = ModelStructure(
    {name: part for name, part in llama(2).part_of.items() if part != "lm_head"}, llama(2).parts[:-1], 2, tied=False
)
TWO_STACKS = ModelStructure(
    UNKNOWN_VL.part_of | {"model.visual.deepstack.0.norm.weight": Part("visual.deepstack.0")},
    (*UNKNOWN_VL.parts, Part("visual.deepstack.0")), 4, tied=False,
)  # fmt: skip
RANGE, MODULE = ":3 slices[0].sources[0].layer_range", ":2 modules.{}.slices[0].sources[0].layer_range"

REFUSED = [
    # text, structure, where, what, fix
    (slices("a 2 5"), FOUR, RANGE, "layer_range [2, 5] is out of range", "4 layers, 0-3"),
    (slices("a 3 3"), FOUR, RANGE, "[3, 3] is an empty layer range",
     "for layer 2, write [2, 3]; [0, 0] is norm, [5, 5] is lm_head"),
    (slices("a 7 7"), FOUR, RANGE, "[7, 7] is not the number of a part", "[6, 6] is embed_tokens"),
    (slices("a 3 3"), HEADLESS, RANGE, "[3, 3] is not the number of a part of this model", "[0, 0] is norm"),
    (weight(PRE, "model.embed_token.weight"), FOUR, ":2 pre_weights[0]",
     "no part or tensor 'model.embed_token.weight'", "did you mean 'model.embed_tokens.weight'"),
    (parts("a '*.experts.*'"), FOUR, ":2 parts[0]", "matches no tensor name", "names look like"),
    ("parts: [{from: a, select: [first:3, embed_tokens, '9', '*.8.mlp.*']}]", llama(10), "",
     ": layers 3-7, layer 8 (partly), norm, lm_head", "base_model"),
    # rules that contradict each other
    (slices("a 0 0", more=f"{PRE}: [{{name: {NORM_NAME}, model: b}}]"), FOUR, ":4 pre_weights[0]",
     f"norm: /w/b here, but /w/a at recipe.yaml{RANGE}", "same source"),
    (slices("a 0 0", more=f"{PRE}: [{{name: norm, model: b}}]"), FOUR, ":4 pre_weights[0]", "norm: /w/b here",
     "--allow-split for weights from /w/b"),
    (slices("a 0 2", more=f"{POST}: [{{name: layer 1, model: b}}]"), FOUR, ":4 post_weights[0]",
     f"layer 1: /w/b here, but /w/a at recipe.yaml{RANGE}", "same source"),
    ("base_model: base\nmodels: [{model: a}]\npre_weights: [{name: norm, model: base}]", FOUR, ":3 pre_weights[0]",
     "norm: /w/base here, but /w/a at recipe.yaml:2 models[0]", "same source"),
    # names of submodels
    (module("vision_tower"), UNKNOWN_VL, ":2 modules.vision_tower.models[0]",
     "no tensors are known to belong to the module 'vision_tower'", "visual"),
    (module("vision_towr"), VL, ":2 modules.vision_towr.models[0]", "the module 'vision_towr'",
     "did you mean 'vision_tower'?"),
    (module("audio", 0, 2), VL, MODULE.format("audio"), "the module 'audio'", "text_decoder"),
    (module("multi_modal_projector", 0, 1), VL, MODULE.format("multi_modal_projector"),
     "has no layers for slices to name", "models: [{model: PATH}]"),
    (module("patch_embed", 0, 1), UNKNOWN_VL, MODULE.format("patch_embed"), "has no layers for slices to name",
     "parts:"),
    (module("visual", 0, 1), TWO_STACKS, MODULE.format("visual"), "several stacks of layers",
     "visual.blocks, visual.deepstack"),
    *((module(name, 2, 5), structure, MODULE.format(name), "layer_range [2, 5] is out of range",
       f"{name} has 4 layers, 0-3") for name, structure in (("vision_tower", VL), ("visual", UNKNOWN_VL))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "structure", "where", "what", "fix"), REFUSED)
def test_refusals(text, structure, where, what, fix):
    found = problems_of(lambda: choose(text, structure))
    check(found, (where, what, fix))
    assert structure is not HEADLESS or "lm_head" not in found[0].fix
    assert not where.startswith(":2 modules") or "out of range" in what or "parts:" in found[0].fix


@pytest.mark.parametrize("allow_split", [False, True])
@pytest.mark.parametrize(
    ("text", "structure", "parts"),
    [
        (f"{weight(PRE, 'norm')}{POST}: [{{name: {NORM_NAME}, model: b}}]", FOUR, "norm"),
        (f"{weight(PRE, 'lm_head')}{POST}: [{{name: lm_head.weight, model: b}}]", FOUR, "lm_head"),
        (f"{weight(PRE, EMBED_NAME)}{POST}: [{{name: {HEAD_NAME}, model: b}}]", TIED, "embed_tokens"),
        (slices("a 0 0", "b 0 0"), FOUR, "norm"),
        ("base_model: base\nmodules: {visual: {models: [{model: a}]}, vision_tower: {models: [{model: b}]}}", VL,
         "visual.patch_embed.proj, visual.blocks.0, "),
    ],
)  # fmt: skip
def test_rules_of_one_kind_must_not_contradict_each_other(text, structure, parts, allow_split):
    (problem,) = problems_of(lambda: choose(text, structure, allow_split=allow_split))
    assert problem.what.startswith(parts) and "/w/b here, but /w/a at recipe.yaml" in problem.what
    assert "same source" in problem.fix and "--allow-split" not in problem.fix


# Weights that go by other names on disk: training knows gate_up_proj, the file holds one tensor per expert.

FUSED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERTS = [f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in range(3)]
MOE = llama(3, extra=dict.fromkeys([FUSED, *EXPERTS], "layer 1"))
MOE_PARAMS = params_of(MOE) - set(EXPERTS)
OWN = [name for name in MOE.names("layer 1") if name in MOE_PARAMS]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("1", {"a": "1"}), ("layers", {"a": "0 1 2"}), ("model.layers.1.*", {"a": "1"}),
        ("'model.layers.1.[ims]*'", {"a": "1"}), (", ".join(OWN), {"a": "1"}),
        ("model.layers.0.mlp.*", {"a": MLP.format(0)}),
        # a layer whose weights are renamed can't be split
        ("'*.self_attn.*'", None), ("'*.mlp.*'", None), (FUSED, None), (EXPERTS[0], None), ("'*.experts.?.*'", None),
    ],
)  # fmt: skip
def test_expert_weights_follow_the_params_of_their_layer(select: str, expected: dict[str, str] | None):
    if expected is None:
        found = problems_of(lambda: choose(parts(f"a {select}"), MOE, MOE_PARAMS))
        check(found, ("", "layer 1: the weights on disk have other names than the params", "one checkpoint"))
    else:
        choice = choose(parts(f"a {select}"), MOE, MOE_PARAMS)
        assert by_source(choice, MOE) == expected
        assert "layer 1" not in choice.filled or "1" not in expected["a"].split()


@pytest.mark.parametrize("name", ["layer 1", FUSED, EXPERTS[0], "model.layers.1.self_attn.q_proj.weight"])
def test_such_layers_are_split_from_their_optimizer_as_a_whole_or_not_at_all(name: str):
    text = slices("a 0 3", more=f"pre_weights: [{{name: {name}, model: b}}]")
    if name == "layer 1":
        choice = choose(text, MOE, MOE_PARAMS, allow_split=True)
        assert by_source(choice, MOE) == {"a": "0 1 2", "weights of b": "1"}
    else:
        found = problems_of(lambda: choose(text, MOE, MOE_PARAMS, allow_split=True))
        check(found, ("", "layer 1: the weights on disk have other names", ""))


def test_weights_in_a_part_without_params_need_a_single_source():
    """It can't be told whose they are, so nothing is guessed."""
    structure = llama(2, extra={"tower.blocks.0.w.weight": "tower.blocks.0"})
    params = params_of(structure) - {"tower.blocks.0.w.weight"}
    choice = choose("parts: [{from: a, select: layers}, {from: a, select: '!layers'}]", structure, params)
    assert set(choice.source_of.values()) == {A}
    for select in ("0", "tower.blocks.0"):
        found = problems_of(lambda: choose(parts(f"a {select}"), structure, params))  # noqa: B023 - called at once
        check(found, ("", "tower.blocks.0: these weights on disk have other names", ""))
