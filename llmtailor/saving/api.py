"""Makes savers: for a DeepSpeed engine, or for a torch model and its optimizer; and what callbacks do with one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from llmtailor.attestation.check import announce
from llmtailor.attestation.report import Attestation
from llmtailor.background.options import ATTEST, ON_MISMATCH, SavingArguments, SavingOptions
from llmtailor.background.pending import PendingSave
from llmtailor.background.report import SaveFailed
from llmtailor.background.writing import owners_of
from llmtailor.checkpoint.index import DEEPSPEED
from llmtailor.errors import Problem, TailorError, UnsupportedCheckpoint, UsageError
from llmtailor.frameworks.framework import FRAMEWORKS, Framework
from llmtailor.live.any_training import AnyTraining
from llmtailor.live.attesting import Attestable, attest_training, parts_of
from llmtailor.live.torch_training import PlainTraining
from llmtailor.live.training import HasState, Pretrained, Training, TrainingObjects
from llmtailor.policies import DEFAULT_POLICY, Policy
from llmtailor.ranks.team import Ranks
from llmtailor.saving.arguments import Arguments, from_environment
from llmtailor.saving.client_state import AccelerateClient, ClientState, TrainerClient
from llmtailor.saving.saver import PartialSaver
from llmtailor.storage.local import as_path

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from transformers import Trainer
    from typing_extensions import Unpack

logger = logging.getLogger("llmtailor.saving")
FSDP1 = "the flat tensors of FSDP version 1 can't be saved in parts"
FSDP1_FIX = "use FSDP version 2 (fsdp_version), DeepSpeed ZeRO or DDP"


def saver_for(
    output_dir: str | Path,
    *,
    accelerator: Accelerator | None = None,
    engine: DeepSpeedEngine | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    scaler: HasState | None = None,
    tokenizer: Pretrained | None = None,
    policy: str | Mapping[str, object] | Policy = DEFAULT_POLICY,
    **options: Unpack[SavingArguments],
) -> PartialSaver:
    """Return a saver for a training loop without a Trainer. Call it, and the saver, on every rank::

        saver = saver_for("runs/x", engine=engine, policy="adaptive:0.25")
        saver.start(step)                   # 0, or the step that the loop resumed from
        ...
        if step % 50 == 0:                  # between two optimizer steps
            saver.save(step)                # returns at once; the save is written while training continues
        ...
        saver.close()                       # waits for the last save

    Args:
        output_dir: the run's folder; partial checkpoints go to ``<output_dir>/partial``.
        accelerator: from accelerate, after ``prepare``. It gives the engine, or model, optimizer, scheduler and scaler,
            and the random states, data loaders and registered objects that ``load_state`` restores.
        engine: from ``deepspeed.initialize``, with ZeRO-1, 2 or 3; leave out ``model`` and ``optimizer`` then.
        model: without DeepSpeed: bare, compiled, or inside DistributedDataParallel.
        optimizer: without DeepSpeed: the model's optimizer; see docs/optimizers.md.
        scheduler: the learning rate scheduler; required without DeepSpeed, and left out if the engine has it.
        scaler: the GradScaler of fp16 training without DeepSpeed.
        tokenizer: anything with ``save_pretrained``, saved with the model's config.
        policy: see `PartialSaver`.
        options: the fields of `SavingOptions`.

    Raises:
        UsageError: neither or both of engine and model with optimizer are given, a model without a scheduler, or an
            accelerator that has not prepared exactly one model and one optimizer.
        UnsupportedCheckpoint: the accelerator shards with FSDP version 1.
        Also what `PartialSaver` raises.
    """
    if accelerator is not None and (engine is not None or model is not None or optimizer is not None):
        raise UsageError.at("saver_for", "the accelerator has the model already", "give the accelerator only")
    held = _held(accelerator, engine, model, optimizer, scheduler, scaler)
    if (held.engine is None) == (held.model is None or held.optimizer is None):
        raise UsageError.at(
            "saver_for", "it needs a DeepSpeed engine, or a model and its optimizer", "give exactly one of the two"
        )
    if held.engine is None and held.scheduler is None and accelerator is None:
        what = "it needs a scheduler: without one, the Trainer ignores the optimizer's states when it resumes"
        fix = "for a constant learning rate, use torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)"
        raise UsageError.at("saver_for", what, fix)
    own = held.own_scheduler
    beside = TrainerClient(own) if accelerator is None else AccelerateClient(accelerator, own)
    return make_saver(output_dir, held, beside, tokenizer, policy, SavingOptions(**options))


def make_saver(
    output_dir: str | Path,
    held: TrainingObjects,
    beside: ClientState,
    tokenizer: Pretrained | None,
    policy: str | Mapping[str, object] | Policy,
    options: SavingOptions,
    is_tested: bool = False,
) -> PartialSaver:
    """Return a saver for a DeepSpeed engine, or for a model and its optimizer; see `PartialSaver`."""
    training = training_of(held, beside.loader)
    carried = owners_of(training.model, tokenizer)
    return PartialSaver(
        output_dir, training, policy, beside=beside, carried=carried, options=options, is_tested=is_tested
    )


def training_of(held: TrainingObjects, loader: Framework = FRAMEWORKS[DEEPSPEED], *, is_saved: bool = True) -> Training:
    """Return the live training of an engine, or of a model and its optimizer. Raises UnsupportedCheckpoint.

    ``loader`` names the checkpoints of an engine. A training that is only compared, not ``is_saved``, may be wrong in
    ways that a saver refuses.
    """
    if held.engine is not None:
        from llmtailor.live.deepspeed import ZeroTraining

        return ZeroTraining(held.engine, loader, is_saved=is_saved)
    assert held.model is not None and held.optimizer is not None, "without an engine"
    return PlainTraining(held.model, held.optimizer, held.scaler, is_saved=is_saved)


def attestable_of(held: TrainingObjects) -> Attestable:
    """Return a live training that is compared only, also one whose states can't be saved in parts.

    Raises UnsupportedCheckpoint for one whose states can't be read either.
    """
    modules = held.model.modules() if held.model is not None else ()
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in modules):
        raise UnsupportedCheckpoint.at("attest", "the flat tensors of FSDP version 1 can't be compared", FSDP1_FIX)
    try:
        return training_of(held, is_saved=False)
    except UnsupportedCheckpoint:
        if held.engine is not None or held.model is None or held.optimizer is None:
            raise
        return AnyTraining(held.model, held.optimizer)


def attest_held(held: TrainingObjects, checkpoint: Path, how: str, *, with_random: bool = False) -> Attestation:
    """Do what `attest_training` does, with what a program holds."""
    return attest_training(attestable_of(held), checkpoint, how, held, with_random=with_random)


def _held(
    accelerator: Accelerator | None, engine: Any, model: Any, optimizer: Any, scheduler: Any, scaler: Any
) -> TrainingObjects:
    if accelerator is None:
        return TrainingObjects(engine, model, optimizer, scheduler, scaler)
    found = prepared(accelerator)
    return replace(found, scheduler=scheduler or found.scheduler, scaler=scaler or found.scaler)


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
    if how not in ATTEST[1:]:
        problems.append(Problem("attest", f"how is {how!r}", 'give "sample" or "full"'))
    if on_mismatch not in ON_MISMATCH:
        problems.append(Problem("attest", f"on_mismatch is {on_mismatch!r}", 'give "warn" or "stop"'))
    if problems:
        raise UsageError(problems)
    if trainer is not None:
        held = parts_of(trainer)
    else:
        held = _held(accelerator, engine, model, optimizer, scheduler, scaler)
        held = replace(held, counters={} if step is None else {"global_step": step})
    attested = attest_held(held, as_path(checkpoint), how, with_random=accelerator is not None)
    announce(attested, Ranks.here(), on_mismatch)
    return attested


class AttestingCallback:
    """The base of the callbacks that attest what a training has resumed, without saving anything.

    Args:
        attest: ``sample`` compares some elements of every state with the checkpoint, ``full`` every byte.
        on_mismatch: ``warn``, or ``stop`` to end the training on all ranks.

    Raises UsageError for other values, and, when training begins, NotTheSame.
    """

    _say = staticmethod(announce)
    """Takes what an attestation has found"""

    def __init__(
        self, attest: Literal["sample", "full"] = "sample", on_mismatch: Literal["warn", "stop"] = "warn"
    ) -> None:
        self.options = SavingOptions(attest=attest, on_mismatch=on_mismatch)


class SaverCallback:
    """The base of the callbacks of all trainers.

    An argument that is None takes the environment variable of its name. Raises UsageError for arguments and variables
    that make no sense.
    """

    def __init__(self, options: Mapping[str, Any], **given: Any) -> None:
        named = {key: value for key, value in given.items() if value is not None}
        found = Arguments.of({**from_environment(os.environ), **named, **options})
        self.policy, self.save_steps, self.overhead = found.policy, found.save_steps, found.overhead
        self.on_restart, self.options = found.on_restart, found.options
        self.saver: PartialSaver | None = None
        self._saved_step = -1

    def _save(
        self,
        step: int,
        write_state: Callable[[Path], None] | None = None,
        rng: Mapping[str, object] | None = None,
        *,
        is_last: bool = False,
    ) -> PendingSave | None:
        """Return what `PartialSaver.save` does; None, with a warning, if the save fails."""
        assert self.saver is not None
        try:
            return self.saver.save(step, write_state, rng, is_last=is_last)
        except SaveFailed as error:
            cause = None if isinstance(error.__cause__, TailorError) else error.__cause__
            logger.warning("the save at step %d failed; training continues without it: %s", step, error, exc_info=cause)
            return None


def prepared(accelerator: Accelerator) -> TrainingObjects:
    """Return what an accelerator has prepared, as accelerate 1.15 lists it."""
    objects = [type(one).__name__ for one in accelerator._custom_objects]
    if wrapped := getattr(accelerator, "deepspeed_engine_wrapped", None):
        # one of the DeepSpeed config, or of DeepSpeed's kinds, is the engine's
        own = [one for one in accelerator._schedulers if type(one).__name__ != "DeepSpeedSchedulerWrapper"]
        return TrainingObjects(engine=wrapped.engine, scheduler=own[0] if own else None, not_compared=objects)
    if accelerator.distributed_type == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        raise UnsupportedCheckpoint.at("accelerator", FSDP1, FSDP1_FIX)
    models, optimizers, schedulers = accelerator._models, accelerator._optimizers, accelerator._schedulers
    problems = [
        Problem("accelerator", f"it has prepared {len(found)} {what}", fix)
        for what, found, fix in (
            ("models", models, "prepare one, or give saver_for the model that you want saved and its optimizer"),
            ("optimizers", optimizers, "prepare one for all params"),
        )
        if len(found) != 1
    ]
    if len(schedulers) > 1:
        problems.append(Problem("accelerator", f"it has prepared {len(schedulers)} schedulers", "prepare one"))
    if problems:
        raise UsageError(problems)
    scheduler = schedulers[0] if schedulers else None
    return TrainingObjects(None, models[0], optimizers[0], scheduler, accelerator.scaler, not_compared=objects)
