"""What the saver needs to know of a Trainer before it trains: which one it is, and what contradicts partial saves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import FrameType

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from llmtailor.errors import Problem, UnsupportedCheckpoint, UsageError
from llmtailor.saving.loop import FSDP1, FSDP1_FIX

logger = logging.getLogger("llmtailor.saving")
_WHERE = "attach"


def find_trainer(callback: TrainerCallback) -> Trainer:
    """Return the Trainer that calls a callback.

    A callback gets model, optimizer and scheduler, but neither the DeepSpeed engine nor the Trainer; both are needed to
    write what the Trainer would. The Trainer is the ``self`` of the function that runs the callbacks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and any(one is callback for one in found.callback_handler.callbacks):
            return found
        frame = frame.f_back
    what, fix = "it was not called by a Trainer of transformers", "for another loop, use saver_for"
    raise UsageError.at("PartialSaving", what, fix)


def check_schedule(save_steps: object, overhead: float, on_restart: str) -> None:
    """Check the arguments of `attach` that are not in `SavingOptions`. Raises UsageError with every problem."""
    problems = []
    if save_steps not in (None, "auto") and (type(save_steps) is not int or save_steps < 1):
        fix = 'give a number of steps, 1 or more, or "auto"'
        problems.append(Problem(_WHERE, f"save_steps is {save_steps!r}", fix))
    if not 0 < overhead <= 1:
        problems.append(Problem(_WHERE, f"overhead is {overhead!r}", "give a share of the time, such as 0.02"))
    if on_restart not in ("refuse", "compose"):
        problems.append(Problem(_WHERE, f"on_restart is {on_restart!r}", 'give "refuse" or "compose"'))
    if problems:
        raise UsageError(problems)


def check_arguments(trainer: Trainer, others: Sequence[TrainerCallback]) -> None:
    """Check that nothing of a Trainer contradicts partial checkpoints; ``others`` are its other savers.

    Raises UsageError or UnsupportedCheckpoint.
    """
    args, problems = trainer.args, []
    if args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST:
        what = "load_best_model_at_end needs full checkpoints at evaluations, which partial ones replace"
        problems.append(Problem(_WHERE, what, 'set save_strategy="best": these full checkpoints are not replaced'))
    if others:
        problems.append(Problem(_WHERE, "the Trainer has a saver already", "add one of them only"))
    if problems:
        raise UsageError(problems)
    if trainer.is_fsdp_enabled and not getattr(trainer.accelerator, "is_fsdp2", False):
        raise UnsupportedCheckpoint.at(_WHERE, FSDP1, FSDP1_FIX)


def tell(args: TrainingArguments) -> None:
    """Log what partial checkpoints replace."""
    if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH):
        logger.info("partial checkpoints replace the full ones of save_strategy=%s", args.save_strategy.value)
    if args.push_to_hub and args.hub_strategy.value in ("every_save", "checkpoint", "all_checkpoints"):
        logger.warning("partial checkpoints are not pushed to the hub; full ones (best, at the end) are")
