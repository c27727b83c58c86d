"""What a program holds of a training, and the live training that is in it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from llmtailor.checkpoint.index import DEEPSPEED
from llmtailor.errors import Problem, UnsupportedCheckpoint, UsageError
from llmtailor.frameworks.framework import FRAMEWORKS, Framework
from llmtailor.live.any_training import AnyTraining
from llmtailor.live.torch_training import TorchTraining
from llmtailor.live.training import Training, TrainingObjects

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

from typing import TYPE_CHECKING

from llmtailor.live.torch_training import unwrap
from llmtailor.live.training import persistent_buffers

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

Attestable = Training | AnyTraining
FSDP1 = "the flat tensors of FSDP version 1 can't be saved in parts"
FSDP1_FIX = "use FSDP version 2 (fsdp_version), DeepSpeed ZeRO or DDP"


def training_of(
    objects: TrainingObjects, framework: Framework = FRAMEWORKS[DEEPSPEED], *, is_saved: bool = True
) -> Training:
    """Return the live training of an engine, or of a model and its optimizer. Raises UnsupportedCheckpoint.

    ``framework`` names the checkpoints of an engine. A training that is only compared, not ``is_saved``, may be wrong
    in ways that a saver refuses.
    """
    if objects.engine is not None:
        from llmtailor.live.deepspeed import ZeroTraining

        return ZeroTraining(objects.engine, framework, is_saved=is_saved)
    assert objects.model is not None and objects.optimizer is not None, "without an engine"
    return TorchTraining(objects.model, objects.optimizer, objects.scaler, is_saved=is_saved)


def attestable_of(objects: TrainingObjects) -> Attestable:
    """Return a live training that is compared only, also one whose states can't be saved in parts.

    Raises UnsupportedCheckpoint for one whose states can't be read either.
    """
    modules = objects.model.modules() if objects.model is not None else ()
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in modules):
        raise UnsupportedCheckpoint.at("attest", "the flat tensors of FSDP version 1 can't be compared", FSDP1_FIX)
    try:
        return training_of(objects, is_saved=False)
    except UnsupportedCheckpoint:
        if objects.engine is not None or objects.model is None or objects.optimizer is None:
            raise
        return AnyTraining(objects.model, objects.optimizer)


def objects_of(
    accelerator: Accelerator | None, engine: Any, model: Any, optimizer: Any, scheduler: Any, scaler: Any
) -> TrainingObjects:
    """Return what a loop gives: an accelerator, or an engine, or a model with its optimizer."""
    if accelerator is None:
        return TrainingObjects(engine=engine, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    found = prepared(accelerator)
    return replace(found, scheduler=scheduler or found.scheduler, scaler=scaler or found.scaler)


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
    return TrainingObjects(
        model=models[0],
        optimizer=optimizers[0],
        scheduler=scheduler,
        scaler=accelerator.scaler,
        not_compared=objects,
    )


def kept_buffers(objects: TrainingObjects) -> dict[str, torch.Tensor]:
    """Return copies of a model's persistent buffers, which the forward pass may change before the first step."""
    model = objects.engine.module if objects.engine is not None else objects.model
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
        objects = TrainingObjects(engine=engine)
    else:
        objects = TrainingObjects(model=trainer.model, optimizer=trainer.optimizer)
    return replace(objects, scheduler=scheduler, scaler=scaler, counters=counters, trainer=trainer)
