"""DeepSpeed's checkpoint engine that saves in the background: ``engine.save_checkpoint`` writes its own files, and
training continues (0.19.8).

DeepSpeed takes it for a decoupled engine, which commits at the next optimizer step, but there is nothing to commit
then: the file ``latest`` is written when the checkpoint is durable on all ranks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from llmtailor.background.options import stock_options
from llmtailor.errors import Problem, UsageError
from llmtailor.frameworks.files import LATEST
from llmtailor.live.deepspeed import writes_unseen
from llmtailor.patching import patch_method, replaced
from llmtailor.stock_saving.saver import StockSaver, finish_before
from llmtailor.storage.local import fsync_folder, replace_durably

logger = logging.getLogger("llmtailor.saving")
_WHERE = "DeepSpeed"
KEY = "llmtailor"
"""Of the DeepSpeed config, which leaves it alone"""


class LazyCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Hands the files of ``save_checkpoint`` to a saver; other files, such as ``save_16bit_model``'s, are written at
    once."""

    def __init__(self, saver: StockSaver, detach: Callable[[], None]) -> None:
        super().__init__()
        self.name = "llmtailor"
        self.saver = saver
        self.detach = detach
        """Gives the engine back what it had"""

    def create(self, info: object) -> None:
        """Nothing: the method that replaces the engine's ``save_checkpoint`` begins the save, see `_save_by`."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.saver.place(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        if not self.saver.add(state_dict, path):
            torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        self.saver.finish()
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: object) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return True

    def cleanup(self) -> None:
        """Finish the last save; ``engine.destroy`` calls it."""
        self.saver.close()


def attach_engine(engine: Any, **options: Any) -> StockSaver:
    """Make ``engine.save_checkpoint`` return at once, and its stock checkpoints be written while training continues.

    Call it on every rank, after ``deepspeed.initialize``. ``options`` are those of `options.STOCK`; one that is left
    out is taken from ``llmtailor`` in the DeepSpeed config. ``finish`` of the saver that it returns waits for the last
    save.

    Raises UsageError for options out of range, and for what can't be saved in this way.
    """
    configured = dict(engine.config.get(KEY) or {})
    if (layout := configured.pop("layout", "stock")) != "stock":
        raise UsageError.at(KEY, f"layout in the DeepSpeed config is {layout!r:.40}", 'give "stock"')
    chosen = stock_options({**configured, **options})
    _refuse(engine)

    def optimizers() -> list[object]:
        zero = engine.optimizer
        found = (zero, getattr(zero, "optimizer", None), getattr(zero, "backup_optimizer", None))
        return [one for one in found if isinstance(one, torch.optim.Optimizer)] or [zero]

    def masters() -> list[torch.Tensor]:
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")  # ZeRO-3, ZeRO-1 and 2
        return [one for name in names for one in getattr(engine.optimizer, name, ()) if one.numel()]

    saver = StockSaver(engine.module, optimizers, chosen, lambda: writes_unseen(engine, optimizers()), masters)
    stock = engine.checkpoint_engine

    def detach() -> None:
        del engine.save_checkpoint, engine.load_checkpoint  # the methods of its class remain
        engine.checkpoint_engine = stock

    _save_by(saver, engine, stock)
    finish_before(engine, "load_checkpoint")
    engine.checkpoint_engine = LazyCheckpointEngine(saver, detach)
    return saver


def saver_of(engine: Any, **options: Any) -> StockSaver:
    """Return the open saver of an engine; attach one if there is none."""
    lazy = engine.checkpoint_engine
    if isinstance(lazy, LazyCheckpointEngine):
        if not lazy.saver.is_closed:
            return lazy.saver
        lazy.detach()
    return attach_engine(engine, **options)


def _refuse(engine: Any) -> None:
    zero = engine.config.get("zero_optimization") or {}
    offload = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    checkpoint = engine.config.get("checkpoint") or {}
    signs = [
        (not hasattr(CheckpointEngine, "is_decoupled"), "it has no decoupled checkpoint engines", "update DeepSpeed"),
        (any(one.get("device") == "nvme" for one in offload), "states on NVMe", "offload to the CPU"),
        (engine.use_node_local_storage(), "use_node_local_storage", "save to a folder that all nodes share"),
        (bool(checkpoint.get("writer")), "checkpoint.writer", "omit it: it names another way of writing"),
        (isinstance(engine.checkpoint_engine, LazyCheckpointEngine), "the engine has a saver already", "attach one"),
    ]
    problems = [Problem(_WHERE, f"saving in the background: {what}", fix) for is_so, what, fix in signs if is_so]
    if problems:
        raise UsageError(problems)


def _save_by(saver: StockSaver, engine: Any, stock: Any) -> None:
    """Put a save around the engine's ``save_checkpoint``; ``stock`` is its own checkpoint engine."""
    signature = inspect.signature(engine.save_checkpoint)

    @patch_method(engine, "save_checkpoint")
    def saving(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["save_dir"]:
            return save(*args, **kwargs)  # which refuses it
        folder, tag = Path(given["save_dir"]).absolute(), given["tag"]
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)

        def write_latest() -> None:
            if given["save_latest"]:
                replace_durably(folder / LATEST, tag.encode())
                fsync_folder(folder)

        if saver.open_at is not None:  # a checkpoint of the Trainer's or accelerate's, which holds this one
            result = save(*args, **kwargs)
            if saver.ranks.is_first:
                write_latest()
            return result
        tags = {*saver.ranks.all_gather(str(folder / tag))}
        if len(tags) > 1:  # which DeepSpeed's checkpoint.tag_validation may permit
            logger.warning("%s: the ranks give different tags, so training stands still for this save", folder)
            with replaced(engine, "checkpoint_engine", stock):
                return save(*args, **kwargs)
        with saver.saving(folder / tag, engine.global_steps, write_latest) as is_saving:
            return save(*args, **kwargs) if is_saving else False
