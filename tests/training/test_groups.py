"""A live model gets the groups that its checkpoint is converted to, and they get through the Trainer and DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from helpers.checkpoints import SMALL, load, make, model_states
from helpers.indexes import make_index
from llmtailor.checkpoint.layout import DEFAULT, LAYER, find_decaying, regroup
from llmtailor.checkpoint.optimizer import ParamGroup
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.model.parts import Param
from llmtailor.training import LayerGroupsMixin, decaying_names, layer_param_groups
from training import layered
from trainings.harness import start_ranks
from trainings.models import CONFIGS, build

DECAY = layered.DECAY


def named(groups):
    return [group["lt_params"] for group in groups]


def test_the_groups_of_a_model_are_those_of_its_converted_checkpoint(tmp_path):
    config = transformers.LlamaConfig(**SMALL.config())
    model = transformers.LlamaForCausalLM(config)
    groups = layer_param_groups(model, DECAY)
    names = {param: name for name, param in model.named_parameters()}
    assert [[names[param] for param in group["params"]] for group in groups] == named(groups)

    default = make(tmp_path / "default", 10)
    index = index_checkpoint(default)
    order = list(load(model_states(default))["module"])
    made = regroup(index, find_structure(index), LAYER, order)
    assert [list(group.params) for group in made.groups] == named(groups)
    assert [group.hyper["weight_decay"] for group in made.groups] == [group["weight_decay"] for group in groups]
    assert len(groups) == 2 * SMALL.num_layers + 3

    layered = index_checkpoint(make(tmp_path / "layer", 10, groups="layer"))
    assert [list(params) for params in layered.group_params] == named(groups)
    back = regroup(layered, find_structure(layered), DEFAULT, order)
    assert tuple(group.params for group in back.groups) == index.group_params


def index_of(model, decays):
    """What a checkpoint of a model with the Trainer's groups would be indexed as."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    decaying = decaying_names(model)
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(param): name for name, param in reversed(every.items())}
    halves = [[name for name in params if (name in decaying) == half] for half in (True, False)]
    return make_index(
        params={name: Param(name, tuple(param.shape), "trainable") for name, param in params.items()},
        tied={name: first[id(param)] for name, param in every.items() if first[id(param)] != name},
        groups=tuple(
            ParamGroup(tuple(names), {"weight_decay": decay})
            for names, decay in zip(halves if len(decays) == 2 else [params], decays, strict=True)
        ),
    )


@pytest.mark.parametrize("decays", [(DECAY, 0.0), (0.0, 0.0), (DECAY,)], ids=["told", "all 0", "one group"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("arch", CONFIGS)
def test_both_sides_agree_for_every_family(arch, tied, decays):
    model = build(arch, 2, tied)
    index = index_of(model, decays)
    assert find_decaying(index) == decaying_names(model)
    made = regroup(index, find_structure(index), LAYER, list(model.state_dict()))
    groups = layer_param_groups(model, DECAY)
    assert [list(group.params) for group in made.groups] == named(groups)
    assert len(made.notices) == (len(decays) == 1)


@pytest.mark.parametrize("arch", CONFIGS)
def test_what_decays_is_what_the_trainer_says(arch):
    model = build(arch, 2, True)
    assert decaying_names(model) == {
        name
        for name in transformers.Trainer.get_decay_parameter_names(None, model)
        if name in dict(model.named_parameters())
    }


def test_frozen_params_are_left_out():
    model = build("llama", 2, False)
    model.model.layers[0].requires_grad_(False)
    names = [name for group in named(layer_param_groups(model, DECAY)) for name in group]
    assert sorted(names) == sorted(name for name, param in model.named_parameters() if param.requires_grad)


def test_a_config_with_an_optimizer_is_refused():
    class Stub:
        def __init__(self, config):
            self.accelerator = SimpleNamespace(
                state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
            )

    class Layered(LayerGroupsMixin, Stub):
        pass

    Layered({"zero_optimization": {"stage": 3}})
    with pytest.raises(ValueError, match="remove it from the config"):
        Layered({"optimizer": {"type": "AdamW"}})


def expected():
    return layer_param_groups(build("qwen2", 2, True), DECAY)


@pytest.mark.real
def test_the_groups_get_through_a_plain_trainer(tmp_path):
    build("qwen2", 2, True).save_pretrained(tmp_path / "model")
    layered.plain(tmp_path)
    for step in (2, 3):  # 3 is from the resumed run
        saved = torch.load(tmp_path / f"stage0/checkpoint-{step}/optimizer.pt", weights_only=True)["param_groups"]
        assert named(saved) == named(expected())
        assert [group["weight_decay"] for group in saved] == [group["weight_decay"] for group in expected()]
        assert [len(group["params"]) for group in saved] == [len(names) for names in named(saved)]


@pytest.mark.real
def test_the_groups_get_through_deepspeed(tmp_path):
    build("qwen2", 2, True).save_pretrained(tmp_path / "model")
    start_ranks("training.layered", [tmp_path], 2, tmp_path)
    for stage in (3, 2):
        for step in (2, 3):
            index = index_checkpoint(tmp_path / f"stage{stage}/checkpoint-{step}")
            assert index.form.stage == stage
            assert [list(params) for params in index.group_params] == named(expected())
            assert [group.hyper["lt_params"] for group in index.groups] == named(expected())
            assert [group.hyper["weight_decay"] for group in index.groups] == [
                group["weight_decay"] for group in expected()
            ]
