"""Makes savers: for a DeepSpeed engine, or for a torch model and its optimizer; and what callbacks do with one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from llmtailor.attestation.check import announce
from llmtailor.background.options import SavingArguments, SavingOptions
from llmtailor.background.pending import PendingSave
from llmtailor.background.report import SaveFailed
from llmtailor.background.writing import owners_of
from llmtailor.errors import TailorError, UsageError
from llmtailor.live.objects import objects_of, training_of
from llmtailor.live.training import HasState, Pretrained, TrainingObjects
from llmtailor.policies import DEFAULT_POLICY, Policy
from llmtailor.saving.arguments import Arguments, from_environment
from llmtailor.saving.framework_state import FrameworkState, StateOfAccelerate, StateOfTrainer
from llmtailor.saving.saver import PartialSaver

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from typing_extensions import Unpack

logger = logging.getLogger("llmtailor.saving")


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
    objects = objects_of(accelerator, engine, model, optimizer, scheduler, scaler)
    if (objects.engine is None) == (objects.model is None or objects.optimizer is None):
        raise UsageError.at(
            "saver_for", "it needs a DeepSpeed engine, or a model and its optimizer", "give exactly one of the two"
        )
    if objects.engine is None and objects.scheduler is None and accelerator is None:
        what = "it needs a scheduler: without one, the Trainer ignores the optimizer's states when it resumes"
        fix = "for a constant learning rate, use torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)"
        raise UsageError.at("saver_for", what, fix)
    own = objects.own_scheduler
    beside = StateOfTrainer(own) if accelerator is None else StateOfAccelerate(accelerator, own)
    return make_saver(output_dir, objects, beside, tokenizer=tokenizer, policy=policy, options=SavingOptions(**options))


def make_saver(
    output_dir: str | Path,
    objects: TrainingObjects,
    beside: FrameworkState,
    *,
    tokenizer: Pretrained | None = None,
    policy: str | Mapping[str, object] | Policy,
    options: SavingOptions,
    is_tested: bool = False,
) -> PartialSaver:
    """Return a saver for a DeepSpeed engine, or for a model and its optimizer; see `PartialSaver`."""
    training = training_of(objects, beside.framework)
    carried = owners_of(training.model, tokenizer)
    return PartialSaver(
        output_dir, training, policy, beside=beside, carried=carried, options=options, is_tested=is_tested
    )


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
