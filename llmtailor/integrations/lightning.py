"""A callback of Lightning::

trainer = Trainer(callbacks=[PartialSaving(save_steps=50, output_dir="runs/x")], enable_checkpointing=False)
trainer.fit(model, ckpt_path=newest_checkpoint("runs/x"))

It works with ``lightning.pytorch``, on one device, with DDP and with DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

from llmtailor.attestation.check import NotTheSame
from llmtailor.attestation.compare import OFF
from llmtailor.checkpoint.index import LIGHTNING
from llmtailor.checkpoint.lineage import Past
from llmtailor.errors import Problem, TailorError, UnsupportedCheckpoint, UsageError
from llmtailor.integrations.attested import Task, check_resumed, end, end_with_error, forget, leave
from llmtailor.loaders.files import CKPT
from llmtailor.loaders.loader import LOADERS
from llmtailor.loaders.trainer_state import CALLBACKS, MARK, make_mark
from llmtailor.policies import Policy
from llmtailor.runs.scan import compose_newest
from llmtailor.saving.api import SaverCallback, attestable_of, make_saver
from llmtailor.saving.attesting import Attestable, Write, attest_loop, attest_training
from llmtailor.saving.client_state import LightningClient
from llmtailor.saving.options import SavingArguments, SavingOptions, from_environment
from llmtailor.saving.restart import trainer_state_of
from llmtailor.saving.training import Held, Ranks
from llmtailor.storage.local import as_path

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("llmtailor.saving")
_WHERE = "PartialSaving"


class PartialSaving(SaverCallback, Callback):  # type: ignore[misc]
    """Saves partial checkpoints of a training with Lightning, with what Lightning itself saves: the progress of its
    loops, schedulers, states of callbacks and of the data module, hyperparameters.

    An argument that is left out takes the environment variable of its name: ``policy`` takes ``LLMTAILOR_POLICY``.
    ``saver`` is None until training begins. A save that fails logs a warning; training continues.

    Args:
        policy: which parts each save holds; see `make_policy`. Default: ``moments_in_turn``.
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
            raise UsageError.at(_WHERE, what, fix)
        self.save_steps = self.save_steps or 500
        self.output_dir = output_dir
        self._step = -1
        self._mark: dict[str, Any] = {}
        """The attempt of the last training, after its saver was closed"""
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
        return make_mark(Past(self._step, ledger.lineage, ledger.history))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("callbacks") or {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer)
        step = trainer.global_step
        _check(trainer)
        held = _parts_of(trainer, pl_module)
        self.saver = make_saver(
            self.output_dir or trainer.default_root_dir,
            engine=held.engine,
            model=held.model,
            optimizer=held.optimizer,
            beside=LightningClient(lambda: trainer._checkpoint_connector.dump_checkpoint(weights_only=False)),
            scaler=None,  # Lightning saves it
            tokenizer=None,
            policy=self.policy,
            options=self.options,
        )
        self._saved_step = self._step = step
        record, training = self.saver.record, self.saver.live
        try:
            _attest(
                trainer, lambda: training, self.options, lambda found: record.append({"step": step, "attested": found})
            )
        except TailorError:
            self._close(trainer)
            raise
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
            return self.saver.ranks.on_first(lambda: trainer_state_of(folder)) or {CALLBACKS: self._loaded}
        if not step:  # a training from scratch, maybe by another Trainer with the same callback
            return None
        return {CALLBACKS: {MARK: self._mark}} if self._mark else None  # of an earlier `fit` of the same Trainer


class AttestResume(Callback):  # type: ignore[misc]
    """Attests what a Trainer has resumed with ``fit(ckpt_path=...)``, without saving anything::

        Trainer(callbacks=[AttestResume()])

    Args:
        attest: ``sample`` compares some elements of every state with the checkpoint, ``full`` every byte.
        on_mismatch: ``warn``, or ``stop`` to end the training on all ranks.

    Raises UsageError for other values, and, when training begins, NotTheSame.
    """

    def __init__(
        self, attest: Literal["sample", "full"] = "sample", on_mismatch: Literal["warn", "stop"] = "warn"
    ) -> None:
        self.options = SavingOptions(attest=attest, on_mismatch=on_mismatch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path:
            _attest(trainer, lambda: _attestable(trainer, pl_module), self.options)


class LaunchedAttest(AttestResume):
    """Attests with the options of the environment in every Trainer of a program that ``llmtailor run --attest`` has
    started, and ends one of ``llmtailor attest``, before other callbacks begin. It gives way to those of the program.
    """

    def __init__(self) -> None:
        given = from_environment(os.environ)
        super().__init__(given.get("attest", "sample"), given.get("on_mismatch", "warn"))
        self.task = Task.here()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        forget()
        ranks = Ranks.here()
        if self.task.checkpoint is not None:
            self._end(trainer, pl_module, self.task, ranks)
        own = [one for one in trainer.callbacks if isinstance(one, (PartialSaving, AttestResume)) and one is not self]
        if not own:
            try:
                super().on_train_start(trainer, pl_module)
            except NotTheSame as error:
                leave(error, ranks)

    def _end(self, trainer: Trainer, module: LightningModule, task: Task, ranks: Ranks) -> NoReturn:
        loaded = as_path(str(trainer.ckpt_path)) if trainer.ckpt_path else None
        is_alone = loaded is not None and loaded.name == CKPT and Path(str(task.checkpoint)).name != CKPT
        check_resumed(task, ranks, loaded.parent if is_alone and loaded is not None else loaded)
        assert loaded is not None
        try:
            scheduler, counters = _beside(trainer)
            found = attest_training(
                _attestable(trainer, module), loaded, self.options.attest, scheduler, None, counters
            )
        except Exception as error:
            end_with_error(task, ranks, error)
        end(task, ranks, found)


def _beside(trainer: Trainer) -> tuple[Any, dict[str, Any]]:
    """Return the scheduler, if there is one, and the counters."""
    schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
    return schedulers[0] if len(schedulers) == 1 else None, {"global_step": trainer.global_step}


def _parts_of(trainer: Trainer, module: LightningModule) -> Held:
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):
        return Held(strategy.deepspeed_engine)
    return Held(None, module, trainer.optimizers[0])


def _attestable(trainer: Trainer, module: LightningModule) -> Attestable:
    _check(trainer, "AttestResume")
    return attestable_of(_parts_of(trainer, module), LOADERS[LIGHTNING])


def _attest(
    trainer: Trainer,
    find_training: Callable[[], Attestable],
    options: SavingOptions,
    write: Write = lambda found: None,
) -> None:
    """Compare the training with the checkpoint that ``fit`` has loaded, if any. Lightning restores optimizers and loops
    after ``on_fit_start`` and before ``on_train_start``; it saves no random states."""
    if not trainer.ckpt_path or options.attest == OFF:
        return
    scheduler, counters = _beside(trainer)
    attest_loop(find_training, as_path(str(trainer.ckpt_path)), options, scheduler, write, counters)


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


def _check(trainer: Trainer, where: str = _WHERE) -> None:
    """Raise UnsupportedCheckpoint, with every reason, for a training whose states can't be read."""
    problems = []
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):  # DeepSpeed's is a DDPStrategy
        what = f"the states of a {type(trainer.strategy).__name__} can't be read"
        problems.append(Problem(where, what, "train on one device, with ddp, or with deepspeed"))
    elif len(trainer.optimizers) != 1:
        what = f"the training has {len(trainer.optimizers)} optimizers"
        problems.append(Problem(where, what, "configure one for all params"))
    if problems:
        raise UnsupportedCheckpoint(problems)
