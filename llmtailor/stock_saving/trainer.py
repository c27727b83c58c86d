"""The Trainer's own checkpoints, saved in the background: ``attach(trainer, layout="stock")``.

The Trainer's ``_save_checkpoint`` runs as it is, but in a hidden folder, and what it writes with ``torch.save`` and
``save_file`` is written while training continues. ``checkpoint-N`` appears when it is durable; only then are older ones
deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import transformers.trainer
from transformers import Trainer, TrainerCallback

from llmtailor.background.options import WHERE, stock_options
from llmtailor.errors import Problem, UsageError
from llmtailor.frameworks.files import TRAINER_STATE
from llmtailor.patching import patch_method, replaced
from llmtailor.stock_saving.saver import StockSaver, finish_all

logger = logging.getLogger("llmtailor.saving")


def check_stock(trainer: Trainer) -> None:
    """Raise UsageError, with all reasons, for a Trainer whose own checkpoints can't be saved in the background."""
    args, hub = trainer.args, "its files are pushed before they are complete"
    is_fsdp2 = getattr(trainer.accelerator, "is_fsdp2", False)
    signs = [
        (trainer.is_fsdp_enabled and not is_fsdp2, "FSDP version 1", "use FSDP version 2 (fsdp_version)"),
        (args.push_to_hub and args.hub_strategy.value != "end", f"hub_strategy: {hub}", 'set hub_strategy="end"'),
        (getattr(args, "enable_jit_checkpoint", False), "enable_jit_checkpoint", "turn it off"),
    ]
    if problems := [Problem(WHERE, f'layout="stock" excludes {what}', fix) for is_so, what, fix in signs if is_so]:
        raise UsageError(problems)


class StockSaving(TrainerCallback):  # type: ignore[misc]
    """Saves the checkpoints of a Trainer in the background; `callbacks.attach` adds it. ``saver`` is None until
    training begins."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Any]) -> None:
        self.trainer, self._options = trainer, dict(options)
        stock_options(options)
        check_stock(trainer)
        self.saver: StockSaver | None = None
        self._save_by_saver()

    def on_train_begin(self, *_: object, **__: object) -> None:
        trainer = self.trainer
        if self.saver is not None:
            self.saver.close()  # of an earlier training
        if trainer.is_deepspeed_enabled:
            from llmtailor.stock_saving.checkpoint_engine import saver_of

            self.saver = saver_of(trainer.model_wrapped, **self._options)
        else:
            self.saver = StockSaver(trainer.model, lambda: [trainer.optimizer], stock_options(self._options))

    def on_log(self, *_: object, logs: Mapping[str, float] | None = None, **__: object) -> None:
        if logs and "train_loss" in logs:  # the final entry, after which the best model may be loaded
            finish_all()

    def on_train_end(self, *_: object, **__: object) -> None:
        if self.saver is not None:
            self.saver.close()

    def _save_by_saver(self) -> None:
        """Put a save around the Trainer's ``_save_checkpoint``."""

        @patch_method(self.trainer, "_save_checkpoint")
        def saving(save: Callable[..., None], model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
            trainer, saver = self.trainer, self.saver
            assert saver is not None, "training has begun"
            run, state = Path(trainer._get_output_dir(trial=trial)), trainer.state
            folder = run / f"checkpoint-{state.global_step}"
            limit = partial(self._rotate, run)
            with saver.saving(folder, state.global_step, lambda: limit()) as is_saving:
                if not is_saving:
                    return
                assert saver.open_at is not None
                hidden = f"{saver.open_at.parent}"
                with replaced(trainer, "_get_output_dir", lambda *_, **__: hidden), saver.intercept_writes():
                    save(model, trial, *args, **kwargs)
                if state.best_model_checkpoint == str(saver.open_at):
                    state.best_model_checkpoint = str(folder)
                    if trainer.args.should_save:
                        state.save_to_json(str(saver.open_at / TRAINER_STATE))
                limit = partial(self._rotate, run, state.best_model_checkpoint)

    def _rotate(self, run: Path, best: str | None = None) -> None:
        """Delete what ``save_total_limit`` does not keep."""
        trainer = self.trainer
        if hasattr(trainer, "_rotate_checkpoints"):  # before transformers 5
            trainer._rotate_checkpoints(use_mtime=True, output_dir=str(run))
            return
        limit = trainer.args.save_total_limit
        transformers.trainer.rotate_checkpoints(
            output_dir=str(run), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True
        )
