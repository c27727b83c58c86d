"""Param groups: their order, their hyperparameters, what decays, and what can't be joined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers import checkpoints
from helpers.composing import convert
from helpers.indexes import make_index
from llmtailor.checkpoint.layout import DEFAULT, KEEP, LAYER, find_decaying, regroup
from llmtailor.checkpoint.optimizer import ParamGroup
from llmtailor.compose.checks import differing_hyperparameters
from llmtailor.errors import MismatchError, SourceError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.find_parts import find_parts_by_name
from llmtailor.model.parts import Param

HYPER = {"lr": 1e-3, "initial_lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8}


def llama(num_layers: int = 2, tied: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (11, 6)}
    for number in range(num_layers):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.q_proj.weight": (6, 6), f"{layer}.self_attn.q_proj.bias": (6,)}
        shapes |= {f"{layer}.mlp.up_proj.weight": (10, 6), f"{layer}.input_layernorm.weight": (6,)}
    shapes["model.norm.weight"] = (6,)
    return shapes if tied else {**shapes, "lm_head.weight": (11, 6)}


def gpt2(num_layers: int = 2) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (11, 6), "transformer.wpe.weight": (8, 6)}
    for number in range(num_layers):
        layer = f"transformer.h.{number}"
        shapes |= {f"{layer}.ln_1.weight": (6,), f"{layer}.ln_1.bias": (6,)}
        shapes |= {f"{layer}.mlp.c_fc.weight": (6, 24), f"{layer}.mlp.c_fc.bias": (24,)}
    return {**shapes, "transformer.ln_f.weight": (6,), "transformer.ln_f.bias": (6,)}


def halves(shapes):
    """The Trainer's two groups: vectors don't decay."""
    return [[name for name in shapes if (len(shapes[name]) > 1) == decays] for decays in (True, False)]


def make(shapes, groups, decays=(0.1, 0.0), hypers=None, tied=None):
    hypers = hypers or [{**HYPER, "weight_decay": decay} for decay in decays]
    index = make_index(
        params={name: Param(name, shape, "trainable") for name, shape in shapes.items()},
        groups=tuple(ParamGroup(tuple(params), hyper) for params, hyper in zip(groups, hypers, strict=True)),
        tied=tied or {},
    )
    numels = {name: param.numel for name, param in index.params.items()}
    return index, find_parts_by_name([*shapes, *index.tied], index.tied, numels)


LLAMA_LAYERS = [
    ["model.norm.weight"],
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.input_layernorm.weight"],
    ["model.layers.1.self_attn.q_proj.bias", "model.layers.1.input_layernorm.weight"],
    ["lm_head.weight"],
    ["model.embed_tokens.weight"],
    ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"],
    ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"],
]
GPT2_LAYERS = [
    ["transformer.ln_f.weight", "transformer.ln_f.bias"],
    *(
        [f"transformer.h.{number}.{tail}" for tail in ("ln_1.weight", "ln_1.bias", "mlp.c_fc.bias")]
        for number in range(2)
    ),
    ["transformer.wpe.weight"],
    ["transformer.wte.weight"],
    ["transformer.h.0.mlp.c_fc.weight"],
    ["transformer.h.1.mlp.c_fc.weight"],
]
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
GPT2_TIED = {"lm_head.weight": "transformer.wte.weight"}


@pytest.mark.parametrize(
    ("shapes", "tied", "layers"),
    [
        pytest.param(llama(), {}, LLAMA_LAYERS, id="untied: 2L+3"),
        pytest.param(llama(tied=True), TIED, LLAMA_LAYERS[:3] + LLAMA_LAYERS[4:], id="tied: 2L+2"),
        pytest.param(gpt2(), GPT2_TIED, GPT2_LAYERS, id="GPT-2: wpe is outside as well"),
    ],
)
def test_there_and_back(shapes, tied, layers):
    index, structure = make(shapes, halves(shapes), tied=tied)
    there = regroup(index, structure, LAYER, list(shapes))
    assert [list(group.params) for group in there.groups] == layers
    assert there.notices == ()
    decays = [len(shapes[group[0]]) > 1 for group in layers]
    assert [group.hyper["weight_decay"] for group in there.groups] == [0.1 if decay else 0.0 for decay in decays]
    assert list(there.from_group) == [0 if decay else 1 for decay in decays]
    assert all({**group.hyper, "weight_decay": 0} == {**HYPER, "weight_decay": 0} for group in there.groups)

    layered, _ = make(shapes, layers, hypers=[group.hyper for group in there.groups], tied=tied)
    back = regroup(layered, structure, DEFAULT, list(shapes))
    assert [list(group.params) for group in back.groups] == halves(shapes)
    assert [group.hyper for group in back.groups] == [group.hyper for group in index.groups]
    assert [decays[number] for number in back.from_group] == [True, False]


def test_layers_are_sorted_as_numbers_and_follow_what_is_outside():
    shapes = llama(12)
    index, structure = make(shapes, halves(shapes))
    groups = regroup(index, structure, LAYER, list(shapes)).groups
    numbers = [structure.part_of[group.params[0]] for group in groups]
    layers = [f"layer {number}" for number in range(12)]
    assert numbers == ["norm", *layers, "lm_head", "embed_tokens", *layers]
    assert len(groups) == 2 * 12 + 3


def test_groups_that_are_already_so_stay():
    shapes = llama()
    index, structure = make(shapes, halves(shapes))
    assert regroup(index, structure, DEFAULT, list(shapes)) is None
    assert regroup(index, structure, KEEP, []) is None
    layered, _ = make(shapes, LLAMA_LAYERS, decays=[0.0] * 3 + [0.1] * 4)
    assert regroup(layered, structure, LAYER, list(shapes)) is None
    with pytest.raises(ValueError):
        regroup(index, structure, "other", list(shapes))


def test_the_order_is_that_of_the_model_and_not_of_the_flat_tensors():
    shapes = llama()
    shuffled = [list(reversed(half)) for half in halves(shapes)]
    index, structure = make(shapes, shuffled)
    order = ["some.buffer", *shapes, "lm_head.weight"]
    assert [list(group.params) for group in regroup(index, structure, DEFAULT, order).groups] == halves(shapes)
    with pytest.raises(SourceError, match=r"it lacks lm_head\.weight"):
        regroup(index, structure, LAYER, list(shapes)[:-1])


def test_frozen_params_are_in_no_group_and_empty_groups_are_dropped():
    shapes = llama()
    frozen = {"model.norm.weight", *(name for name in shapes if "layers.1" in name)}
    index, structure = make(shapes, [[name for name in half if name not in frozen] for half in halves(shapes)])
    groups = [list(group.params) for group in regroup(index, structure, LAYER, list(shapes)).groups]
    assert groups == [group for group in LLAMA_LAYERS if not frozen & {*group}]

    weights = halves(shapes)[0]
    index, structure = make(shapes, [weights, []])
    only = regroup(index, structure, DEFAULT, list(shapes))
    assert [list(group.params) for group in only.groups] == [weights]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("shapes", [llama(), gpt2()], ids=["llama", "gpt2"])
def test_one_group_does_not_tell_what_decays(shapes, decay):
    """A DeepSpeed config with an optimizer makes one group. The rule on names splits it, and nothing decays otherwise
    than before."""
    index, structure = make(shapes, [list(shapes)], decays=[decay])
    for how, wanted in (
        (DEFAULT, halves(shapes)),
        (LAYER, LLAMA_LAYERS if "lm_head.weight" in shapes else GPT2_LAYERS),
    ):
        result = regroup(index, structure, how, list(shapes))
        assert [list(group.params) for group in result.groups] == wanted
        assert {group.hyper["weight_decay"] for group in result.groups} == {decay}
        assert set(result.from_group) == {0}
        (notice,) = result.notices
        assert f"({decay})" in notice.what and "naming rule" in notice.what


def test_what_decays_is_told_by_the_groups_before_names():
    """By their weight decay, or by their borders: the Trainer's default is 0 for both groups, which needs no notice."""
    shapes = {**llama(), "model.layers.0.mlp.norm_1.weight": (6,)}  # an nn.LayerNorm without bias: no name says so
    index, structure = make(shapes, halves(shapes), decays=(0.0, 0.0))
    assert find_decaying(index) == {*halves(shapes)[0]}
    assert regroup(index, structure, LAYER, list(shapes)).notices == ()
    layered, _ = make(shapes, [*LLAMA_LAYERS, ["model.layers.0.mlp.norm_1.weight"]], decays=[0.0] * 8)
    assert find_decaying(layered) == {*halves(shapes)[0]}
    ends = ["model.embed_tokens.weight", "lm_head.weight"]
    odd = [ends, [name for name in shapes if name not in ends]]
    back = regroup(*make(shapes, odd, decays=(0.0, 0.1)), DEFAULT, list(shapes))
    assert [list(group.params) for group in back.groups] == odd[::-1]
    assert back.from_group == (1, 0)


def test_learning_rates_of_layers_cannot_be_folded():
    shapes = llama()
    hypers = [
        {**HYPER, "weight_decay": 0.1 * (number > 2), "lr": 1e-3 / (1 + number), "beta_schedule": number / 7}
        for number in range(7)
    ]
    index, structure = make(shapes, LLAMA_LAYERS, hypers=hypers)
    with pytest.raises(MismatchError) as error:
        regroup(index, structure, DEFAULT, list(shapes))
    differ = [problem.what.split("differ in ")[1].split()[0] for problem in error.value.problems]
    assert differ == ["lr", "beta_schedule"]
    assert "0.00025 and 0.0002" in str(error.value) and "--groups layer" in str(error.value)


def test_several_weight_decays_cannot_be_folded_either():
    shapes = llama(1)
    first, second = halves(shapes)
    index, structure = make(shapes, [first[:1], first[1:], second], decays=(0.1, 0.2, 0.0))
    with pytest.raises(MismatchError, match=r"weight_decay \(0\.1 and 0\.2\)"):
        regroup(index, structure, DEFAULT, list(shapes))
    kept = regroup(index, structure, LAYER, list(shapes))
    decays = {name: group.hyper["weight_decay"] for group in kept.groups for name in group.params}
    assert [decays[name] for name in first] == [0.1, 0.2, 0.2, 0.2]


def test_labels_are_dropped_where_they_differ_and_names_are_written_anew():
    shapes = llama()
    hypers = [
        {**HYPER, "weight_decay": 0.1 * (number > 2), "name": f"group {number}", "tags": [number, "x"], "kind": "adam"}
        | {"lt_params": LLAMA_LAYERS[number]}
        for number in range(7)
    ]
    index, structure = make(shapes, LLAMA_LAYERS, hypers=hypers)
    groups = regroup(index, structure, DEFAULT, list(shapes)).groups
    for group, names in zip(groups, halves(shapes), strict=True):
        assert group.hyper.keys() == {*HYPER, "weight_decay", "kind", "lt_params"}
        assert group.hyper["lt_params"] == names
    reversed_index, _ = make(shapes, LLAMA_LAYERS[::-1], hypers=hypers[::-1])
    kept = regroup(reversed_index, structure, LAYER, list(shapes))
    assert [group.hyper for group in kept.groups] == hypers
    assert kept.from_group == (6, 5, 4, 3, 2, 1, 0)


def test_hyperparameters_differ_only_if_those_of_a_param_do(tmp_path):
    """Other groups with the same options are no difference, nor are a list and a tuple."""
    base = index_checkpoint(checkpoints.make(tmp_path, 7))
    layers = index_checkpoint(convert(base.root, tmp_path / "layers", groups="layer"))
    assert len(layers.groups) > len(base.groups) and differing_hyperparameters(layers, base) == []
    groups = [replace(one, hyper={**one.hyper, "betas": [*one.hyper["betas"]]}) for one in layers.groups]
    assert differing_hyperparameters(replace(layers, groups=tuple(groups)), base) == []
    groups[1] = replace(groups[1], hyper={**groups[1].hyper, "betas": (0.5, 0.6)})
    assert differing_hyperparameters(replace(layers, groups=tuple(groups)), base) == ["betas"]
