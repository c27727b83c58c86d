"""The saver inside the Trainer: when it saves, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from helpers.cases import diagonal
from helpers.commands import call
from helpers.composing import compose
from helpers.same import differences
from llmtailor.errors import TailorError, UnsupportedCheckpoint, UsageError
from llmtailor.frameworks.files import ADAPTER
from llmtailor.policies.check import NUM_SAVES
from llmtailor.saving import attach, saver_for
from oracle.zero3 import differ
from saving.loop import read_states
from saving.policy_runs import Custom
from trainings.alone import Alone, Stops
from trainings.common import MOMENTS, Tokens
from trainings.models import build, tokenizer

pytestmark = pytest.mark.real

FULL = {"policy": "full", "save_steps": 2}
ODD = ("layers.1.", "lm_head")
"""The odd half of parity"""
EACH = {"eval_strategy": "steps", "eval_steps": 2}


def check(run, at, out, held=None):
    """Compose a step and compare it with what the optimizer held then, or at the step of each param."""
    compose(run.folder, at, out=out)
    truths = {name: run.truth.at[held(name) if held else at][name] for name in run.truth.at[at]}
    wanted = {(name, kind): value for name, truth in truths.items() for kind, value in truth.items()}
    found = read_states(out)
    assert found.keys() == wanted.keys()
    assert not [key for key, value in wanted.items() if differ(found[key], value)]
    return out


@pytest.mark.parametrize(
    ("arguments", "save_steps", "saves"),
    [
        pytest.param({"save_strategy": "steps", "save_steps": 4}, None, [4, 6], marks=pytest.mark.long),
        pytest.param({"save_strategy": "steps", "save_steps": 4}, 3, [3, 6], marks=pytest.mark.long),
        ({"save_strategy": "no"}, 4, [4, 6]),
        pytest.param({"save_strategy": "epoch"}, None, [4, 6], marks=pytest.mark.long),
        pytest.param({"save_strategy": "epoch"}, 5, [5, 6], marks=pytest.mark.long),
        ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}, None, [4, 8]),
        ({"save_strategy": "steps", "save_steps": 4, "logging_strategy": "no"}, None, [4, 6]),
        ({"save_strategy": "epoch", "logging_strategy": "epoch", "eval_strategy": "epoch"}, None, [4, 6]),
    ],
)
def test_it_saves_when_the_trainer_would_and_at_the_end(tmp_path, arguments, save_steps, saves):
    """16 rows are 4 steps."""
    run = Alone(tmp_path / "run", {"policy": "full", "save_steps": save_steps}, **arguments).train()
    assert run.saves == saves
    assert not run.checkpoints
    for step in saves:
        check(run, step, tmp_path / f"out-{step}")


@pytest.mark.parametrize(
    ("comes_last", "stop"),
    diagonal(
        [False, True],
        [
            ("step", 3, {"save_strategy": "steps"}),
            ("step", 3, {"save_strategy": "epoch"}),
            ("evaluation", 3, {"eval_strategy": "steps", "eval_steps": 3}),
            ("evaluation", 4, {"eval_strategy": "epoch", "load_best_model_at_end": True, "save_strategy": "best"}),
        ],
    ),
)
def test_the_last_step_is_saved_if_a_callback_stops_the_training(tmp_path, comes_last, stop):
    when, step, arguments = stop
    common = {"dropout": 0.1, "metric_for_best_model": "loss", "save_steps": 5, **arguments}
    straight = Alone(tmp_path / "straight", **common).train()
    stops = Stops(step, when)
    run = Alone(tmp_path / "run", {"policy": "full"}, callbacks=() if comes_last else (stops,), **common)
    if comes_last:
        run.trainer.add_callback(stops)
    run.train()
    assert run.trainer.state.global_step == step
    assert run.saves == [step]
    resumed = Alone(tmp_path / "resumed", **common).train(check(run, step, tmp_path / f"checkpoint-{step}"))
    assert [line for line in resumed.log if line["step"] > step] == [
        line for line in straight.log if line["step"] > step
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"}, marks=pytest.mark.long
        ),
        {"save_strategy": "steps", "save_steps": 2, **EACH, "gradient_accumulation_steps": 2},
    ],
)
def test_a_training_is_the_same_with_the_saver_and_goes_on_so(tmp_path, arguments):
    """Dropout: two evaluation sets draw nothing, but the order of batches and the masks depend on the states."""
    sets = {"a": Tokens(6), "b": Tokens(5)}
    plateau = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
        "metric_for_best_model": "a_loss",
    }
    common = {"dropout": 0.1, "eval_sets": sets, **arguments, **plateau}
    watched = Alone(tmp_path / "watched", {"policy": "full"}, **common).train()
    alone = Alone(tmp_path / "alone", **{**common, "save_strategy": "no"}).train()
    assert watched.log == alone.log
    at = watched.saves[-2]  # of several, so that the random states of another save would show
    resumed = Alone(tmp_path / "resumed", **{**common, "save_strategy": "no"})
    resumed.train(check(watched, at, tmp_path / f"checkpoint-{at}"))
    assert resumed.log == alone.log
    assert resumed.trainer.state.best_metric == alone.trainer.state.best_metric


def test_the_best_checkpoint_is_left_to_the_trainer(tmp_path):
    """It is loaded at the end, after the last step was saved."""
    best = {"save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    run = Alone(tmp_path / "run", FULL, **best, **EACH, greater_is_better=True, save_total_limit=1).train()
    assert run.saves == [2, 4, 6]
    [kept] = run.checkpoints
    assert kept == run.trainer.state.best_global_step != 6
    assert (run.folder / f"checkpoint-{kept}" / "model.safetensors").exists()
    now = dict(run.trainer.model.named_parameters())
    assert all(torch.equal(now[name], truth["master"]) for name, truth in run.truth.at[kept].items())
    check(run, 6, tmp_path / "out")


def test_the_trainers_rotation_and_the_savers_do_not_meet(tmp_path):
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "save_total_limit": 1}
    attached = {"policy": "parity", "save_steps": 1, "keep_composable": 2}
    run = Alone(tmp_path / "run", attached, **best, **EACH, max_steps=8).train()
    assert run.checkpoints == [8]
    assert run.saves == [6, 7, 8]
    shutil.rmtree(run.folder / "checkpoint-8")
    check(run, 8, tmp_path / "out-8", lambda name: 8 if any(part in name for part in ODD) else 7)
    check(run, 7, tmp_path / "out-7", lambda name: 6 if any(part in name for part in ODD) else 7)
    with pytest.raises(TailorError):
        compose(run.folder, 6, out=tmp_path / "out-6")


def test_what_clashes_is_refused_when_it_is_attached(tmp_path):
    clash = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, **EACH}
    with pytest.raises(UsageError, match="load_best_model_at_end") as caught:
        Alone(tmp_path, {"policy": "full", "save_steps": 0}, **clash)
    assert len(caught.value.problems) == 2
    trainer = Alone(tmp_path).trainer
    callbacks = list(trainer.callback_handler.callbacks)
    for options, words in (
        ({"policy": "partiy"}, "did you mean 'parity'"),
        ({"policy": "parity", "max_staleness": 0}, "max_staleness is 0"),
        ({"save_steps": 0}, "save_steps is 0"),
        ({"keep_composable": 1.5}, "keep_composable: it is 1.5"),
    ):
        with pytest.raises(UsageError, match=words):
            attach(trainer, **options)
    assert trainer.callback_handler.callbacks == callbacks
    with pytest.raises(UsageError, match="no part of the model is trainable"):
        Alone(tmp_path, {}, prepare=lambda model: model.requires_grad_(False))


def test_a_policy_is_tried_out_once(tmp_path):
    """When the saver is attached, and not again when training begins."""
    asked = []

    def choose(now):
        asked.append(now.save)
        return dict.fromkeys(now.parts, "all")

    run = Alone(tmp_path / "run", {"policy": Custom(choose), "save_steps": 1, "max_staleness": 5}, max_steps=3)
    assert len(asked) == 2 * NUM_SAVES
    run.train()
    assert asked[2 * NUM_SAVES :] == [1, 2]


class Quantized(torch.optim.AdamW):
    """Makes moments of a tensor subclass that claims the shape and dtype of the param, as torchao's AdamW8bit does."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].as_subclass(Codes)


class Codes(torch.Tensor):
    def __deepcopy__(self, memo):
        return self


class Idle(torch.optim.AdamW):
    """Its step makes none, as if hooks of the gradients made it."""

    def step(self, closure=None):
        return None

    step.hooked = True
    """So that torch does not see it either"""


def of_class(optimizer):
    return {"given": {"optimizer_cls_and_kwargs": (optimizer, {"lr": 1e-3})}}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            of_class(Quantized),
            r"the optimizer Quantized: its state exp_avg of .* is quantized, or another .* \(Codes\)",
        ),
        (of_class(Idle), "the optimizer Idle: training never calls its step"),
    ],
)
def test_an_optimizer_that_can_not_be_saved_is_refused_after_the_first_step(tmp_path, how, words):
    run = Alone(tmp_path / "run", {"save_steps": 4}, **how)
    with pytest.raises(UnsupportedCheckpoint, match=words):
        run.train()
    assert run.trainer.state.global_step == 1


def test_an_optimizer_that_has_states_is_refused_right_away(tmp_path):
    model = build("llama", 3, tied=False)
    optimizer = Quantized(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=int), labels=torch.zeros(1, 4, dtype=int)).loss.backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(UnsupportedCheckpoint, match=r"the optimizer Quantized: its state exp_avg of .* is quantized"):
        saver_for(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"optim": "lomo"}, "lomo: LOMO updates params during the backward pass"),
        ({"optim": "adamw_torch_xla"}, "adamw_torch_xla: tensors on XLA devices can't be copied"),
        ({"optim": "adalomo"}, "adalomo: LOMO updates"),
        ({"optim": "grokadamw"}, "grokadamw: GrokAdamW keeps its states in its param groups"),
        ({"optim": "galore_adamw_layerwise"}, "galore_adamw_layerwise: GaLore and APOLLO can't"),
        ({"optim": "apollo_adamw"}, "apollo_adamw: GaLore and APOLLO can't"),
        ({"given": {"optimizers": (LayerWiseDummyOptimizer(), None)}}, "LayerWiseDummyOptimizer: it is a placeholder"),
    ],
)
def test_an_optimizer_that_is_known_by_its_name_is_refused_when_the_saver_is_attached(tmp_path, how, words):
    with pytest.raises(UnsupportedCheckpoint, match=f"the optimizer {words}"):
        Alone(tmp_path / "run", {"save_steps": 4}, optim_target_modules=["q_proj"], **how)


@pytest.mark.parametrize(
    "name", ["lomo_optim.Lomo", "grokadamw.GrokAdamW", "galore_torch.adamw.GaLoreAdamW", "torch.optim.LBFGS"]
)
def test_a_loop_with_an_optimizer_of_such_a_package_is_refused(tmp_path, name):
    module, _, kind = name.rpartition(".")
    model = build("llama", 3, tied=False)
    optimizer = type(kind, (torch.optim.AdamW,), {"__module__": module})(model.parameters())
    with pytest.raises(UnsupportedCheckpoint, match=f"the optimizer {kind}: "):
        saver_for(tmp_path, model=model, optimizer=optimizer, scheduler=optimizer)


def test_a_schedule_that_can_not_be_written_is_refused_before_training(tmp_path):
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self):
            return {**super().state_dict(), "seen": {"model": torch.nn.Linear(1, 1)}}

    class Scheduled(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = Odd(optimizer or self.optimizer, lambda step: 1.0)
            return self.lr_scheduler

    run = Alone(tmp_path / "run", FULL, kind=Scheduled)
    with pytest.raises(UnsupportedCheckpoint, match=r"scheduler\.pt\['seen'\]\['model'\]"):
        run.train()
    assert run.trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("config", "adapters", "words"),
    [
        ({"target_modules": ["q_proj"]}, ["policy", "reference"], "files of the adapters reference"),
        ({"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}, ["default"], "this kind of adapter"),
    ],
)
def test_an_adapter_that_could_not_be_composed_is_refused_before_training(tmp_path, config, adapters, words):
    peft = pytest.importorskip("peft")
    kind = peft.LoraConfig if "target_modules" in config else peft.PromptTuningConfig

    def prepare(model):
        model = peft.get_peft_model(model, kind(**config), adapters[0])
        for name in adapters[1:]:
            model.add_adapter(name, kind(**config))
        return model

    run = Alone(tmp_path / "run", FULL, prepare=prepare)
    with pytest.raises(UnsupportedCheckpoint, match=words):
        run.train()
    assert run.trainer.state.global_step == 0


def test_an_adapter_of_another_name_is_saved_and_resumed_from_in_its_folder(tmp_path):
    """Everywhere that a save goes: to the disk, to a mirror, and through gc."""
    peft = pytest.importorskip("peft")
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    common = {"prepare": lambda model: peft.get_peft_model(model, peft.LoraConfig(**lora), "policy"), "max_steps": 4}
    stock = Alone(tmp_path / "stock", save_strategy="steps", save_steps=2, **common).train()
    mirror = f"file://{tmp_path / 'mirror'}"
    run = Alone(tmp_path / "run", {"policy": "full", "save_steps": 2, "mirror": mirror}, **common).train()
    assert run.saves == [2, 4]
    compose(run.folder, 2, out=tmp_path / "checkpoint-2")
    compose(tmp_path / "mirror", 2, out=tmp_path / "mirrored")
    theirs = stock.checkpoint(2) / "policy"
    config = json.loads((theirs / "adapter_config.json").read_text())
    for out in (tmp_path / "checkpoint-2", tmp_path / "mirrored"):
        there = {path.name for path in out.iterdir()}
        assert {"policy", "optimizer.pt"} <= there and not {"adapter_config.json", ADAPTER, "model.safetensors"} & there
        assert not list(differences(load_file(out / "policy" / ADAPTER), load_file(theirs / ADAPTER)))
        assert json.loads((out / "policy" / "adapter_config.json").read_text()) == config
    resumed = Alone(tmp_path / "resumed", save_strategy="no", **common).train(tmp_path / "checkpoint-2")
    assert resumed.losses == {step: stock.losses[step] for step in (3, 4)}
    call("gc", run.folder, "--keep", 1, "--yes")
    assert [path.name for path in (run.folder / "partial").glob("step-*")] == ["step-00000004"]


def test_another_attempt_in_the_same_process(tmp_path):
    """The folder is free again after an error; an attempt from the start is refused, one that resumes is not."""

    class Trips(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise RuntimeError("tripped")

    run = Alone(tmp_path / "run", {"policy": "full", "save_steps": 2}, callbacks=(Trips(),))
    with pytest.raises(RuntimeError, match="tripped"):
        run.train()
    run.finish()
    assert run.saves == [2, 4]
    with pytest.raises(TailorError, match="up to step 4"):
        run.train()
    straight = Alone(tmp_path / "straight").train()
    again = Alone(tmp_path / "run", FULL)
    compose(run.folder, 4)
    again.trainer.train(resume_from_checkpoint=True)
    assert again.log == straight.log
    assert again.saves == [2, 4, 6]


def test_params_without_a_gradient_have_zeros(tmp_path):
    """Adam makes its states when a param first has a gradient; here the last layer's come after the first save."""

    def skip_last(model):
        layer = model.model.layers[2]
        forward, layer.calls = layer.forward, 0

        def skip(hidden, *args, **kwargs):
            layer.calls += 1
            return hidden if layer.calls <= skip_last.calls else forward(hidden, *args, **kwargs)

        layer.forward = skip
        return model

    skip_last.calls = 3
    straight = Alone(tmp_path / "straight", FULL, prepare=skip_last).train()
    assert not any("layers.2" in name for name in straight.truth.at[2])
    compose(straight.folder, 2, out=(composite := tmp_path / "checkpoint-2"))
    steps = {name: float(value) for (name, kind), value in read_states(composite).items() if kind == "step"}
    assert {step for name, step in steps.items() if "layers.2" in name} == {0.0}
    assert {step for name, step in steps.items() if "layers.2" not in name} == {2.0}
    skip_last.calls = 1
    resumed = Alone(tmp_path / "resumed", prepare=skip_last).train(composite)
    assert resumed.log == straight.log
    check(straight, 6, tmp_path / "out")


def test_small_files_and_counters_of_callbacks_come_along(tmp_path):
    patience = EarlyStoppingCallback(early_stopping_patience=9)
    extra = {**EACH, "metric_for_best_model": "loss", "greater_is_better": True}
    run = Alone(tmp_path / "run", FULL, callbacks=(patience,), **extra)
    run.trainer.processing_class = tokenizer()
    run.train()
    out = check(run, 4, tmp_path / "out")
    state = json.loads((out / "trainer_state.json").read_text())
    counter = state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"]
    assert counter == 1  # of two evaluations the first is the best
    assert state["best_global_step"] == state["best_metric"] is None or state["best_metric"]
    assert [line["step"] for line in state["log_history"] if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in state["log_history"] if "eval_loss" in line] == [2, 4]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert run.trainer.model.config.architectures is None
    assert (out / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("attached", "arguments", "words"),
    [
        (
            FULL,
            {"save_strategy": "steps", "save_total_limit": 2},
            "every 2 steps, in place of full ones, by the policy full; save_total_limit has no effect, "
            "use keep_composable",
        ),
        ({"policy": "parity"}, {"save_strategy": "epoch"}, "every epoch, in place of full ones, by the policy parity"),
        ({}, {"save_steps": 0.5}, "every 50% of the training, by the policy rounded"),
        ({"save_steps": "auto"}, {}, "as often as 2.00% of the time allows, by the policy rounded"),
    ],
)
def test_a_run_says_what_it_will_do(tmp_path, caplog, attached, arguments, words):
    Alone(tmp_path, attached, **arguments)
    assert caplog.messages == [f"partial checkpoints go to {tmp_path}/partial {words}"]


def test_a_run_says_at_its_end_what_makes_a_full_checkpoint(tmp_path, caplog):
    Alone(tmp_path / "run", FULL).train()
    assert caplog.messages[1:] == [f"for a full checkpoint of step 6: llmtailor merge --run {tmp_path}/run"]


def test_halves_in_bf16_are_what_was_held(tmp_path):
    run = Alone(tmp_path / "run", {"policy": "parity", "save_steps": 2}, dtype=torch.bfloat16).train()
    out = check(run, 6, tmp_path / "out", lambda name: 4 if any(part in name for part in ODD) else 6)
    optimizer = torch.load(out / "optimizer.pt")
    assert {optimizer["state"][0][moment].dtype for moment in MOMENTS} == {torch.bfloat16}
