"""What the saver needs to know of a Trainer before it trains: which one it is, and what contradicts partial saves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from llmtailor.errors import Problem, UnsupportedCheckpoint, UsageError
from llmtailor.policies import Policy
from llmtailor.runs.folder import RunFolder
from llmtailor.saving.loop import FSDP1, FSDP1_FIX
from llmtailor.saving.optimizers import unsupported, unsupported_name
from llmtailor.saving.options import WHERE
from llmtailor.saving.report import SaveReport

logger = logging.getLogger("llmtailor.saving")


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


def check_arguments(trainer: Trainer, others: Sequence[TrainerCallback]) -> None:
    """Check that nothing of a Trainer contradicts partial checkpoints; ``others`` are its other savers.

    Raises UsageError or UnsupportedCheckpoint.
    """
    args, problems = trainer.args, []
    if args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST:
        what = "load_best_model_at_end needs full checkpoints at evaluations, which partial ones replace"
        problems.append(Problem(WHERE, what, 'set save_strategy="best": these full checkpoints are not replaced'))
    if others:
        problems.append(Problem(WHERE, "the Trainer has a saver already", "add one of them only"))
    if problems:
        raise UsageError(problems)
    if problem := _refusal(trainer):
        raise UnsupportedCheckpoint(problem)
    if trainer.is_fsdp_enabled and not getattr(trainer.accelerator, "is_fsdp2", False):
        raise UnsupportedCheckpoint.at(WHERE, FSDP1, FSDP1_FIX)


def _refusal(trainer: Trainer) -> Problem | None:
    """Return why the optimizer can't be saved in parts, if that is known before training."""
    made, given = trainer.optimizer, trainer.optimizer_cls_and_kwargs
    if made is not None:
        return unsupported(type(made), made.param_groups)
    if given is not None:
        return unsupported(given[0])
    return None if trainer.is_deepspeed_enabled else unsupported_name(str(trainer.args.optim.value))


def tell(args: TrainingArguments, policy: Policy, save_steps: int | None, overhead: float | None) -> None:
    """Say what the saver is going to do, in one line; on the first rank."""
    if args.process_index != 0:
        return
    if overhead is not None:
        when = f"as often as {overhead:.2%} of the time allows"
    elif save_steps is None and args.save_strategy == SaveStrategy.EPOCH:
        when = "every epoch"
    elif (every := save_steps or args.save_steps) >= 1:
        when = f"every {every:g} steps"
    else:
        when = f"every {every:.0%} of the training"
    full = ", in place of full ones" if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH) else ""
    limit = "; save_total_limit has nothing to count, keep_composable limits them" if args.save_total_limit else ""
    where = RunFolder(Path(args.output_dir)).partial
    logger.warning("partial checkpoints go to %s %s%s, by the policy %s%s", where, when, full, policy.name, limit)
    if args.push_to_hub and args.hub_strategy.value in ("every_save", "checkpoint", "all_checkpoints"):
        logger.warning("partial checkpoints are not pushed to the hub; full ones (best, at the end) are")


def tell_how_to_resume(args: TrainingArguments, newest: SaveReport | None) -> None:
    """Say what makes a full checkpoint; on the first rank."""
    if newest is not None and args.process_index == 0:
        logger.warning("for a full checkpoint of step %d: llmtailor merge --run %s", newest.step, args.output_dir)
