"""For training loops without a Trainer: a saver for a DeepSpeed engine, or for a torch model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from llmtailor.errors import UsageError
from llmtailor.policies import Policy
from llmtailor.saving.options import SavingOptions
from llmtailor.saving.plain import PlainTraining, unwrap
from llmtailor.saving.saver import PartialSaver
from llmtailor.saving.training import HasState, Pretrained, Training
from llmtailor.saving.writing import owners_of

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def saver_for(
    output_dir: str | Path,
    *,
    engine: DeepSpeedEngine | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    scaler: HasState | None = None,
    tokenizer: Pretrained | None = None,
    policy: str | Mapping[str, object] | Policy = "parity",
    max_staleness: int | None = None,
    keep_composable: int | None = None,
    background: bool = True,
    host_buffer: int | Literal["auto"] = "auto",
    when_busy: Literal["wait", "skip"] = "wait",
    write_timeout: float = 300.0,
    staging_dir: str | Path | None = None,
    mirror: str | None = None,
    moments: Literal["bf16"] | None = None,
) -> PartialSaver:
    """Return a saver for a training loop without a Trainer. Call it, and the saver, on every rank::

        saver = saver_for("runs/x", engine=engine, policy="parity")
        saver.start(step)                   # 0, or the step that the loop resumed from
        ...
        if step % 50 == 0:                  # between two optimizer steps
            saver.save(step)                # returns at once; the save is written while training continues
        ...
        saver.close()                       # waits for the last save

    Args:
        output_dir: the run's folder; partial checkpoints go to ``<output_dir>/partial``.
        engine: from ``deepspeed.initialize``, with ZeRO-1, 2 or 3; leave out ``model`` and ``optimizer`` then.
        model: without DeepSpeed: bare, compiled, or inside DistributedDataParallel.
        optimizer: without DeepSpeed: the model's optimizer, with elementwise state, such as AdamW.
        scheduler: the learning rate scheduler; required without DeepSpeed, and left out if the engine has it.
        scaler: the GradScaler of fp16 training without DeepSpeed.
        tokenizer: anything with ``save_pretrained``, saved with the model's config.
        policy: see `PartialSaver`.
        max_staleness, keep_composable, background, host_buffer, when_busy, write_timeout, staging_dir, mirror, moments:
            see `SavingOptions`.

    Raises:
        UsageError: neither or both of engine and model with optimizer are given, or a model without a scheduler.
        Also what `PartialSaver` raises.
    """
    if (engine is None) == (model is None or optimizer is None):
        raise UsageError.at(
            "saver_for", "it needs a DeepSpeed engine, or a model and its optimizer", "give exactly one of the two"
        )
    if engine is None and scheduler is None:
        what = "it needs a scheduler: without one, the Trainer ignores the optimizer's states when it resumes"
        fix = "for a constant learning rate, use torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)"
        raise UsageError.at("saver_for", what, fix)
    options = SavingOptions(
        max_staleness=max_staleness,
        keep_composable=keep_composable,
        background=background,
        host_buffer=host_buffer,
        when_busy=when_busy,
        write_timeout=write_timeout,
        staging_dir=staging_dir,
        mirror=mirror,
        moments=moments,
    )
    return make_saver(output_dir, engine, model, optimizer, scheduler, scaler, tokenizer, policy, options)


def make_saver(
    output_dir: str | Path,
    engine: DeepSpeedEngine | None,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
    scaler: HasState | None,
    tokenizer: Pretrained | None,
    policy: str | Mapping[str, object] | Policy,
    options: SavingOptions,
) -> PartialSaver:
    """Return a saver for a DeepSpeed engine, or for a model and its optimizer."""
    training: Training
    if engine is not None:
        from llmtailor.saving.deepspeed import ZeroTraining

        training = ZeroTraining(engine)
        # DeepSpeed saves its own scheduler in the model states
        scheduler = None if scheduler is engine.lr_scheduler else scheduler
    else:
        assert model is not None and optimizer is not None, "without an engine"
        kind = PlainTraining
        if any(hasattr(param, "to_local") for param in model.parameters()):  # a DTensor
            from llmtailor.saving.sharded import ShardedTraining as kind
        training = kind(unwrap(model), optimizer, scaler)
    carried = owners_of(training.model, tokenizer)
    return PartialSaver(output_dir, training, policy, scheduler=scheduler, carried=carried, options=options)
