"""For training loops of one's own: a saver for a DeepSpeed engine, or for a torch model and its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtailor.errors import UsageError
from llmtailor.saving.plain import PlainTraining, unwrap
from llmtailor.saving.saver import PartialSaver
from llmtailor.saving.training import Training
from llmtailor.saving.writing import owners_of


def saver_for(
    output_dir: str | Path,
    *,
    engine: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> PartialSaver:
    """Return a saver for a loop; ``options`` are those of `PartialSaver`.

    Give either a DeepSpeedEngine, or a model (bare, or inside DistributedDataParallel) with its torch optimizer. Then,
    on every rank, between two steps::

        saver = saver_for("runs/x", engine=engine, policy="parity")
        saver.start(step)                   # 0, or the step that the loop resumed from
        ...
        if step % 50 == 0:
            saver.save(step)                # raises SaveFailed where the disk is full: catch it to go on

    Raises UsageError for neither or both, or a model without a scheduler, and what `PartialSaver` raises.
    """
    if (engine is None) == (model is None or optimizer is None):
        raise UsageError.at(
            "saver_for", "it needs a DeepSpeed engine, or a model and its optimizer", "give one of both"
        )
    if engine is None and scheduler is None:
        what = "it needs a scheduler: the Trainer's checkpoints have one, and drop the optimizer's states without it"
        fix = "for a constant learning rate, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) will do"
        raise UsageError.at("saver_for", what, fix)
    return make_saver(output_dir, engine, model, optimizer, scheduler, scaler, tokenizer, **options)


def make_saver(
    output_dir: str | Path,
    engine: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    tokenizer: Any,
    **options: Any,
) -> PartialSaver:
    training: Training
    if engine is not None:
        from llmtailor.saving.deepspeed import ZeroTraining

        training = ZeroTraining(engine)
        # DeepSpeed saves a scheduler of its own among the model states
        scheduler = None if scheduler is engine.lr_scheduler else scheduler
    else:
        training = PlainTraining(unwrap(model), optimizer, scaler)
    carried = owners_of(training.model, tokenizer)
    return PartialSaver(output_dir, training, scheduler=scheduler, carried=carried, **options)
