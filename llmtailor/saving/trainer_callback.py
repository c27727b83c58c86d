"""The saver in the Hugging Face Trainer: two lines in a training script.

The Trainer is not patched. A callback runs after the Trainer's own callbacks, detects that a step is about to be saved,
and makes a partial save instead. Other saves of the Trainer (``save_strategy="best"``, ``save_model``) are unaffected.

The Trainer saves a step after its log entry and its evaluation, which draws random numbers, may find the best metric
and may step the scheduler (ReduceLROnPlateau). No callback runs at exactly that moment. So the save waits for the next
callback, before which neither model nor optimizer changes, and gets the random states of the Trainer's own save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from llmtailor.checkpoint.lineage import Past
from llmtailor.errors import Problem, TailorError, UnsupportedCheckpoint, UsageError
from llmtailor.formats.attempt_mark import make_mark
from llmtailor.formats.clients import TRAINER_STATE
from llmtailor.formats.trainer_checks import CALLBACKS, MARK
from llmtailor.policies import Policy, make_policy
from llmtailor.saving.cadence import FIRST, Appointment, Stopclock
from llmtailor.saving.loop import make_saver
from llmtailor.saving.model import check_before_training
from llmtailor.saving.options import SavingOptions
from llmtailor.saving.pending import SaveFailed
from llmtailor.saving.plain import unwrap
from llmtailor.saving.saver import PartialSaver
from llmtailor.saving.training import rng_tree

logger = logging.getLogger("llmtailor.saving")
_WHERE = "attach"


def attach(
    trainer: Trainer,
    policy: str | Mapping[str, object] | Policy = "parity",
    save_steps: int | Literal["auto"] | None = None,
    *,
    overhead: float = 0.02,
    max_staleness: int | None = None,
    keep_composable: int | None = None,
    background: bool = True,
    host_buffer: int | Literal["auto"] = "auto",
    when_busy: Literal["wait", "skip"] = "wait",
    write_timeout: float = 300.0,
    staging_dir: str | Path | None = None,
    mirror: str | None = None,
    moments: Literal["bf16"] | None = None,
) -> PartialSaving:
    """Make a Trainer save partial checkpoints instead of full ones, and return the callback that does so.

    Call it on every rank, before ``trainer.train()``. A save that fails logs a warning; training continues.

    Args:
        trainer: with DeepSpeed ZeRO-1, 2 or 3, or without DeepSpeed (one process, DDP or FSDP2).
        policy: which parts each save holds; see `make_policy`.
        save_steps: optimizer steps between two saves. None keeps the training arguments' ``save_strategy``. ``auto``
            saves as often as ``overhead`` allows, by what steps and saves take.
        overhead: with ``auto``, the share of the training time that saving may cost.
        max_staleness, keep_composable, background, host_buffer, when_busy, write_timeout, staging_dir, mirror, moments:
            see `SavingOptions`.

    Raises:
        UsageError: the policy cannot guarantee that every saved step is composable, or the training arguments
            contradict partial checkpoints. All reasons are reported together.
        UnsupportedCheckpoint: the training uses FSDP version 1.
    """
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
    callback = PartialSaving(trainer, policy, save_steps, options, overhead)
    trainer.add_callback(callback)
    return callback


class PartialSaving(TrainerCallback):  # type: ignore[misc]
    """The callback that `attach` adds. ``saver`` is None until training begins."""

    def __init__(
        self,
        trainer: Trainer,
        policy: str | Mapping[str, object] | Policy = "parity",
        save_steps: int | Literal["auto"] | None = None,
        options: SavingOptions | None = None,
        overhead: float = 0.02,
    ) -> None:
        _check(trainer, save_steps, overhead)
        self.trainer = trainer
        self.policy = make_policy(policy)
        self.save_steps = save_steps if isinstance(save_steps, int) else None
        self.overhead = overhead if save_steps == "auto" else None
        self._clock = Stopclock()
        self._appointment = FIRST
        self.options = options or SavingOptions()
        check_before_training(unwrap(trainer.model), self.policy, self.options.max_staleness)
        self.saver: PartialSaver | None = None
        self._pending_rng: dict[str, Any] | None = None
        self._saved_step = -1
        self._is_last = False
        self._has_state = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        trainer = self.trainer
        if self.saver is not None:  # from a training that ended with an error
            self.saver.close()
        self._pending_rng, self._has_state, self._is_last = None, False, False
        scheduler = trainer.lr_scheduler
        if type(scheduler).__name__ == "DeepSpeedSchedulerWrapper":
            scheduler = None  # a scheduler from the DeepSpeed config, which the engine saves
        self.saver = make_saver(
            args.output_dir,
            engine=trainer.model_wrapped if trainer.is_deepspeed_enabled else None,
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
            tokenizer=trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None),
            policy=self.policy,
            options=self.options,
        )
        self.saver.start(state.global_step, {CALLBACKS: state.stateful_callbacks})
        self._mark(state)
        self._saved_step = state.global_step

    def _mark(self, state: TrainerState) -> None:
        """Record the current attempt in the state, so that the Trainer's own saves state it."""
        assert self.saver is not None
        ledger = self.saver.ledger
        state.stateful_callbacks[MARK] = make_mark(Past(state.global_step, ledger.lineage, ledger.history))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._mark(state)
        if self.saver is not None and not self._has_state:
            self._has_state = self.saver.has_state()  # refuses an optimizer now, not at the first save
        every = self.save_steps or state.save_steps
        by_steps = (self.save_steps or self.overhead) is not None or args.save_strategy != SaveStrategy.EPOCH
        is_last = state.global_step >= state.max_steps
        if args.save_strategy == SaveStrategy.STEPS:
            control.should_save = False
        is_due = state.global_step % every == 0 if self.overhead is None else self._is_due(state.global_step)
        if by_steps and (is_due or is_last):
            self._is_last = is_last
            self._take(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._settle()
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = False
            if self.save_steps is None and self.overhead is None:
                self._take(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None:
            return
        if "train_loss" in logs:  # the final entry, after which the best model may be loaded
            self._pending_rng = self._pending_rng or rng_tree()  # any callback may have stopped at any step
            self._settle(is_last=True)
            self._finish()
        elif "loss" in logs and not control.should_evaluate:
            self._settle()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._pending_rng is not None:
            self._pending_rng = rng_tree()  # another data set may follow

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._settle()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._settle()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._settle(is_last=True)
        if self.saver is not None:
            self.saver.close()

    def _finish(self) -> None:
        """Wait until no save is in progress, and log the last one: its metrics, or why it failed."""
        if self.saver is not None:
            self.saver.finish()
            self._log()

    def _log(self) -> None:
        assert self.saver is not None
        trainer = self.trainer
        for report in self.saver.reports():
            is_due = trainer.control.should_log
            trainer.log(report.metrics())
            trainer.control.should_log = is_due  # else the Trainer treats this as the step's own log

    def _is_due(self, step: int) -> bool:
        """Return whether to save now so that saving stays within the overhead; the same on all ranks."""
        saver, overhead = self.saver, self.overhead
        assert saver is not None and overhead is not None
        self._clock.step(time.monotonic(), is_busy=saver.is_busy)
        if step < self._appointment or self._saved_step == step:
            return False
        newest = saver.newest
        costs = self._clock.costs(newest.stall_s, newest.publish_s) if newest is not None else None
        if newest is None and not saver.is_busy:
            mine = Appointment(True, step + 1)  # the first, or all before it have failed
        else:
            mine = Appointment.at(step, self._saved_step, costs, overhead, is_busy=saver.is_busy)
        decided = saver.ranks.from_first(mine)
        self._appointment = decided.again
        if decided.is_due and (cadence := decided.cadence) is not None:
            what = (
                "step %d: saving every %d steps keeps to an overhead of %g; a failure costs %.3g s of work on average"
            )
            logger.info(what, step, cadence.save_steps, overhead, cadence.lost_s)
            saver.record.log({"step": step, "save_steps": cadence.save_steps, "lost_s": round(cadence.lost_s, 6)})
        return decided.is_due

    def _take(self, control: TrainerControl) -> None:
        self._pending_rng = rng_tree()
        if not (control.should_log or control.should_evaluate):
            self._settle()

    def _settle(self, *, is_last: bool = False) -> None:
        rng, self._pending_rng = self._pending_rng, None
        if rng is None:
            return
        trainer, step = self.trainer, self.trainer.state.global_step
        if step == self._saved_step or self.saver is None:
            return
        trainer.store_flos()
        try:
            save = self.saver.save(step, self._write_state, rng, is_last=is_last or self._is_last)
        except SaveFailed as error:
            cause = None if isinstance(error.__cause__, TailorError) else error.__cause__
            logger.warning("the save at step %d failed; training continues without it: %s", step, error, exc_info=cause)
            save = None
        if save is not None:
            self._saved_step = step
            self._clock.saved()
        self._log()

    def _write_state(self, folder: Path) -> None:
        """Write ``trainer_state.json`` as the Trainer does, with the states of callbacks that have one."""
        trainer = self.trainer
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(trainer.state.stateful_callbacks.get(name), list):
                    trainer.state.stateful_callbacks[name].append(callback.state())
                else:
                    trainer.state.stateful_callbacks[name] = callback.state()
        trainer.state.save_to_json(str(folder / TRAINER_STATE))


def _check(trainer: Trainer, save_steps: int | Literal["auto"] | None, overhead: float) -> None:
    args, problems = trainer.args, []
    if save_steps not in (None, "auto") and (type(save_steps) is not int or save_steps < 1):
        fix = 'give a number of steps, 1 or more, or "auto"'
        problems.append(Problem(_WHERE, f"save_steps is {save_steps!r}", fix))
    if not 0 < overhead <= 1:
        problems.append(Problem(_WHERE, f"overhead is {overhead!r}", "give a share of the time, such as 0.02"))
    if args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST:
        what = "load_best_model_at_end needs full checkpoints at evaluations, which partial ones replace"
        problems.append(Problem(_WHERE, what, 'set save_strategy="best": these full checkpoints are not replaced'))
    if problems:
        raise UsageError(problems)
    if trainer.is_fsdp_enabled and not getattr(trainer.accelerator, "is_fsdp2", False):
        what = "the flat tensors of FSDP version 1 can't be saved in parts"
        raise UnsupportedCheckpoint.at(_WHERE, what, "use FSDP version 2 (fsdp_version), DeepSpeed ZeRO or DDP")
    if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH):
        logger.info("partial checkpoints replace the full ones of save_strategy=%s", args.save_strategy.value)
    if args.push_to_hub and args.hub_strategy.value in ("every_save", "checkpoint", "all_checkpoints"):
        logger.warning("partial checkpoints are not pushed to the hub; full ones (best, at the end) are")
