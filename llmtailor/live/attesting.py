"""Attests live trainings: what an engine, or a model with its optimizer, holds, against the checkpoint it came from."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

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
    FULL,
    SAMPLE,
    STOP,
    WARN,
    LearningRates,
    LiveGroup,
    MismatchKind,
    Number,
    float_of,
)
from llmtailor.attestation.pieces import aliases_of, with_pieces
from llmtailor.attestation.read import Live, LiveFragment, compare_random
from llmtailor.attestation.report import Attestation, with_random_states
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.placement import Runs
from llmtailor.codes import Code
from llmtailor.errors import Problem, SourceError, UnsupportedCheckpoint, UsageError, some
from llmtailor.formats.param_names import ModelFacts, known_model
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.frameworks.files import CKPT
from llmtailor.live.any_training import AnyTraining
from llmtailor.live.model import is_adapted, saved_names
from llmtailor.live.objects import Attestable, attestable_of, objects_of, parts_of
from llmtailor.live.tensors import DTYPES, TORCH, bytes_of, local_of
from llmtailor.live.torch_training import NamedTraining
from llmtailor.live.training import HasState, LiveShard, TrainingObjects, persistent_buffers, rng_tree
from llmtailor.model.roles import BUFFER
from llmtailor.param_groups import decaying_names
from llmtailor.ranks.team import Ranks
from llmtailor.storage.local import as_path

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from transformers import Trainer

logger = logging.getLogger("llmtailor.attest")
Write = Callable[[Mapping[str, object]], None]
Say = Callable[[Attestation, Ranks, str], None]


def write_nothing(found: Mapping[str, object]) -> None:
    """Where there is no record of the run"""


def attest_training(
    training: Attestable,
    checkpoint: Path,
    how: str,
    objects: TrainingObjects,
    *,
    with_random: bool = False,
) -> Attestation:
    """Compare a live training with a checkpoint, on all ranks, and the program's other ``objects``: scheduler, scaler
    and counters; ``with_random`` also the random states. That they differ is a note: the program may have drawn from
    them since. That they are another rank's is an alarm.

    Raises SourceError, UnsupportedCheckpoint."""
    ranks = Ranks.here()
    try:
        opened = open_on_first(training, checkpoint, ranks)
    except SourceError as error:
        has_other_params = all(one.code is Code.RESUME_DIFFERS for one in error.problems)
        if not has_other_params or (judgement := judged(error, display_name(checkpoint), how)) is None:
            raise
        return judgement
    found = attest_opened(opened, ranks, how, objects)
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


def attest(
    checkpoint: str | Path,
    *,
    trainer: Trainer | None = None,
    accelerator: Accelerator | None = None,
    engine: DeepSpeedEngine | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    scaler: HasState | None = None,
    step: int | None = None,
    how: Literal["sample", "full"] = "sample",
    on_mismatch: Literal["warn", "stop"] = "warn",
) -> Attestation:
    """Compare a training that was resumed with the checkpoint that it was resumed from, and say what differs.

    Call it on every rank, after loading and before the first optimizer step::

        engine.load_checkpoint("runs/x")
        llmtailor.attest("runs/x", engine=engine)

    Compared are weights or masters, moments, Adam's steps, the options of param groups, the scheduler, the scaler and
    counters, whatever format, number of ranks or stage the checkpoint was saved with.

    Args:
        checkpoint: the folder that was resumed from.
        trainer, accelerator, engine: what holds the training; one of them, or ``model`` with ``optimizer``.
        model: bare, compiled, inside DistributedDataParallel, or sharded by ``fully_shard``.
        scheduler: the learning rate scheduler, unless one of the first three has it.
        scaler: the GradScaler, likewise.
        step: the optimizer steps that the loop counts, to be compared as well.
        how: ``sample`` compares some elements of every state, ``full`` every byte.
        on_mismatch: ``warn`` logs and returns what differs, ``stop`` raises NotTheSame on every rank.

    Returns what was found, the same on every rank.

    Raises:
        UsageError: not exactly one training is given, or an argument makes no sense.
        UnsupportedCheckpoint: the training's states can't be read.
        SourceError: the checkpoint can't be read.
    """
    given = [one for one in (trainer, accelerator, engine, model) if one is not None]
    problems = []
    if len(given) != 1 or (model is None) != (optimizer is None):
        fix = "give a trainer, an accelerator, an engine, or a model and its optimizer"
        problems.append(Problem("attest", f"{len(given)} trainings are given, or one without its optimizer", fix))
    if how not in (SAMPLE, FULL):
        problems.append(Problem("attest", f"how is {how!r}", 'give "sample" or "full"'))
    if on_mismatch not in (WARN, STOP):
        problems.append(Problem("attest", f"on_mismatch is {on_mismatch!r}", 'give "warn" or "stop"'))
    if problems:
        raise UsageError(problems)
    if trainer is not None:
        objects = parts_of(trainer)
    else:
        objects = objects_of(accelerator, engine, model, optimizer, scheduler, scaler)
        objects = replace(objects, counters={} if step is None else {"global_step": step})
    attested = attest_objects(objects, as_path(checkpoint), how, with_random=accelerator is not None)
    announce(attested, Ranks.here(), on_mismatch)
    return attested


def attest_objects(objects: TrainingObjects, checkpoint: Path, how: str, *, with_random: bool = False) -> Attestation:
    """Do what `attest_training` does, with what a program holds."""
    return attest_training(attestable_of(objects), checkpoint, how, objects, with_random=with_random)


def attest_opened(opened: AttestedPair, ranks: Ranks, how: str, objects: TrainingObjects) -> Attestation:
    with known_model(_facts_of(opened.training)):
        found = attest_live(opened.index, lambda: live_of(opened, objects), ranks, how)
    if not objects.not_compared:
        return found
    what = f"objects that accelerate saves along are not compared: {some(objects.not_compared)}"
    return replace(found, notes=(*found.notes, what))


def attest_loop(
    attest: Callable[[], Attestation],
    checkpoint: object,
    on_mismatch: str,
    step: int = 0,
    write: Write = write_nothing,
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


def live_of(opened: AttestedPair, objects: TrainingObjects) -> Live:
    """Return what this process holds of a training, and beside it, for `attestation`."""
    training, ranks = opened.training, Ranks.here()
    engine: Any = getattr(training, "engine", None)
    scheduler = objects.scheduler if objects.scheduler is not None else getattr(engine, "lr_scheduler", None)
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
        fragments=lambda: _fragments(training, objects.buffers, transient),
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
        schedule=schedule_of(scheduler, engine, objects.trainer) if scheduler is not None else None,
        counters={**objects.counters, **more},
        scale=objects.scaler.state_dict() if objects.scaler is not None else _scale_of(engine),
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
    layout = index.dcp
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
        value = local_of(value)
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
