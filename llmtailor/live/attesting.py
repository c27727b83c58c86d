"""Attests live trainings: what an engine, or a model with its optimizer, holds, against the checkpoint it came from."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from llmtailor.attestation.by_position import index_by_position
from llmtailor.attestation.check import (
    ENGINE_COUNTERS,
    MAX_STEPS,
    announce,
    attest_live,
    attest_or_warn,
    judged,
    open_index,
    options_of,
)
from llmtailor.attestation.compare import (
    OFF,
    LearningRates,
    LiveGroup,
    LossMonitor,
    Mismatch,
    MismatchKind,
    Number,
    Subject,
    float_of,
    rates_off_schedule,
)
from llmtailor.attestation.pieces import aliases_of, with_pieces
from llmtailor.attestation.read import Live, LiveFragment, compare_random
from llmtailor.attestation.report import Attestation, with_random_states
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Runs
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.errors import SourceError, TailorError, UnsupportedCheckpoint, some
from llmtailor.formats.param_names import ModelFacts, known_model
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.frameworks.files import CKPT, TRAINER_STATE
from llmtailor.live.any_training import AnyTraining
from llmtailor.live.model import is_adapted, saved_names
from llmtailor.live.tensors import DTYPES, TORCH, bytes_of
from llmtailor.live.torch_training import NamedTraining, unwrap
from llmtailor.live.training import LiveShard, Training, TrainingObjects, persistent_buffers, rng_tree
from llmtailor.model.roles import BUFFER
from llmtailor.param_groups import decaying_names
from llmtailor.patching import next_call, patch_method
from llmtailor.ranks.team import Ranks
from llmtailor.runs.folder import RunFolder

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger("llmtailor.attest")
Write = Callable[[Mapping[str, object]], None]
Say = Callable[[Attestation, Ranks, str], None]
Attestable = Training | AnyTraining


def _write_nothing(found: Mapping[str, object]) -> None:
    """Where there is no record of the run"""


def attest_training(
    training: Attestable,
    checkpoint: Path,
    how: str,
    held: TrainingObjects,
    *,
    with_random: bool = False,
) -> Attestation:
    """Compare a live training with a checkpoint, on all ranks, and what is ``held`` beside it: scheduler, scaler and
    counters; ``with_random`` also the random states. That they differ is a note: the program may have drawn from them
    since. That they are another rank's is an alarm.

    Raises SourceError, UnsupportedCheckpoint."""
    ranks = Ranks.here()
    try:
        opened = open_on_first(training, checkpoint, ranks)
    except SourceError as error:
        has_other_params = all(one.code is Code.RESUME_DIFFERS for one in error.problems)
        if not has_other_params or (judgement := judged(error, display_name(checkpoint), how)) is None:
            raise
        return judgement
    found = _attest(opened, ranks, how, held)
    if not with_random:
        return found
    mine = ranks.run_on_all(lambda: compare_random(opened.index, rng_tree(), ranks.rank, ranks.world_size))
    if any(one.kind is MismatchKind.OTHER_RANK for differing, _ in mine for one in differing):
        return with_random_states(found, mine)
    drawn = [rank for rank, (differing, _) in enumerate(mine) if differing]
    notes = dict.fromkeys(note for _, note in mine if note)
    if drawn:
        notes[f"random states of {len(drawn)} of {ranks.world_size} ranks: not restored, or drawn from since"] = None
    return replace(found, notes=(*found.notes, *notes))


def _attest(opened: AttestedPair, ranks: Ranks, how: str, held: TrainingObjects) -> Attestation:
    with known_model(_facts_of(opened.training)):
        found = attest_live(opened.index, lambda: live_of(opened, held), ranks, how)
    if not held.not_compared:
        return found
    what = f"objects that accelerate saves along are not compared: {some(held.not_compared)}"
    return replace(found, notes=(*found.notes, what))


def attest_loop(
    attest: Callable[[], Attestation],
    checkpoint: object,
    on_mismatch: str,
    step: int = 0,
    write: Write = _write_nothing,
    say: Say = announce,
) -> None:
    """Attest what a loop, or Lightning, has resumed at a step, for the record and the log.

    What can't be attested is a warning. Raises NotTheSame if it is another training and ``on_mismatch`` is ``stop``.
    """
    ranks = Ranks.here()

    def run() -> None:
        found = attest()
        write({"step": step, "attested": found.to_json()})
        say(found, ranks, on_mismatch)

    attest_or_warn(run, checkpoint, ranks.is_first)


@dataclass(frozen=True, slots=True)
class AttestedPair:
    """A checkpoint, and the training in the form in which it can be compared with it."""

    index: CheckpointIndex
    converted: frozenset[str]
    """See `attestation.read.Live`"""
    training: Attestable
    open_other: Callable[[Path], CheckpointIndex]


def open_on_first(training: Attestable, checkpoint: Path, ranks: Ranks) -> AttestedPair:
    """Return a checkpoint, read by rank 0: by names, or by position if it does not state which params it holds."""
    folder = checkpoint.parent if checkpoint.name == CKPT else checkpoint

    def open_first() -> CheckpointIndex:
        try:
            with known_model(_facts_of(training)):
                return open_index(folder)
        except SourceError:  # the live model may be another one
            return open_index(folder)

    def open_other(path: Path) -> CheckpointIndex:
        return _with_pieces(index_checkpoint(path), training)[0]

    try:
        index, converted = ranks.run_on_first(lambda: _with_pieces(open_first(), training))
        return AttestedPair(index, converted, training, open_other)
    except UnsupportedCheckpoint:
        if not isinstance(training, NamedTraining) or training.is_sharded:
            raise
        alike = AnyTraining(training.model, training.optimizer)
        read = partial(index_by_position, live=alike.positions)
        index, converted = ranks.run_on_first(lambda: read(folder))
        return AttestedPair(index, converted, alike, lambda path: read(path)[0])


def _with_pieces(index: CheckpointIndex, training: Attestable) -> tuple[CheckpointIndex, frozenset[str]]:
    if is_adapted(training.model):
        return index, frozenset()
    names = partial(saved_names, training.model, training.params, training.tied)
    return with_pieces(index, training.params, training.tied, names)


def _facts_of(training: Attestable) -> ModelFacts:
    params = {name: fact.shape for name, fact in training.params.items() if fact.role != "buffer"}
    tied = {name: stored for name, stored in training.tied.items() if stored in params}
    buffers = frozenset(name for name, fact in training.params.items() if fact.role == "buffer")
    decaying, saved_as = frozenset(decaying_names(training.model)), None
    if not is_adapted(training.model):
        saved_as = saved_names(training.model, training.params, training.tied)
    return ModelFacts(params, decaying, tied, buffers, saved_as=saved_as or {})


def live_of(opened: AttestedPair, held: TrainingObjects) -> Live:
    """Return what this process holds of a training, and beside it, for `attestation`."""
    training, ranks = opened.training, Ranks.here()
    engine: Any = getattr(training, "engine", None)
    scheduler = held.scheduler if held.scheduler is not None else getattr(engine, "lr_scheduler", None)
    more = {name: getattr(engine, key) for name, key in ENGINE_COUNTERS.items() if engine is not None}
    transient = _transient_buffers(opened)
    lost = _lost(opened)
    unsure = _unsure(opened.index)
    rates, states = rates_of(scheduler), training.states()
    groups = [
        LiveGroup(tuple(names), hyper, rates[number] if number < len(rates) else None)
        for number, (names, hyper) in enumerate(training.groups())
    ]
    return Live(
        fragments=lambda: _fragments(training, held.buffers, transient),
        copies=lambda: (_fragment(one, training.params[one.param].shape) for one in training.copies()),
        roles={name: fact.role for name, fact in training.params.items()} | dict.fromkeys(transient, "buffer"),
        aliases=aliases_of(training.tied),
        steps={name: step for name, step in training.steps().items() if step is not None or states.get(name)},
        numbers={
            name: {kind: number for kind, one in values.items() if (number := _number(one)) is not None}
            for name, values in states.items()
        },
        groups=groups,
        rank=ranks.rank,
        world_size=ranks.world_size,
        schedule=schedule_of(scheduler, engine, held.trainer) if scheduler is not None else None,
        counters={**held.counters, **more},
        scale=held.scaler.state_dict() if held.scaler is not None else _scale_of(engine),
        without_gradient=frozenset(
            name for name, param in training.model.named_parameters() if not param.requires_grad
        ),
        lost=lost - unsure,
        may_be_others=sorted(lost & unsure),
        strays=training.strays(),
        open_other=opened.open_other,
        converted=opened.converted,
    )


def _transient_buffers(opened: AttestedPair) -> dict[str, torch.Tensor]:
    """Return the buffers that the checkpoint holds, and that the training does not save and load: if they are not what
    the model computes, the training has other ones."""
    training, params = opened.training, opened.index.params
    persistent, ignored = persistent_buffers(training.model), _ignored(training.model)
    return {
        name: buffer
        for name, buffer in training.model.named_buffers()
        if name in params and buffer.dtype in DTYPES and not ignored(name)
        if name not in persistent and name not in training.params and name not in training.tied
    }


def _lost(opened: AttestedPair) -> frozenset[str]:
    """Return the frozen params and buffers of the checkpoint that this process's model does not have."""
    training, model, index = opened.training, opened.training.model, opened.index
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    lost = {name for name, param in index.params.items() if param.role != "trainable"} - known
    if not lost:
        return frozenset()
    names = saved_names(model, training.params, training.tied)
    if names is None and index.form.weights_are_whole:
        return frozenset()  # what a weight file calls them is unknown
    known = {*model.state_dict(), *(saved.name for ones in (names or {}).values() for saved in ones)}
    ignored = _ignored(model)
    return frozenset(name for name in lost - known if not ignored(name))


def _unsure(index: CheckpointIndex) -> frozenset[str]:
    """Return the tensors of a DCP folder that may be anything else than the model's: both are at its top level."""
    layout = index.train.dcp
    return index.train.unclear if layout is not None and not layout.model else frozenset()


def _ignored(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function that says whether a name is of a tensor in older files only, which loaders skip: models of
    transformers list them, and all compute the frequencies of their rotary embeddings."""
    listed = (getattr(module, "_keys_to_ignore_on_load_unexpected", None) or () for module in model.modules())
    patterns = {r"rotary_\w*\.inv_freq$", *(one for ones in listed for one in ones)}
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _number(value: Any) -> Number | None:
    """Return a state that is a single number; None for any other."""
    if isinstance(value, torch.Tensor):
        value = value.to_local() if isinstance(value, DTensor) else value
        if value.numel() != 1 or value.dtype not in DTYPES:
            return None
        is_floating = value.is_floating_point()
        return Number(float(value), torch.finfo(value.dtype).eps) if is_floating else Number(float(value))
    return Number(float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def schedule_of(scheduler: Any, engine: Any, trainer: Any = None) -> LearningRates:
    inner = getattr(scheduler, "scheduler", scheduler)
    is_deepspeeds = type(inner).__module__.startswith("deepspeed.")
    options = options_of(engine.config) if is_deepspeeds and engine is not None else {}
    has_rule_beside = is_deepspeeds or isinstance(inner, torch.optim.lr_scheduler.LambdaLR)
    return LearningRates(
        scheduler.state_dict(),
        options,
        rates_of(scheduler) if has_rule_beside else (),
        [schedule_of(one, None) for one in getattr(inner, "_schedulers", ())],
        _arguments_of(inner, trainer) if trainer is not None and not is_deepspeeds else {},
        _logged(inner, trainer) if trainer is not None else {},
    )


def _arguments_of(scheduler: Any, trainer: Any) -> dict[str, Any]:
    """Return the Trainer's arguments that decide the schedule, as far as it may depend on them."""
    names = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
    values = {name: getattr(trainer.args, name, None) or 0 for name in names}
    if any("num_training_steps" in getattr(rule, "keywords", ()) for rule in getattr(scheduler, "lr_lambdas", ())):
        values[MAX_STEPS] = trainer.state.max_steps
    return {name: getattr(value, "value", value) for name, value in values.items()}


def _logged(scheduler: Any, trainer: Any) -> dict[int, tuple[float, float, float]]:
    """Return the rates that the steps before the resume logged, and those that the rule of the live scheduler computes
    for them; a sample of many. Steps that a loss scale has skipped are not the scheduler's."""
    entries = [one for one in trainer.state.log_history if "learning_rate" in one and one.get("step")]
    if getattr(scheduler, "last_epoch", None) != trainer.state.global_step:
        return {}
    found = {}
    for entry in entries[:: len(entries) // 256 + 1]:
        step, rate = int(entry["step"]), float_of(entry["learning_rate"])
        before, after = (rates_of(scheduler, at)[:1] for at in (step - 1, step))
        if rate is not None and before and after:
            found[step] = (rate, before[0], after[0])
    return found


def _scale_of(engine: Any) -> Mapping[str, Any] | None:
    """Return the state of DeepSpeed's own loss scaler, which its optimizers save as an object."""
    scaler = getattr(getattr(engine, "optimizer", None), "loss_scaler", None)
    return None if scaler is None else getattr(scaler, "__dict__", None)


def _fragments(
    training: Attestable, buffers: Mapping[str, torch.Tensor], transient: Mapping[str, torch.Tensor]
) -> Iterator[LiveFragment]:
    for name, buffer in transient.items():
        yield _fragment(LiveShard(name, BUFFER, 0, buffer.detach().reshape(-1)), tuple(buffer.shape))
    for one in training.present():
        if one.kind == BUFFER and one.param in buffers:
            one = replace(one, tensor=buffers[one.param].reshape(-1))
        if one.tensor.dtype not in DTYPES:
            continue
        weight = training.weight_of(one) if one.kind == "master" else None
        shape = training.params[one.param].shape if one.shape is None else one.shape
        forward = None if weight is None else _fragment(replace(one, tensor=weight), shape)
        yield _fragment(one, shape, forward)


def _fragment(one: LiveShard, shape: tuple[int, ...], forward: LiveFragment | None = None) -> LiveFragment:
    tensor = one.tensor.detach()
    read = partial(_read, tensor)
    dtype = DTYPES[tensor.dtype]
    return LiveFragment(one.param, one.kind, one.begin, tensor.numel(), dtype, shape, read, forward, one.box)


def _read(tensor: torch.Tensor, runs: Runs, dtype: str) -> memoryview:
    """Return elements as bytes; those on a GPU are collected and cast there, so that one copy is made."""
    parts = [tensor[begin:end] for begin, end in runs]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return bytes_of(joined.to(TORCH[dtype]).to("cpu").contiguous())


def rates_of(scheduler: Any, step: int | None = None) -> list[float]:
    """Return the learning rates that a scheduler of torch computes for where it stands, by group, or for another step
    if it has a rule for any; empty if unknown."""
    inner = getattr(scheduler, "scheduler", scheduler)  # accelerate's wraps it
    try:
        if isinstance(inner, torch.optim.lr_scheduler.LambdaLR):
            step = inner.last_epoch if step is None else step
            return [float(base) * rule(step) for base, rule in zip(inner.base_lrs, inner.lr_lambdas, strict=True)]
        if step is not None:
            return []
        if type(inner).__module__.startswith("deepspeed."):
            return [float(rate) for rate in inner.get_lr()]
        if hasattr(inner, "_get_closed_form_lr"):
            return [float(rate) for rate in inner._get_closed_form_lr()]
        return [float(rate) for rate in inner.get_last_lr()]
    except Exception:  # a scheduler of the user's may raise anything
        return []


def kept_buffers(held: TrainingObjects) -> dict[str, torch.Tensor]:
    """Return copies of a model's persistent buffers, which the forward pass may change before the first step."""
    model = held.engine.module if held.engine is not None else held.model
    assert model is not None
    return {name: buffer.detach().clone() for name, buffer in persistent_buffers(unwrap(model)).items()}


def parts_of(trainer: Trainer) -> TrainingObjects:
    """Return what of a Trainer is attested."""
    engine: Any = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
    scheduler = trainer.lr_scheduler
    if type(scheduler).__name__ == "DeepSpeedSchedulerWrapper":
        scheduler = engine.lr_scheduler
    scaler, counters = getattr(trainer.accelerator, "scaler", None), {"global_step": trainer.state.global_step}
    if engine is not None:
        return TrainingObjects(engine, scheduler=scheduler, scaler=scaler, counters=counters, trainer=trainer)
    return TrainingObjects(None, trainer.model, trainer.optimizer, scheduler, scaler, counters, trainer=trainer)


def callers() -> Iterator[dict[str, Any]]:
    """Yield the local variables of the functions that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def resumed_from(trainer: Trainer) -> Path | None:
    """Return the checkpoint that a Trainer's running ``train`` resumes from; None if it begins.

    Nothing keeps it but a local variable of the Trainer's loop, which calls the callbacks.
    """
    for found in callers():
        if found.get("self") is trainer and "resume_from_checkpoint" in found:
            given = found["resume_from_checkpoint"]
            if not isinstance(given, bool):
                return Path(given) if given is not None else None
    return None


class TrainerResume:
    """Attests what a Trainer has resumed, before its first optimizer step: callbacks may change it until then. The
    random states are those that the Trainer has restored, and the first losses are compared later.

    1) `begin`. 2) `before_step`, `step_ended` and `logged`, from the callbacks of these names. 3) `ended`, or `give_up`
    if the training begins again.

    Args:
        how: what of it is compared, ``on_mismatch`` what happens if it differs: options of a saver.
        write: adds a line to the record of the run; called on every rank.
        say: takes each attestation, in place of `announce`.
        then: is called once the training was attested, or if there is nothing to attest.
        otherwise: gets the error that ends the training.
        is_strict: raise what prevents an attestation; else it is a warning.
    """

    def __init__(
        self,
        trainer: Trainer,
        how: str,
        on_mismatch: str,
        write: Write = _write_nothing,
        *,
        say: Say = announce,
        then: Callable[[], object] = lambda: None,
        otherwise: Callable[[Any], object] = lambda error: None,
        is_strict: bool = False,
    ) -> None:
        self._trainer, self._how, self._on_mismatch = trainer, how, on_mismatch
        self._write, self._say, self._is_strict = write, say, is_strict
        self._then, self._otherwise = then, otherwise
        self._ranks = Ranks.here()
        self._checkpoint: Path | None = None
        self._losses = LossMonitor()
        self._is_due = self._waits_for_rng = self._has_stepped = False
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._random: Mapping[str, Any] | None = None
        """The random states after the Trainer has restored them: at the start of an epoch it then draws from them"""

    def begin(self, find_training: Callable[[], Attestable]) -> None:
        """Take the checkpoint; call it in ``on_train_begin``, on every rank. ``find_training`` returns the live
        training."""
        trainer, self._find_training = self._trainer, find_training
        self._checkpoint = resumed_from(trainer)
        if self._checkpoint is None or self._how == OFF:
            self._checkpoint = None
            self._call(self._then)
            return
        self._is_due, held = True, parts_of(trainer)
        self._buffers = kept_buffers(held)
        self._waits_for_rng = not trainer.args.ignore_data_skip
        if self._waits_for_rng:
            self._watch_rng(trainer)
        if held.engine is not None:  # which makes the step within the backward pass
            patch_method(held.engine, "step")(self._stepping)

    def before_step(self) -> None:
        """Attest the training within the call of the optimizer's step that follows, after all other callbacks, and
        also if the gradient scaler leaves the step out; call it in ``on_pre_optimizer_step``, on every rank.

        That call raises NotTheSame if it is not the checkpoint's and that is to stop the training.
        """
        if self._is_due and not self._trainer.is_deepspeed_enabled:  # with DeepSpeed the step has been made
            next_call(self._trainer.optimizer, "step")(self._stepping)

    def _stepping(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_due:
            self._is_due = False
            self._call(self._attest)
        return step(*args, **kwargs)

    def give_up(self) -> None:
        """Attest nothing: the training begins again."""
        self._is_due = False

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:
            self._otherwise(error)
            raise

    def _attest(self) -> None:
        checkpoint = self._checkpoint
        assert checkpoint is not None
        attest_or_warn(self._attest_all, checkpoint, self._ranks.is_first, is_strict=self._is_strict)
        self._buffers, self._random = {}, None
        self._then()

    def _attest_all(self) -> None:
        checkpoint, trainer = self._checkpoint, self._trainer
        assert checkpoint is not None
        training, held = self._find_training(), replace(parts_of(trainer), buffers=self._buffers)
        try:
            opened = open_on_first(training, checkpoint, self._ranks)
        except SourceError as error:
            if (judgement := judged(error, display_name(checkpoint), self._how)) is None:
                raise
            self._report(judgement)
            return
        found = self._with_random(_attest(opened, self._ranks, self._how, held), opened.index)
        if self._ranks.is_first:
            state = trainer.state
            log = abandoned_log(Path(trainer.args.output_dir), state.global_step, state.log_history)
            self._losses = LossMonitor(log, not any(one.subject is Subject.SCHEDULE for one in found.mismatches))
        self._report(found)

    def _report(self, found: Attestation) -> None:
        self._write({"step": self._trainer.state.global_step, "attested": found.to_json()})
        self._say(found, self._ranks, self._on_mismatch)

    def _watch_rng(self, trainer: Trainer) -> None:
        """Keep the random states that the Trainer restores. The method is replaced on this one Trainer, once."""

        @patch_method(trainer, "_load_rng_state")
        def loading(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            if self._waits_for_rng:
                self._waits_for_rng = False
                trainer._load_rng_state = load
                self._random = rng_tree()
            return result

    def _with_random(self, found: Attestation, index: CheckpointIndex) -> Attestation:
        """Add the differences of the random states that were restored."""
        if self._trainer.args.ignore_data_skip:
            return replace(found, notes=(*found.notes, "random states: ignore_data_skip does not restore them"))
        random, ranks = self._random, self._ranks

        def compare() -> tuple[list[Mismatch], str]:
            if random is None:
                return [], "random states: they were not restored"
            return compare_random(index, random, ranks.rank, ranks.world_size)

        return with_random_states(found, ranks.run_on_all(compare))

    def ended(self) -> None:
        """Call it at the end: there may have been no step to make."""
        if self._is_due:
            self._is_due = False
            self._call(self._then)

    def step_ended(self) -> None:
        """Call it after each step."""
        if self._checkpoint is None or self._has_stepped:
            return
        self._has_stepped = True
        if self._is_due and self._ranks.is_first:
            what = "the Trainer does not tell callbacks before it calls its optimizer's step"
            logger.warning("resumed from %s: not attested: %s", self._checkpoint, what)
        self.ended()
        rates = [float_of(group.get("lr")) for group in self._trainer.optimizer.param_groups]
        said = rates_off_schedule(rates, rates_of(parts_of(self._trainer).scheduler))
        if said and self._ranks.is_first:
            step = self._trainer.state.global_step
            logger.warning("resumed from %s: after step %d %s", display_name(self._checkpoint), step, said)
            self._write({"step": step, "rates": said})

    def logged(self, logs: Mapping[str, Any]) -> None:
        """Call it with each entry of the log."""
        step = self._trainer.state.global_step
        if self._ranks.is_first and (said := self._losses.see(step, logs)):
            logger.warning("%s", said)
            self._write({"step": step, "losses": said})


def abandoned_log(run: Path, step: int, history: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the log entries after a step that a later checkpoint in the run's folder has, by step.

    ``history`` is the log of the training that was resumed; a checkpoint that has another one up to that step is of
    another attempt. Whatever is damaged is left out.
    """
    before = [dict(one) for one in history if one.get("step", 0) <= step and "loss" in one]
    try:
        folder = RunFolder(run)
        paths = {at: path for at, path in [*folder.complete().items(), *folder.full().items()] if at > step}
    except (TailorError, OSError):
        return {}
    for at in sorted(paths, reverse=True):
        try:
            content = read_json(paths[at] / TRAINER_STATE, str(paths[at]))
            log = [one for one in content["log_history"] if "loss" in one]
        except (TailorError, OSError, KeyError, TypeError):
            continue
        if [one for one in log if one.get("step", 0) <= step] == before:
            return {int(one["step"]): one for one in log if one.get("step", 0) > step}
    return {}
