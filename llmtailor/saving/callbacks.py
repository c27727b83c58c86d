"""The saver in the Hugging Face Trainer: two lines in a training script.

The Trainer's classes are not patched. A callback runs after the Trainer's own callbacks, detects that a step is about
to be saved, and makes a partial save instead. Other saves of the Trainer (``save_strategy="best"``, ``save_model``) are
unaffected.

The Trainer saves a step after its log entry and its evaluation, which draws random numbers, may find the best metric
and may step the scheduler (ReduceLROnPlateau). No callback runs at exactly that moment. So the save waits for the next
callback, before which neither model nor optimizer changes, and gets the random states of the Trainer's own save.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from llmtailor.attestation.check import announce
from llmtailor.background.options import SAME_FIX, WHERE, SavingArguments
from llmtailor.errors import Problem, Problems, StorageError, TailorError, UnsupportedCheckpoint, UsageError, attempt
from llmtailor.formats.optimizer_objects import unsupported, unsupported_name
from llmtailor.frameworks.files import TRAINER_STATE, TRAINING_ARGS
from llmtailor.frameworks.trainer_state import CALLBACKS, MARK, make_mark
from llmtailor.live.model import check_before_training
from llmtailor.live.objects import FSDP1, FSDP1_FIX, attestable_of, parts_of
from llmtailor.live.torch_training import unwrap
from llmtailor.live.trainer_resume import TrainerResume, callers
from llmtailor.live.training import rng_tree
from llmtailor.policies import Policy
from llmtailor.ranks.team import check_same
from llmtailor.runs.folder import RunFolder
from llmtailor.saving.api import AttestingCallback, SaverCallback, make_saver
from llmtailor.saving.arguments import check_layout, from_environment, stock_arguments
from llmtailor.saving.cadence import FIRST, SaveDecision, StepTimer
from llmtailor.saving.framework_state import StateOfTrainer
from llmtailor.saving.restart import resume_automatically
from llmtailor.stock_saving.trainer import StockSaving

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("llmtailor.saving")


def find_trainer(callback: TrainerCallback) -> Trainer:
    """Return the Trainer that calls a callback.

    A callback gets model, optimizer and scheduler, but neither the DeepSpeed engine nor the Trainer; both are needed to
    write what the Trainer would. The Trainer is the ``self`` of the function that runs the callbacks.
    """
    for variables in callers():
        found = variables.get("self")
        if isinstance(found, Trainer) and any(one is callback for one in found.callback_handler.callbacks):
            return found
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
        problems.append(Problem(WHERE, "the Trainer already has a saver", "add one of them only"))
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
    optim = trainer.args.optim  # transformers makes it an enum of str; a script may set a str later
    return None if trainer.is_deepspeed_enabled else unsupported_name(str(getattr(optim, "value", optim)))


def log_plan(args: TrainingArguments, policy: Policy, save_steps: int | None, overhead: float | None) -> None:
    """Log what the saver will do, in one line; on the first rank."""
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
    limit = "; save_total_limit has no effect, use keep_composable" if args.save_total_limit else ""
    where = RunFolder(Path(args.output_dir)).partial
    logger.warning("partial checkpoints go to %s %s%s, by the policy %s%s", where, when, full, policy.name, limit)
    if args.push_to_hub and args.hub_strategy.value in ("every_save", "checkpoint", "all_checkpoints"):
        logger.warning("only full checkpoints (best, final) are pushed to the hub, not partial ones")


@overload
def attach(
    trainer: Trainer,
    policy: str | Mapping[str, object] | Policy | None = None,
    save_steps: int | Literal["auto"] | None = None,
    *,
    layout: Literal["partial"] | None = None,
    overhead: float | None = None,
    on_restart: Literal["refuse", "compose"] | None = None,
    **options: Unpack[SavingArguments],
) -> PartialSaving: ...
@overload
def attach(
    trainer: Trainer,
    policy: str | None = None,
    *,
    layout: Literal["stock"],
    **options: Unpack[SavingArguments],
) -> StockSaving: ...
def attach(
    trainer: Trainer,
    policy: str | Mapping[str, object] | Policy | None = None,
    save_steps: int | Literal["auto"] | None = None,
    *,
    layout: Literal["partial", "stock"] | None = None,
    overhead: float | None = None,
    on_restart: Literal["refuse", "compose"] | None = None,
    **options: Unpack[SavingArguments],
) -> PartialSaving | StockSaving:
    """Make a Trainer save partial checkpoints instead of full ones, and return the callback that does so.

    Call it on every rank, before ``trainer.train()``. It adds a `PartialSaving`, and checks at once what that checks
    when training begins. A save that fails logs a warning; training continues.

    Args:
        trainer: with DeepSpeed ZeRO-1, 2 or 3, or without DeepSpeed (one process, DDP or FSDP2).
        policy, save_steps, overhead, on_restart, options: see `PartialSaving`.
        layout: ``stock`` leaves the Trainer's own full checkpoints as they are, at the steps that its arguments say,
            and only writes them while training continues. It has the options of `options.STOCK`.

    Raises:
        UsageError: the policy cannot guarantee that every saved step is composable, the training arguments contradict
            partial checkpoints, or the Trainer already has a saver. All reasons are reported together.
        UnsupportedCheckpoint: the training uses FSDP version 1.
    """
    layout = layout or from_environment(os.environ).get("layout")
    if layout == "stock":
        named = {"policy": policy, "save_steps": save_steps, "overhead": overhead, "on_restart": on_restart}
        return attach_stock(trainer, {name: value for name, value in named.items() if value is not None} | options)
    problems = Problems()

    def make() -> PartialSaving:
        check_layout(layout)
        return PartialSaving(policy, save_steps, overhead=overhead, on_restart=on_restart, **options)

    callback = attempt(make, problems, UsageError)
    attempt(lambda: check_arguments(trainer, _savers_of(trainer)), problems, TailorError)
    problems.raise_if_any()
    assert callback is not None, "else it was raised why"
    callback._bind(trainer)
    callback._check()
    trainer.add_callback(callback)
    return callback


def attach_stock(trainer: Trainer, given: Mapping[str, Any]) -> StockSaving:
    """Do what `attach` does with ``layout="stock"`` and these arguments; others are taken from the environment."""
    options, resume = stock_arguments({**from_environment(os.environ), **given})
    if _savers_of(trainer):
        raise UsageError.at(WHERE, "the Trainer already has a saver", "add one of them only")
    callback = StockSaving(trainer, options)
    trainer.add_callback(callback)
    if resume.attest != "off":
        trainer.add_callback(AttestResume(resume.attest, resume.on_mismatch))
    return callback


class Resuming(TrainerCallback):  # type: ignore[misc]
    """Tells what attests a Trainer's resume how the training goes on."""

    _resume: TrainerResume | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        if self._resume is not None:
            self._resume.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        if self._resume is not None:
            self._resume.step_ended()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: object) -> None:
        if self._resume is not None and logs is not None:
            self._resume.logged(logs)


class PartialSaving(SaverCallback, Resuming):
    """A callback that makes a Trainer save partial checkpoints instead of full ones::

        Trainer(..., callbacks=[PartialSaving(save_steps=50)])

    An argument that is left out takes the environment variable of its name: ``policy`` takes ``LLMTAILOR_POLICY``.
    ``saver`` is None until training begins.

    Args:
        policy: which parts each save holds; see `make_policy`. Default: ``rounded``.
        save_steps: optimizer steps between two saves. Without it the training arguments' ``save_strategy`` decides.
            ``auto`` saves as often as ``overhead`` allows, by what steps and saves take.
        overhead: with ``auto``, the share of the training time that saving may cost. Default: 0.02.
        on_restart: what ``trainer.train()`` does in a folder that holds partial checkpoints, if no
            checkpoint to resume from is given: ``refuse`` (the default), or ``compose`` the newest state and continue.
        options: the fields of `SavingOptions`.

    Raises UsageError for arguments and variables that make no sense.
    """

    gives_way = False
    """Whether another saver of the same Trainer takes its place"""
    _say = staticmethod(announce)
    """Takes what an attestation has found"""

    def __init__(
        self,
        policy: str | Mapping[str, object] | Policy | None = None,
        save_steps: int | Literal["auto"] | None = None,
        *,
        overhead: float | None = None,
        on_restart: Literal["refuse", "compose"] | None = None,
        **options: Unpack[SavingArguments],
    ) -> None:
        super().__init__(options, policy=policy, save_steps=save_steps, overhead=overhead, on_restart=on_restart)
        self.trainer: Trainer = None
        """None until the Trainer exists"""
        self._is_checked = False
        self._clock = StepTimer()
        self._next_decision = FIRST
        self._batch_size = 0
        """Of the training that began last"""
        self._pending_rng: dict[str, Any] | None = None
        self._is_last = False

    def _bind(self, trainer: Trainer) -> None:
        """Take a Trainer as the one to save. With ``on_restart="compose"``, its ``train`` then resumes."""
        if self.trainer is not trainer and self.on_restart == "compose":
            # a staging folder of one node among several does not hold whole saves
            is_one_node = trainer.args.world_size == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            staging = self.options.staging_dir
            resume_automatically(trainer, [staging] if staging is not None and is_one_node else [])
        self.trainer = trainer

    def _check(self) -> None:
        """Check the Trainer's arguments and its model. Raises what `attach` raises."""
        if self._is_checked:
            return
        check_arguments(self.trainer, [one for one in _savers_of(self.trainer) if one is not self])
        options = self.options
        check_before_training(unwrap(self.trainer.model), self.policy, options.max_staleness, options.experts)
        log_plan(self.trainer.args, self.policy, self.save_steps, self.overhead)
        self._is_checked = True

    def on_init_end(self, *_: object, **__: object) -> None:
        self._bind(find_trainer(self))

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._bind(self.trainer or find_trainer(self))
        self._check()
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        # after it ran out of memory, the Trainer begins again within `train`; nothing else shows that
        is_retry = args.auto_find_batch_size and trainer._train_batch_size < self._batch_size
        self._batch_size, self._clock, self._next_decision = trainer._train_batch_size, StepTimer(), FIRST
        if self.saver is not None:  # from a training that ended with an error
            self.saver.close()
        self._pending_rng, self._is_last = None, False
        objects = parts_of(trainer)
        beside, tokenizer = StateOfTrainer(objects.own_scheduler), getattr(trainer.data_collator, "tokenizer", None)
        tokenizer = trainer.processing_class or tokenizer
        self.saver = make_saver(
            args.output_dir,
            objects,
            beside,
            tokenizer=tokenizer,
            policy=self.policy,
            options=self.options,
            is_tested=True,
        )
        saver, step, before = self.saver, state.global_step, {CALLBACKS: {**state.stateful_callbacks}}

        def start() -> None:
            saver.start(step, before, is_retry=is_retry)
            self._mark(state)

        if self._resume is not None:
            self._resume.give_up()
        self._resume = TrainerResume(
            trainer,
            self.options.attest,
            self.options.on_mismatch,
            saver.record.append,
            say=self._say,
            then=start,
            otherwise=lambda _: saver.close(),
        )
        self._saved_step = step
        try:
            self._agree()
        except TailorError:
            saver.close()
            raise
        self._resume.begin(lambda: attestable_of(parts_of(trainer)))

    def _agree(self) -> None:
        """Refuse arguments that differ between the ranks: launchers may not pass the environment to all nodes."""
        assert self.saver is not None
        mine = {
            "policy": (self.policy.name, repr(self.policy.settings())),
            **{name: getattr(self, name) for name in ("save_steps", "overhead", "on_restart")},
        }
        check_same(self.saver.ranks.all_gather(mine), dict.fromkeys(mine, (SAME_FIX, UsageError)))

    def _mark(self, state: TrainerState) -> None:
        """Record the current attempt in the state, so that the Trainer's own saves state it."""
        assert self.saver is not None
        ledger = self.saver.ledger
        state.stateful_callbacks[MARK] = make_mark(ledger.past(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        super().on_step_end(args, state, control)
        self._mark(state)
        if self.saver is not None:
            self.saver.has_state(state.global_step)  # refuses an optimizer now, not at the first save
        every = self.save_steps or state.save_steps
        by_steps = (self.save_steps or self.overhead) is not None or args.save_strategy != SaveStrategy.EPOCH
        is_last = state.global_step >= state.max_steps
        if args.save_strategy == SaveStrategy.STEPS:
            control.should_save = False
        is_due = state.global_step % every == 0 if self.overhead is None else self._is_due(state.global_step)
        if by_steps and (is_due or is_last):
            self._is_last = is_last
            self._take(control)

    def on_epoch_end(self, args: TrainingArguments, _: object, control: TrainerControl, **__: object) -> None:
        self._save_rng()
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = False
            if self.save_steps is None and self.overhead is None:
                self._take(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: object) -> None:
        super().on_log(args, state, control, logs)
        if logs is None:
            return
        if "train_loss" in logs:  # the final entry, after which the best model may be loaded
            self._pending_rng = self._pending_rng or rng_tree()  # any callback may have stopped at any step
            self._save_rng(is_last=True)
            if self.saver is not None:
                self.saver.finish()
                self._log()
        elif "loss" in logs and not control.should_evaluate:
            self._save_rng()

    def on_evaluate(self, *_: object, **__: object) -> None:
        if self._pending_rng is not None:
            self._pending_rng = rng_tree()  # another data set may follow

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._save_rng()

    on_epoch_begin = on_step_begin

    def on_train_end(self, *_: object, **__: object) -> None:
        if self._resume is not None:
            self._resume.ended()
        self._save_rng(is_last=True)
        if self.saver is not None:
            self.saver.close()
            if (newest := self.saver.newest) is not None and self.saver.ranks.is_first:
                what = "for a full checkpoint of step %d: llmtailor merge --run %s"
                logger.warning(what, newest.step, self.trainer.args.output_dir)

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
        if step < self._next_decision or self._saved_step == step:
            return False
        mine, newest = SaveDecision(True, step + 1), saver.newest  # the first save, or all before it have failed
        if newest is not None or saver.is_busy:
            costs = self._clock.costs(newest.stall_s, newest.publish_s) if newest is not None else None
            mine = SaveDecision.at(step, self._saved_step, costs, overhead, is_busy=saver.is_busy)
        decided = saver.ranks.broadcast(mine)
        self._next_decision = decided.again
        if decided.is_due and decided.save_steps is not None:
            what = "step %d: saving every %d steps for an overhead of %g; a failure costs %.3g s of work on average"
            logger.info(what, step, decided.save_steps, overhead, decided.lost_s)
            saver.record.log({"step": step, "save_steps": decided.save_steps, "lost_s": round(decided.lost_s, 6)})
        return decided.is_due

    def _take(self, control: TrainerControl) -> None:
        self._pending_rng = rng_tree()
        if not (control.should_log or control.should_evaluate):
            self._save_rng()

    def _save_rng(self, *, is_last: bool = False) -> None:
        rng, self._pending_rng = self._pending_rng, None
        if rng is None:
            return
        trainer, step = self.trainer, self.trainer.state.global_step
        if step == self._saved_step or self.saver is None:
            return
        trainer.store_flos()
        if self._save(step, self._write_state, rng, is_last=is_last or self._is_last) is not None:
            self._saved_step = step
            self._clock.saved()
        self._log()

    def _write_state(self, folder: Path) -> None:
        """Write ``trainer_state.json``, with the states of callbacks that have one, and the arguments, as the Trainer
        does."""
        trainer = self.trainer
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                name, states = type(callback).__name__, trainer.state.stateful_callbacks
                if isinstance(states.get(name), list):
                    states[name].append(callback.state())
                else:
                    states[name] = callback.state()
        trainer.state.save_to_json(str(folder / TRAINER_STATE))
        path = folder / TRAINING_ARGS
        try:
            torch.save(trainer.args, path)
        except RuntimeError as error:  # of torch's writer of files, for a full disk too
            what = f"can't write: {(str(error).splitlines() or ['unknown'])[0]}"
            raise StorageError.at(path, what, "free some space, or check the disk") from error


class AttestResume(AttestingCallback, Resuming):
    """A callback that attests what a Trainer has resumed, for a Trainer without llmtailor's saver::

        Trainer(..., callbacks=[AttestResume()])

    It has the arguments of `AttestingCallback`.
    """

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._begin(find_trainer(self))

    def _begin(self, trainer: Trainer, **how: Any) -> None:
        if self._resume is not None:
            self._resume.give_up()
        self._resume = TrainerResume(
            trainer, self.options.attest, self.options.on_mismatch, **{"say": self._say, **how}
        )
        self._resume.begin(lambda: attestable_of(parts_of(trainer)))


def _savers_of(trainer: Trainer) -> list[PartialSaving | StockSaving]:
    callbacks = trainer.callback_handler.callbacks
    return [
        one
        for one in callbacks
        if isinstance(one, StockSaving) or (isinstance(one, PartialSaving) and not one.gives_way)
    ]
