"""A callback of Lightning::

trainer = Trainer(callbacks=[PartialSaving(save_steps=50, output_dir="runs/x")], enable_checkpointing=False)
trainer.fit(model, ckpt_path=newest_checkpoint("runs/x"))

It works with ``lightning.pytorch``, on one device, with DDP and with DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

from llmtailor.attestation.check import attest_or_warn
from llmtailor.attestation.compare import OFF
from llmtailor.attestation.report import Attestation
from llmtailor.background.options import SavingArguments, SavingOptions
from llmtailor.containers.json import read_json
from llmtailor.errors import TailorError, UnsupportedCheckpoint, UsageError
from llmtailor.frameworks.files import CKPT, TRAINER_STATE
from llmtailor.frameworks.trainer_state import CALLBACKS, MARK, make_mark
from llmtailor.integrations.attested import forget, remember, task
from llmtailor.live.attesting import attest_loop, attest_objects
from llmtailor.live.objects import kept_buffers
from llmtailor.live.training import TrainingObjects
from llmtailor.patching import next_call
from llmtailor.policies import Policy
from llmtailor.ranks.team import Ranks
from llmtailor.runs.composing import compose_newest
from llmtailor.saving.api import AttestingCallback, SaverCallback, make_saver
from llmtailor.saving.arguments import resume_options
from llmtailor.saving.framework_state import StateOfLightning
from llmtailor.storage.local import as_path

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("llmtailor.saving")


class LightningPartialSaving(SaverCallback, Callback):  # type: ignore[misc]
    """Saves partial checkpoints of a training with Lightning, with what Lightning itself saves: the progress of its
    loops, schedulers, states of callbacks and of the data module, hyperparameters.

    An argument that is left out takes the environment variable of its name: ``policy`` takes ``LLMTAILOR_POLICY``.
    ``saver`` is None until training begins. A save that fails logs a warning; training continues.

    Args:
        policy: which parts each save holds; see `make_policy`. Default: ``rounded``.
        save_steps: optimizer steps between two saves. Default: 500.
        output_dir: the run's folder. Default: the Trainer's ``default_root_dir``.
        options: the fields of `SavingOptions`.

    Raises UsageError for arguments and variables that make no sense, and, when training begins, UnsupportedCheckpoint
    for a strategy or an optimizer whose states can't be saved in parts.
    """

    def __init__(
        self,
        policy: str | Mapping[str, object] | Policy | None = None,
        save_steps: int | None = None,
        *,
        output_dir: str | Path | None = None,
        **options: Unpack[SavingArguments],
    ) -> None:
        super().__init__(options, policy=policy, save_steps=save_steps)
        if self.overhead is not None or self.on_restart == "compose":
            what = "save_steps=auto and on_restart=compose work only with the transformers Trainer"
            fix = "set save_steps to a number; to resume after a restart, pass newest_checkpoint() as ckpt_path"
            raise UsageError.at("PartialSaving", what, fix)
        self.save_steps = self.save_steps or 500
        self.output_dir = output_dir
        self._step = -1
        self._mark: dict[str, Any] = {}
        """The attempt of the last training, after its saver was closed"""
        self._resume: _Resume | None = None
        self._loaded: Mapping[str, Any] = {}
        """The states of callbacks in the checkpoint that was loaded last"""

    @property
    def state_key(self) -> str:
        return MARK

    def state_dict(self) -> dict[str, Any]:
        """Return the attempt, so that Lightning's own checkpoints state it."""
        if self.saver is None:  # ModelCheckpoint may still save, at the end or after an exception
            return self._mark
        ledger = self.saver.ledger
        return make_mark(ledger.past(self._step))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("callbacks") or {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer)
        step = trainer.global_step
        objects = _objects(trainer, pl_module)
        beside = StateOfLightning(lambda: trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        output_dir = self.output_dir or trainer.default_root_dir
        self.saver = make_saver(output_dir, objects, beside, policy=self.policy, options=self.options)
        self._saved_step = self._step = step
        self._resume = _Resume(trainer, objects, self.options) if _is_attested(trainer, self.options) else None
        if self._resume is None:
            self._start(trainer, step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        if (resume := self._resume) is None:
            return
        self._resume = None

        @_after_callbacks(pl_module)
        def attesting() -> None:
            if self.saver is None:
                return
            try:
                resume.attest(pl_module, step=self._step, write=self.saver.record.append)
            except TailorError:
                self._close(trainer)
                raise
            self._start(trainer, self._step)

    def _start(self, trainer: Trainer, step: int) -> None:
        assert self.saver is not None
        self.saver.start(step, self._resumed_from(trainer.ckpt_path, step))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._step = step = trainer.global_step
        if self.saver is None:
            return
        self.saver.has_state()  # refuses an optimizer now, not at the first save
        assert self.save_steps, "as in __init__"
        if step == self._saved_step or step % self.save_steps:
            return
        self._saved_step = step
        self._save(step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        if self.saver is not None:
            self._step = trainer.global_step
            self._mark = self.state_dict()
            self.saver.close()
            self.saver = None

    def _resumed_from(self, ckpt_path: object, step: int) -> Mapping[str, Any] | None:
        """Return the record of the attempt that a training continues; None if it begins."""
        if ckpt_path:
            path = Path(str(ckpt_path))
            folder = path.parent if path.name == CKPT else path
            assert self.saver is not None
            state = folder / TRAINER_STATE
            content = self.saver.ranks.run_on_first(lambda: read_json(state, f"{state}") if state.is_file() else {})
            return content or {CALLBACKS: self._loaded}
        if not step:  # a training from scratch, maybe by another Trainer with the same callback
            return None
        return {CALLBACKS: {MARK: self._mark}} if self._mark else None  # of an earlier `fit` of the same Trainer


class LightningAttestResume(AttestingCallback, Callback):  # type: ignore[misc]
    """Attests what a Trainer has resumed with ``fit(ckpt_path=...)``, without saving anything::

        Trainer(callbacks=[AttestResume()])

    It has the arguments of `AttestingCallback`.
    """

    _resume: _Resume | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_attested(trainer, self.options):
            objects = partial(_objects, trainer, pl_module, "AttestResume")
            attest_or_warn(lambda: self._begin(trainer, objects()), _loaded(trainer), Ranks.here().is_first)

    def _begin(self, trainer: Trainer, objects: TrainingObjects) -> None:
        self._resume = _Resume(trainer, objects, self.options)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        if (resume := self._resume) is not None:
            self._resume = None
            _after_callbacks(pl_module)(lambda: resume.attest(pl_module, say=self._say))


def _after_callbacks(module: LightningModule) -> Callable[[Callable[[], None]], None]:
    """Call the decorated function after all callbacks and the module were told that the optimizer is about to step: the
    module is told last, and the step itself may be left out."""

    def replace(function: Callable[[], None]) -> None:
        @next_call(module, "on_before_optimizer_step")
        def telling(tell: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            tell(*args, **kwargs)
            function()

    return replace


class _Resume:
    """What Lightning has restored: after ``on_fit_start`` and before ``on_train_start`` optimizers and loops, no random
    states. It is attested before the first optimizer step: callbacks may change it until then."""

    def __init__(self, trainer: Trainer, objects: TrainingObjects, options: SavingOptions) -> None:
        self._trainer, self._options, self._buffers = trainer, options, kept_buffers(objects)

    def attest(self, module: LightningModule, **how: Any) -> None:
        """Do what `attest_loop` does."""
        loaded = _loaded(self._trainer)
        attest_loop(lambda: self.found(module), loaded, self._options.on_mismatch, **how)

    def found(self, module: LightningModule) -> Attestation:
        objects = replace(_objects(self._trainer, module, "AttestResume"), buffers=self._buffers)
        return attest_objects(objects, _loaded(self._trainer), self._options.attest)


class LaunchedLightningAttest(LightningAttestResume):
    """Attests with the options of the environment in every Trainer of a program that ``llmtailor run --attest`` has
    started, and ends one of ``llmtailor attest``, before the first optimizer step. It gives way to those of the
    program.
    """

    def __init__(self) -> None:
        self.options = resume_options(os.environ)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        forget()
        own = [
            one
            for one in trainer.callbacks
            if isinstance(one, (LightningPartialSaving, LightningAttestResume)) and one is not self
        ]
        if task().checkpoint is not None:
            # in place, because Lightning iterates over this list; savers come later in it
            trainer.callbacks[:] = [one for one in trainer.callbacks if not isinstance(one, LightningPartialSaving)]
        if not trainer.ckpt_path or (own and task().checkpoint is None):
            return
        loaded = _loaded(trainer)
        if loaded.name == CKPT and Path(task().checkpoint or CKPT).name != CKPT:
            loaded = loaded.parent
        objects = partial(_objects, trainer, pl_module, "AttestResume")
        buffers = {}
        with suppress(UnsupportedCheckpoint):  # it is raised once more when the training is attested
            buffers = kept_buffers(objects())
        remember(loaded, lambda: replace(objects(), buffers=buffers))


def _loaded(trainer: Trainer) -> Path:
    return as_path(str(trainer.ckpt_path))


def _is_attested(trainer: Trainer, options: SavingOptions) -> bool:
    """Return whether ``fit`` has loaded a checkpoint, and the training is to be compared with it."""
    return bool(trainer.ckpt_path) and options.attest != OFF


def newest_checkpoint(output_dir: str | Path, world_size: int | None = None) -> str | None:
    """Compose the newest state of a run, and return the ``ckpt_path`` to resume from; call it before ``fit``.

    Each process that runs the script may call it: the first one of the first node composes, the others wait. A complete
    checkpoint that has the newest state is returned as it is. Returns None if no save of the run is complete, so that
    training starts from scratch.

    Args:
        output_dir: the run's folder.
        world_size: with DeepSpeed, the number of ranks that will resume. None keeps that of the newest save.

    Raises:
        TailorError: the newest state can't be composed.
    """
    is_first = _is_first()
    newest = compose_newest(Path(output_dir), world_size, waits=not is_first)
    if newest is None:
        return None
    if is_first:
        how = "composed" if newest.is_new else "already complete"
        logger.warning("resuming at step %d from %s (%s)", newest.step, newest.path, how)
    alone = newest.path / CKPT
    return str(alone if alone.is_file() else newest.path)


def _is_first() -> bool:
    """Return whether this process is the first of the training, before Lightning knows its rank.

    A launcher that starts every process sets their ranks. Lightning's own launcher runs the script once per node, with
    ``NODE_RANK`` or ``GROUP_RANK`` set, and starts the other processes of the node with a ``LOCAL_RANK``.
    """
    by_launcher = "RANK" in os.environ or (
        "LOCAL_RANK" not in os.environ and not os.environ.keys().isdisjoint(("SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    )
    return not rank_zero_only.rank and (by_launcher or not LightningEnvironment().node_rank())


def _objects(trainer: Trainer, module: LightningModule, where: str = "PartialSaving") -> TrainingObjects:
    """Return what Lightning holds. Raises UnsupportedCheckpoint for a training whose states can't be read."""
    strategy, optimizers = trainer.strategy, trainer.optimizers
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):  # DeepSpeed's is a DDPStrategy
        what = f"the states of a {type(strategy).__name__} can't be read"
        raise UnsupportedCheckpoint.at(where, what, "train on one device, with ddp, or with deepspeed")
    if len(optimizers) != 1:
        what = f"the training has {len(optimizers)} optimizers"
        raise UnsupportedCheckpoint.at(where, what, "configure one for all params")
    schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
    scheduler = schedulers[0] if len(schedulers) == 1 else None
    counters = {"global_step": trainer.global_step}
    if isinstance(strategy, DeepSpeedStrategy):
        return TrainingObjects(engine=strategy.deepspeed_engine, scheduler=scheduler, counters=counters)
    return TrainingObjects(model=module, optimizer=optimizers[0], scheduler=scheduler, counters=counters)
