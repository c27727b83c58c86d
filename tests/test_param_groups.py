"""A live model gets the groups that its checkpoint is converted to, and they get through the Trainer and DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from helpers.indexes import make_index
from llmtailor.checkpoint.layout import LAYER, find_decaying, regroup
from llmtailor.checkpoint.optimizer import ParamGroup
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.model.parts import Param
from llmtailor.param_groups import LayerGroupsMixin, decaying_names, layer_param_groups
from trainings.alone import train as train_alone
from trainings.common import DECAY
from trainings.models import CONFIGS, build
from trainings.spec import Spec


class LayerTrainer(LayerGroupsMixin, transformers.Trainer):
    pass


def named(groups):
    return [group["lt_params"] for group in groups]


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
    names = {param: name for name, param in model.named_parameters()}
    assert [[names[param] for param in group["params"]] for group in groups] == named(groups)
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
def test_the_groups_get_through_the_trainer_and_deepspeed(train):
    """Also through a resume."""
    made = [Spec(f"{stage}", "qwen2", tied=True, layers=2, stage=stage, groups="mixin", steps=2) for stage in (3, 2)]
    again = made[0].resumed("3/checkpoint-2", "3-again", steps=3, save_steps=3)
    for run in train([*made, again]).values():
        index = index_checkpoint(run.checkpoint(run.spec.steps))
        assert index.form.stage == run.spec.stage
        assert [list(params) for params in index.group_params] == named(expected())
        assert [group.hyper["lt_params"] for group in index.groups] == named(expected())
        assert [group.hyper["weight_decay"] for group in index.groups] == [one["weight_decay"] for one in expected()]


@pytest.mark.real
def test_the_groups_get_through_a_plain_trainer(tmp_path):
    like = {"arch": "qwen2", "tied": True, "kind": LayerTrainer}
    first = train_alone(tmp_path / "first", steps=2, **like)
    again = train_alone(tmp_path / "again", steps=4, resume_from=first.checkpoint(2), **like)
    for saved in (first.checkpoint(2), again.checkpoint(4)):
        groups = torch.load(saved / "optimizer.pt", weights_only=True)["param_groups"]
        assert named(groups) == named(expected())
        assert [group["weight_decay"] for group in groups] == [group["weight_decay"] for group in expected()]
        assert [len(group["params"]) for group in groups] == [len(names) for names in named(groups)]
