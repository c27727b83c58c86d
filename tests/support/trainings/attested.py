"""Resumed trainings whose states are then made wrong, one fault after another, and attested.

Each is loaded by its own loader from a checkpoint of the catalogue. A fault changes what this rank holds, and is
undone, so that one load serves all faults. What the older checkpoint holds is known by loading it. In the Trainer and
in Lightning, a callback in the place of `AttestResume` gets the training when it has been loaded, and ends it.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerCallback, set_seed

import llmtailor
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.live.objects import parts_of, prepared, training_of
from llmtailor.live.training import LiveShard, TrainingObjects, rng_tree
from llmtailor.saving.callbacks import find_trainer
from trainings import trainer as stock
from trainings.common import MOMENTS
from trainings.fsdp import KINDS, Loop
from trainings.loops import AccelerateLoop, EngineLoop
from trainings.spec import Fsdp, Lightning, Spec, from_json

Undo = Callable[[], None]


class Resumed:
    """A training that has loaded a checkpoint; ``given`` is what `llmtailor.attest` gets."""

    load: Callable[[Any], object]
    """Of a loop, which may load another"""

    def __init__(self, given: dict[str, Any], held: TrainingObjects, newer: Path, older: Path) -> None:
        self.given, self.checkpoint, self.older = given, newer, older
        self.engine, self.scheduler = held.engine, getattr(held.scheduler, "scheduler", held.scheduler)
        self.training = training_of(held, FRAMEWORKS["trainer"])

    @classmethod
    def in_a_loop(cls, spec: Any, newer: Path, older: Path) -> Resumed:
        set_seed(0)
        if isinstance(spec, Fsdp):
            loop: Any = Loop(spec)
            given = {"model": loop.model, "optimizer": loop.optimizer, "scheduler": loop.scheduler}
            made = cls(given, TrainingObjects(**given), newer, older)
            made.load = lambda path: KINDS[spec.kind][1](loop, path)
            return made
        if spec.client == "deepspeed":
            loop = EngineLoop(spec)
            made = cls(
                {"engine": loop.engine},
                TrainingObjects(engine=loop.engine, scheduler=loop.engine.lr_scheduler),
                newer,
                older,
            )
        else:
            loop = AccelerateLoop(spec)
            made = cls({"accelerator": loop.accelerator}, prepared(loop.accelerator), newer, older)
        made.load = loop.load
        return made

    def attest(self, how: str = "sample") -> llmtailor.live.attesting.Attestation:  # type: ignore[name-defined]
        return llmtailor.attest(self.checkpoint, how=how, **self.given)

    @property
    def torchs(self) -> Any:
        """torch's optimizer, which has the states and groups"""
        return self.engine.optimizer.optimizer if self.engine is not None else self.training.optimizers()[0]  # type: ignore[index]

    def fragments(self, *kinds: str) -> list[LiveShard]:
        return [one for one in self.training.present() if one.kind in kinds]

    def values(self) -> dict[tuple[str, str, int], torch.Tensor]:
        return {(one.param, one.kind, one.begin): one.tensor.clone() for one in self.training.present()}


def overwrite(fragments: list[LiveShard], value: Callable[[LiveShard], Any]) -> Undo:
    """Give fragments other values; None leaves one as it is."""
    before = [(one.tensor, one.tensor.clone()) for one in fragments]
    made = [value(one) for one in fragments]
    with torch.no_grad():
        for one, new in zip(fragments, made, strict=True):
            if new is not None:
                one.tensor.copy_(new)

    def undo() -> None:
        with torch.no_grad():
            for tensor, old in before:
                tensor.copy_(old)

    return undo


def change(holder: dict[str, Any], key: str, value: Any) -> Undo:
    before, holder[key] = holder[key], value
    return lambda: holder.update({key: before})


def set_rng(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])


def all_of(undos: Iterable[Undo]) -> Undo:
    def undo() -> None:
        for one in undos:
            one()

    return undo


def of_rank(numbers: set[int], fragments: list[LiveShard]) -> list[LiveShard]:
    return fragments if dist.get_rank() in numbers else []


def of(source: int, tensor: Any) -> Any:
    """Return what a rank has in place of this."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, tensor)
    return everybody[source]


def exchanged(tensor: torch.Tensor, source: int) -> torch.Tensor | None:
    """Return what a rank has in place of this; None if it has another number of elements."""
    return found if (found := of(source, tensor)).shape == tensor.shape else None


def begun_as(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Return a flat tensor that begins with what a rank has in its place; DeepSpeed cuts padding off masters."""
    other, found = of(source, tensor), tensor.clone()
    count = min(tensor.numel(), other.numel())
    found[:count] = other[:count]
    return found


class Faults:
    """What may go wrong; each method changes the training and returns how to undo that."""

    def __init__(self, resumed: Resumed, older: Mapping[Any, torch.Tensor], draw: random.Random) -> None:
        self.one, self.older, self.draw = resumed, older, draw

    def clean(self) -> Undo:
        return lambda: None

    def moments_dropped(self) -> Undo:
        return self._dropped(1)

    def half_dropped(self) -> Undo:
        """Of a training whose optimizer has one state per param"""
        return self._dropped(2)

    def _dropped(self, every: int) -> Undo:
        state = self.one.torchs.state
        before = dict(state)
        for param in list(state)[::every]:
            del state[param]

        def undo() -> None:
            state.clear()
            state.update(before)

        return undo

    def zeroed(self) -> Undo:
        return overwrite(self.one.fragments(self.draw.choice(MOMENTS)), lambda one: torch.zeros_like(one.tensor))

    def zeroed_on_one_rank(self) -> Undo:
        return overwrite(of_rank({1}, self.one.fragments("exp_avg_sq")), lambda one: torch.zeros_like(one.tensor))

    def moments_of_another_step(self) -> Undo:
        return overwrite(self.one.fragments(*MOMENTS), self._older)

    def weights_of_another_step(self) -> Undo:
        return overwrite(self.one.fragments("master"), self._older)

    def one_state_of_another_step(self) -> Undo:
        found = self.one.fragments(self.draw.choice(MOMENTS))
        return overwrite([found[self.draw.randrange(len(found))]], self._older)

    def _older(self, one: LiveShard) -> torch.Tensor:
        return self.older[one.param, one.kind, one.begin]

    def permuted(self) -> Undo:
        """The moments of params of equal shape are given in reverse."""
        found = self.one.fragments(*MOMENTS)
        by_shape: dict[tuple[Any, ...], list[LiveShard]] = {}
        for one in found:
            shape = self.one.training.params[one.param].shape
            by_shape.setdefault((one.kind, shape, one.begin, one.tensor.numel()), []).append(one)
        other = {
            id(one): mate.tensor.clone()
            for ones in by_shape.values()
            for one, mate in zip(ones, reversed(ones), strict=True)
        }
        return overwrite(found, lambda one: other[id(one)])

    def ranks_swapped(self) -> Undo:
        return overwrite(self.one.fragments("master", *MOMENTS), lambda one: exchanged(one.tensor, 1 - dist.get_rank()))

    def one_shard_twice(self) -> Undo:
        return overwrite(self.one.fragments("master", *MOMENTS), lambda one: exchanged(one.tensor, 0))

    def flats_swapped(self) -> Undo:
        """DeepSpeed's flat tensors of two ranks, as if their files were exchanged"""
        return self._flats(1 - dist.get_rank())

    def flat_twice(self) -> Undo:
        return self._flats(0)

    def _flats(self, source: int) -> Undo:
        flats = [
            flat
            for kinds in self.one.training._flats(self.one.engine.optimizer.state_dict())
            for flat in kinds.values()
        ]  # type: ignore[attr-defined]
        return overwrite([LiveShard("", "", 0, flat) for flat in flats], lambda one: begun_as(one.tensor, source))

    def masters_rounded(self) -> Undo:
        return overwrite(self.one.fragments("master"), lambda one: one.tensor.bfloat16().to(one.tensor.dtype))

    def moments_in_16_bits(self) -> Undo:
        """Second moments in fp16: most of them are too small for it."""
        found = self.one.fragments("exp_avg_sq")
        return overwrite(found, lambda one: one.tensor.half().to(one.tensor.dtype))

    def one_weight_changed(self) -> Undo:
        found = self.one.fragments("master")
        return overwrite([found[self.draw.randrange(len(found))]], lambda one: one.tensor + 0.01)

    def frozen_changed(self) -> Undo:
        return overwrite(self.one.fragments("frozen"), lambda one: one.tensor + 0.01)

    def frozen_gone_on_one_rank(self) -> Undo:
        if dist.get_rank() != 1:
            return lambda: None
        model = self.one.training.model
        path, _, name = self.one.fragments("frozen")[0].param.rpartition(".")
        return change(model.get_submodule(path)._parameters, name, None)

    def forward_of_another_save(self) -> Undo:
        masters = self.one.fragments("master")
        weights = [LiveShard(one.param, "", one.begin, self.one.training.weight_of(one)) for one in masters]  # type: ignore[arg-type]
        return overwrite(weights, lambda one: one.tensor * 1.25 + 0.01)

    def forward_on_one_rank(self) -> Undo:
        """Where this rank has no masters"""
        begins = {one.param: one.begin for one in self.one.fragments("master")}
        copies = [one for one in self.one.training.copies() if begins.get(one.param, 1)]
        return overwrite(of_rank({1}, copies), lambda one: torch.cat([one.tensor[:1] + 0.1, one.tensor[1:]]))

    def forward_stale(self) -> Undo:
        """The whole weights that a rank has, on all ranks"""
        return overwrite([*self.one.training.copies()], lambda one: one.tensor + 0.1)

    def steps_reset(self) -> Undo:
        undos = []
        for kinds in self.one.torchs.state.values():
            zero = torch.zeros_like(kinds["step"]) if isinstance(kinds["step"], torch.Tensor) else 0
            undos.append(change(kinds, "step", zero))

        return all_of(undos)

    def step_gone(self) -> Undo:
        """Of one param, or one flat tensor"""
        kinds = next(kinds for kinds in self.one.torchs.state.values() if "step" in kinds)
        step = kinds.pop("step")
        return lambda: kinds.update(step=step)

    def rate_changed(self) -> Undo:
        groups = self.one.torchs.param_groups  # those of ZeRO-3 list no params, and PEFT leaves one empty
        group = self.draw.choice([one for one in groups if one["params"]] or groups)
        return change(group, "lr", group["lr"] * 3 + 1e-4)  # the end of a schedule has 0

    def decay_changed(self) -> Undo:
        return change(self.one.torchs.param_groups[0], "weight_decay", 0.7)

    def decay_exchanged(self) -> Undo:
        groups = [one for one in self.one.torchs.param_groups if one["params"]]
        decays = [one["weight_decay"] for one in groups]
        assert len({*decays}) > 1
        return all_of([change(one, "weight_decay", new) for one, new in zip(groups, reversed(decays), strict=True)])

    def schedule_restarted(self) -> Undo:
        state = vars(self.one.scheduler)
        return change(state, next(key for key in ("last_epoch", "last_batch_iteration") if key in state), 0)

    def params_replaced(self) -> Undo:
        """As ``load_state_dict(assign=True)`` does"""
        return self._replaced([*self.one.training.model.modules()])

    def module_replaced(self) -> Undo:
        """As ``resize_token_embeddings`` does"""
        return self._replaced([self.one.training.model.get_submodule(self._first_trained().rpartition(".")[0])])

    def _replaced(self, modules: list[torch.nn.Module]) -> Undo:
        new: dict[int, torch.nn.Parameter] = {}
        undos = []
        for module in modules:
            for key, param in module._parameters.items():
                if param is not None:
                    other = torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
                    undos.append(change(module._parameters, key, new.setdefault(id(param), other)))
        return all_of(undos)

    def untied(self) -> Undo:
        head = self.one.training.model.get_submodule("lm_head")
        return change(head._parameters, "weight", torch.nn.Parameter(head.weight.detach().clone()))

    def param_gone(self) -> Undo:
        """A param is no longer in the optimizer."""
        group = next(one for one in self.one.torchs.param_groups if one["params"])
        return change(group, "params", group["params"][1:])

    def param_frozen(self) -> Undo:
        param = self.one.training.model.get_parameter(self._first_trained())
        param.requires_grad = False
        return lambda: param.requires_grad_(True)

    def param_trained(self) -> Undo:
        """What was frozen is in the optimizer."""
        (group, *_), model = self.one.torchs.param_groups, self.one.training.model
        param = model.get_parameter(self.one.fragments("frozen")[0].param)
        param.requires_grad = True
        undo = change(group, "params", [*group["params"], param])
        return all_of([undo, lambda: param.requires_grad_(False)])

    def _first_trained(self) -> str:
        return next(name for name, fact in self.one.training.params.items() if fact.role == "trainable")

    def schedule_changed(self) -> Undo:
        """Another rule, which stands where the one that was saved stood"""
        state = vars(self.one.scheduler)
        if "lr_lambdas" in state:
            return change(state, "lr_lambdas", [lambda step: 0.5**step] * len(state["lr_lambdas"]))
        return change(state, "inverse_log_warm_up", state["inverse_log_warm_up"] / 2)

    def type_changed(self) -> Undo:
        """A Trainer is given another type of schedule, and the rates are equal so far."""
        return change(vars(self.one.given["trainer"].args), "lr_scheduler_type", "cosine")

    def total_changed(self) -> Undo:
        return change(vars(self.one.given["trainer"].state), "max_steps", 60)

    def schedule_behind(self) -> Undo:
        state = vars(self.one.scheduler)
        key = next(key for key in ("last_epoch", "last_batch_iteration") if key in state)
        return change(state, key, state[key] - 2)

    def counter_reset(self) -> Undo:
        return change(vars(self.one.engine), "global_steps", 0)

    def scale_changed(self) -> Undo:
        scaler = vars(self.one.engine.optimizer.loss_scaler)
        return change(scaler, "cur_scale", scaler["cur_scale"] * 4)

    def scale_ignored(self) -> Undo:
        """One side has the loss scale of fp16 training, and the other one none."""
        scaler = vars(self.one.engine.optimizer.loss_scaler)
        return all_of([change(scaler, "dynamic", not scaler["dynamic"]), self.scale_changed()])

    def random_exchanged(self) -> Undo:
        before = rng_tree()
        others = of(1 - dist.get_rank(), before)
        set_rng(others)
        return lambda: set_rng(before)

    def random_drawn(self) -> Undo:
        before = torch.get_rng_state()
        torch.rand(3)
        return lambda: torch.set_rng_state(before)

    def older_loaded(self) -> Undo:
        self.one.load(self.one.older)
        return lambda: self.one.load(self.one.checkpoint)


def attested(one: Resumed, older: Mapping[Any, torch.Tensor], faults: Iterable[str]) -> dict[str, Any]:
    """Return what is found with each fault, each of which is undone."""
    found = {}
    for number, name in enumerate(faults):
        undo = getattr(Faults(one, older, random.Random(number)), name)()
        found[name] = one.attest().to_json()
        undo()
    again = one.attest("full")
    assert again.is_same and again.num_same == again.num_states, again
    return found


Act = Callable[[Resumed], object]


class Done(Exception):
    """The training has served its purpose."""


class InTrainer(TrainerCallback):  # type: ignore[misc]
    def __init__(self, act: Act, *paths: Path) -> None:
        self.act, self.paths = act, paths

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        trainer = find_trainer(self)
        self.act(Resumed({"trainer": trainer}, parts_of(trainer), *self.paths))
        raise Done


def in_lightning(act: Act, *paths: Path) -> Any:
    import lightning.pytorch as pl

    class InLightning(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            engine, scheduler = getattr(trainer.strategy, "deepspeed_engine", None), trainer.lr_scheduler_configs[0]
            given = {"engine": engine} if engine else {"model": module, "optimizer": trainer.optimizers[0]}
            given["scheduler"] = scheduler.scheduler
            act(Resumed({**given, "step": trainer.global_step}, TrainingObjects(**given), *paths))
            raise Done

    return InLightning()


def resume(spec: Any, checkpoint: Path, folder: Path, watch: Callable[[], Any]) -> None:
    """Let a trainer load a checkpoint; what watches it ends it."""
    program: Any = stock
    if isinstance(spec, Lightning):
        from trainings import lightning as program
    size, attest = os.environ["WORLD_SIZE"], program.AttestResume
    program.AttestResume = lambda **_: watch()
    try:
        program.run(spec.resumed(checkpoint, "again", steps=6), folder)
    except Done:
        pass
    finally:
        program.AttestResume = attest
        os.environ["WORLD_SIZE"] = size
        gc.collect()


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    spec, (newer, older) = from_json(case["spec"]), map(Path, case["checkpoints"])
    held: dict[Any, torch.Tensor] = {}
    found: dict[str, Any] = {}
    if not isinstance(spec, (Spec, Lightning)):
        one = Resumed.in_a_loop(spec, newer, older)
        one.load(older)
        held |= one.values()
        one.load(newer)
        return attested(one, held, case["faults"])
    watched = InTrainer if isinstance(spec, Spec) else in_lightning
    resume(spec, older, folder, lambda: watched(lambda one: held.update(one.values()), older, older))
    resume(
        spec,
        newer,
        folder,
        lambda: watched(lambda one: found.update(attested(one, held, case["faults"])), newer, older),
    )
    return found


def main(plan: Path, folder: Path) -> None:
    deepspeed.init_distributed("gloo")
    for case in json.loads(plan.read_text()):
        found = run_case(case, folder)
        if dist.get_rank() == 0:
            (folder / f"{case['name']}.json").write_text(json.dumps(found))
        gc.collect()
    dist.barrier()
