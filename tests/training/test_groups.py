"""A live model gets the groups that its checkpoint is converted to, and they get through the Trainer and DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from helpers.checkpoints import SMALL, load, make, model_states
from helpers.indexes import make_index
from llmtailor.checkpoint.optimizer import ParamGroup
from llmtailor.checkpoint.regroup import DEFAULT, LAYER, find_decaying, regroup
from llmtailor.formats.registry import dissect_checkpoint, index_checkpoint
from llmtailor.model.params import Param
from llmtailor.training import LayerGroupsMixin, decaying_names, layer_param_groups
from real.harness import environment
from real.models import CONFIGS, build

DECAY = 0.1
RATE = 5e-3


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
    made = regroup(index, dissect_checkpoint(index), LAYER, order)
    assert [list(group.params) for group in made.groups] == named(groups)
    assert [group.hyper["weight_decay"] for group in made.groups] == [group["weight_decay"] for group in groups]
    assert len(groups) == 2 * SMALL.num_layers + 3

    layered = index_checkpoint(make(tmp_path / "layer", 10, groups="layer"))
    assert [list(params) for params in layered.group_params] == named(groups)
    back = regroup(layered, dissect_checkpoint(layered), DEFAULT, order)
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
    made = regroup(index, dissect_checkpoint(index), LAYER, list(model.state_dict()))
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
    with pytest.raises(ValueError, match="take it out of the config"):
        Layered({"optimizer": {"type": "AdamW"}})


TRAIN = f"""
import json, os, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from llmtailor.training import LayerGroupsMixin

class LayerTrainer(LayerGroupsMixin, Trainer):
    pass

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, at):
        tokens = (at + torch.arange(8)) % 61
        return {{"input_ids": tokens, "labels": tokens}}

def start(out, stage, resume=None, steps=2):
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    config = {{**auto, "zero_optimization": {{"stage": stage}}, "bf16": {{"enabled": True}},
              "zero_force_ds_cpu_optimizer": False}}
    args = TrainingArguments(output_dir=str(out), deepspeed=config if stage else None, bf16=bool(stage), use_cpu=True,
        per_device_train_batch_size=2, max_steps=steps, save_strategy="steps", save_steps=1, report_to=[], seed=0,
        learning_rate={RATE}, weight_decay={DECAY}, disable_tqdm=True, dataloader_pin_memory=False)
    # Loaded while the arguments exist, a model is partitioned at once under ZeRO-3: all its params are empty.
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model", dtype=torch.float32)
    assert (stage == 3) == all(param.numel() == 0 for param in model.parameters())
    trainer = LayerTrainer(model=model, args=args, train_dataset=Tokens(),
        data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=resume)

def main():
    if "deepspeed" in sys.argv:
        import deepspeed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
    for stage in (3, 2) if "deepspeed" in sys.argv else (0,):
        out = Path(sys.argv[1]) / f"stage{{stage}}"
        start(out, stage)
        start(out, stage, str(out / "checkpoint-2"), 3)

main()
sys.stdout.flush()
os._exit(0)  # no teardown of the interpreter, in which gloo's threads now and then abort
"""


def train(folder: Path, *words: str) -> None:
    script = folder / "train.py"
    script.write_text(TRAIN)
    build("qwen2", 2, True).save_pretrained(folder / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch = [*command, str(script)] if words else [sys.executable, str(script)]
    done = subprocess.run([*launch, str(folder), *words], env=environment(), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def expected():
    return layer_param_groups(build("qwen2", 2, True), DECAY)


@pytest.mark.real
def test_the_groups_get_through_a_plain_trainer(tmp_path):
    train(tmp_path)
    for step in (2, 3):  # 3 is from the resumed run
        saved = torch.load(tmp_path / f"stage0/checkpoint-{step}/optimizer.pt", weights_only=True)["param_groups"]
        assert named(saved) == named(expected())
        assert [group["weight_decay"] for group in saved] == [group["weight_decay"] for group in expected()]
        assert [len(group["params"]) for group in saved] == [len(names) for names in named(saved)]


@pytest.mark.real
def test_the_groups_get_through_deepspeed(tmp_path):
    train(tmp_path, "deepspeed")
    for stage in (3, 2):
        for step in (2, 3):
            index = index_checkpoint(tmp_path / f"stage{stage}/checkpoint-{step}")
            assert index.stage == stage
            assert [list(params) for params in index.group_params] == named(expected())
            assert [group.hyper["lt_params"] for group in index.groups] == named(expected())
            assert [group.hyper["weight_decay"] for group in index.groups] == [
                group["weight_decay"] for group in expected()
            ]
