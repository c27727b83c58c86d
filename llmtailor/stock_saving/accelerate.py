"""``accelerator.save_state`` in the background: accelerate writes its own files (1.15) into a hidden folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmtailor.background.options import stock_options
from llmtailor.errors import Problem, UsageError
from llmtailor.patching import patch_method, replaced
from llmtailor.stock_saving.saver import StockSaver, finish_before


def attach_accelerator(accelerator: Any, **options: Any) -> StockSaver:
    """Make ``accelerator.save_state`` return at once, and its folder appear when it is durable.

    Call it on every rank, after ``prepare``. ``options`` are those of `options.STOCK`. ``finish`` of the saver that it
    returns waits for the last save, as ``load_state`` does.

    Raises UsageError for options out of range, and for what can't be saved in this way.
    """
    chosen = stock_options(options)
    _refuse(accelerator)
    if accelerator.distributed_type == "DEEPSPEED":
        from llmtailor.stock_saving.checkpoint_engine import saver_of

        saver = saver_of(accelerator._models[0], **options)
    else:
        models = torch.nn.ModuleList(accelerator._models)
        saver = StockSaver(models, lambda: accelerator._optimizers, chosen)
    _save_by(saver, accelerator)
    finish_before(accelerator, "load_state")
    return saver


def _refuse(accelerator: Any) -> None:
    kind, project = accelerator.distributed_type, accelerator.project_configuration
    limited = project.automatic_checkpoint_naming and project.total_limit is not None
    signs = [
        (kind == "FSDP" and not accelerator.is_fsdp2, "FSDP version 1", "use FSDP version 2 (fsdp_version)"),
        (kind in ("MEGATRON_LM", "XLA"), f"{kind.value}", "train with DDP, FSDP or DeepSpeed"),
        (kind == "DEEPSPEED" and len(accelerator._models) > 1, "several DeepSpeed engines", "attach each engine"),
        (limited, "total_limit: older folders are deleted before the new one is durable", "omit total_limit"),
    ]
    text = "saving in the background excludes"
    if problems := [Problem("accelerator", f"{text} {what}", fix) for is_so, what, fix in signs if is_so]:
        raise UsageError(problems)


def _save_by(saver: StockSaver, accelerator: Any) -> None:
    """Put a save around the accelerator's ``save_state``."""

    @patch_method(accelerator, "save_state")
    def saving(save: Callable[..., Any], output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        project = accelerator.project_configuration
        named, near = project.automatic_checkpoint_naming, None
        if named:
            near = Path(accelerator.project_dir)  # load_state takes any folder among the checkpoints
            folder = near / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"
            if folder.exists():
                raise ValueError(f"{folder} already exists; set accelerator.save_iteration")
        else:
            folder = Path(output_dir)
        with saver.saving(folder, accelerator.step, near=near) as is_saving:
            if is_saving:
                with replaced(project, "automatic_checkpoint_naming", False), saver.intercept_writes():
                    save(str(saver.open_at), *args, **kwargs)
        return folder
