"""Attests what a Trainer of transformers has resumed, when it makes its first step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from llmtailor.attestation.check import (
    announce,
    attest_or_warn,
    judged,
)
from llmtailor.attestation.compare import (
    OFF,
    LossMonitor,
    Mismatch,
    Subject,
    float_of,
    rates_off_schedule,
)
from llmtailor.attestation.read import compare_random
from llmtailor.attestation.report import Attestation, with_random_states
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.containers.json import read_json
from llmtailor.errors import SourceError, TailorError
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.files import TRAINER_STATE
from llmtailor.live.attesting import Say, Write, attest_opened, logger, open_on_first, rates_of, write_nothing
from llmtailor.live.objects import Attestable, kept_buffers, parts_of
from llmtailor.live.training import rng_tree
from llmtailor.patching import next_call, patch_method
from llmtailor.ranks.team import Ranks
from llmtailor.runs.folder import RunFolder

if TYPE_CHECKING:
    from transformers import Trainer


def callers() -> Iterator[dict[str, Any]]:
    """Yield the local variables of the functions that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def resumed_from(trainer: Trainer) -> Path | None:
    """Return the checkpoint that a Trainer's running ``train`` resumes from; None if it begins.

    Nothing keeps it but a local variable of the Trainer's loop, which calls the callbacks.
    """
    for found in callers():
        if found.get("self") is trainer and "resume_from_checkpoint" in found:
            given = found["resume_from_checkpoint"]
            if not isinstance(given, bool):
                return Path(given) if given is not None else None
    return None


class TrainerResume:
    """Attests what a Trainer has resumed, before its first optimizer step: callbacks may change it until then. The
    random states are those that the Trainer has restored, and the first losses are compared later.

    1) `begin`. 2) `before_step`, `step_ended` and `logged`, from the callbacks of these names. 3) `ended`, or `give_up`
    if the training begins again.

    Args:
        how: what of it is compared, ``on_mismatch`` what happens if it differs: options of a saver.
        write: adds a line to the record of the run; called on every rank.
        say: takes each attestation, in place of `announce`.
        then: is called once the training was attested, or if there is nothing to attest.
        otherwise: gets the error that ends the training.
        is_strict: raise what prevents an attestation; else it is a warning.
    """

    def __init__(
        self,
        trainer: Trainer,
        how: str,
        on_mismatch: str,
        write: Write = write_nothing,
        *,
        say: Say = announce,
        then: Callable[[], object] = lambda: None,
        otherwise: Callable[[Any], object] = lambda error: None,
        is_strict: bool = False,
    ) -> None:
        self._trainer, self._how, self._on_mismatch = trainer, how, on_mismatch
        self._write, self._say, self._is_strict = write, say, is_strict
        self._then, self._otherwise = then, otherwise
        self._ranks = Ranks.here()
        self._checkpoint: Path | None = None
        self._losses = LossMonitor()
        self._is_due = self._waits_for_rng = self._has_stepped = False
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._random: Mapping[str, Any] | None = None
        """The random states after the Trainer has restored them: at the start of an epoch it then draws from them"""

    def begin(self, find_training: Callable[[], Attestable]) -> None:
        """Take the checkpoint; call it in ``on_train_begin``, on every rank. ``find_training`` returns the live
        training."""
        trainer, self._find_training = self._trainer, find_training
        self._checkpoint = resumed_from(trainer)
        if self._checkpoint is None or self._how == OFF:
            self._checkpoint = None
            self._call(self._then)
            return
        self._is_due, objects = True, parts_of(trainer)
        self._buffers = kept_buffers(objects)
        self._waits_for_rng = not trainer.args.ignore_data_skip
        if self._waits_for_rng:
            self._watch_rng(trainer)
        if objects.engine is not None:  # which makes the step within the backward pass
            patch_method(objects.engine, "step")(self._stepping)

    def before_step(self) -> None:
        """Attest the training within the call of the optimizer's step that follows, after all other callbacks, and
        also if the gradient scaler leaves the step out; call it in ``on_pre_optimizer_step``, on every rank.

        That call raises NotTheSame if it is not the checkpoint's and that is to stop the training.
        """
        if self._is_due and not self._trainer.is_deepspeed_enabled:  # with DeepSpeed the step has been made
            next_call(self._trainer.optimizer, "step")(self._stepping)

    def _stepping(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_due:
            self._is_due = False
            self._call(self._attest)
        return step(*args, **kwargs)

    def give_up(self) -> None:
        """Attest nothing: the training begins again."""
        self._is_due = False

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:
            self._otherwise(error)
            raise

    def _attest(self) -> None:
        checkpoint = self._checkpoint
        assert checkpoint is not None
        attest_or_warn(self._attest_all, checkpoint, self._ranks.is_first, is_strict=self._is_strict)
        self._buffers, self._random = {}, None
        self._then()

    def _attest_all(self) -> None:
        checkpoint, trainer = self._checkpoint, self._trainer
        assert checkpoint is not None
        training, objects = self._find_training(), replace(parts_of(trainer), buffers=self._buffers)
        try:
            opened = open_on_first(training, checkpoint, self._ranks)
        except SourceError as error:
            if (judgement := judged(error, display_name(checkpoint), self._how)) is None:
                raise
            self._report(judgement)
            return
        found = self._with_random(attest_opened(opened, self._ranks, self._how, objects), opened.index)
        if self._ranks.is_first:
            state = trainer.state
            log = abandoned_log(Path(trainer.args.output_dir), state.global_step, state.log_history)
            self._losses = LossMonitor(log, not any(one.subject is Subject.SCHEDULE for one in found.mismatches))
        self._report(found)

    def _report(self, found: Attestation) -> None:
        self._write({"step": self._trainer.state.global_step, "attested": found.to_json()})
        self._say(found, self._ranks, self._on_mismatch)

    def _watch_rng(self, trainer: Trainer) -> None:
        """Keep the random states that the Trainer restores. The method is replaced on this one Trainer, once."""

        @patch_method(trainer, "_load_rng_state")
        def loading(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            if self._waits_for_rng:
                self._waits_for_rng = False
                trainer._load_rng_state = load
                self._random = rng_tree()
            return result

    def _with_random(self, found: Attestation, index: CheckpointIndex) -> Attestation:
        """Add the differences of the random states that were restored."""
        if self._trainer.args.ignore_data_skip:
            return replace(found, notes=(*found.notes, "random states: ignore_data_skip does not restore them"))
        random, ranks = self._random, self._ranks

        def compare() -> tuple[list[Mismatch], str]:
            if random is None:
                return [], "random states: they were not restored"
            return compare_random(index, random, ranks.rank, ranks.world_size)

        return with_random_states(found, ranks.run_on_all(compare))

    def ended(self) -> None:
        """Call it at the end: there may have been no step to make."""
        if self._is_due:
            self._is_due = False
            self._call(self._then)

    def step_ended(self) -> None:
        """Call it after each step."""
        if self._checkpoint is None or self._has_stepped:
            return
        self._has_stepped = True
        if self._is_due and self._ranks.is_first:
            what = "the Trainer does not tell callbacks before it calls its optimizer's step"
            logger.warning("resumed from %s: not attested: %s", self._checkpoint, what)
        self.ended()
        rates = [float_of(group.get("lr")) for group in self._trainer.optimizer.param_groups]
        said = rates_off_schedule(rates, rates_of(parts_of(self._trainer).scheduler))
        if said and self._ranks.is_first:
            step = self._trainer.state.global_step
            logger.warning("resumed from %s: after step %d %s", display_name(self._checkpoint), step, said)
            self._write({"step": step, "rates": said})

    def logged(self, logs: Mapping[str, Any]) -> None:
        """Call it with each entry of the log."""
        step = self._trainer.state.global_step
        if self._ranks.is_first and (said := self._losses.see(step, logs)):
            logger.warning("%s", said)
            self._write({"step": step, "losses": said})


def abandoned_log(run: Path, step: int, history: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the log entries after a step that a later checkpoint in the run's folder has, by step.

    ``history`` is the log of the training that was resumed; a checkpoint that has another one up to that step is of
    another attempt. Whatever is damaged is left out.
    """
    before = [dict(one) for one in history if one.get("step", 0) <= step and "loss" in one]
    try:
        folder = RunFolder(run)
        paths = {at: path for at, path in [*folder.complete().items(), *folder.full().items()] if at > step}
    except (TailorError, OSError):
        return {}
    for at in sorted(paths, reverse=True):
        try:
            content = read_json(paths[at] / TRAINER_STATE, str(paths[at]))
            log = [one for one in content["log_history"] if "loss" in one]
        except (TailorError, OSError, KeyError, TypeError):
            continue
        if [one for one in log if one.get("step", 0) <= step] == before:
            return {int(one["step"]): one for one in log if one.get("step", 0) > step}
    return {}
