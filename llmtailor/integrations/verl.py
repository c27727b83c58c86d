"""For verl's FSDP engine: a plug-in that saves model and optimizer through DCP, parts in turn.

verl finds it in the group ``verl.plugins`` where llmtailor is installed. It does nothing unless ``LLMTAILOR_POLICY``
names a policy, in the environment of all workers. verl ignores plug-ins that fail, so this one ends the program then.

The rest of a checkpoint (schedule, random states, config, weights for Hugging Face) is verl's own. Checked against verl
0.9.1.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from llmtailor.containers.dcp import METADATA
from llmtailor.dcp_saving.saver import DcpSaver
from llmtailor.patching import patch_method, replaced
from llmtailor.saving.arguments import from_environment

FOLDER = "dcp"
"""In the folder of a step"""
_OURS = ("model", "optimizer")
Stock = Callable[..., Any]


def install(manager: Any, policy: Any) -> None:
    """Let verl's FSDPCheckpointManager save and load through DCP. Raises UsageError for a policy that can't."""
    DcpSaver(policy)

    @patch_method(manager, "save_checkpoint")
    def save_checkpoint(stock_save: Stock, self: Any, local_path: str | None, *args: Any, **options: Any) -> Any:
        saved = self.checkpoint_save_contents
        if local_path is None or not {*_OURS} <= {*saved} or self.should_save_lora_only:
            return stock_save(self, local_path, *args, **options)
        step = options.get("global_step", args[1] if len(args) > 1 else 0)
        weights, states = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": states}
        writer = _saver(self, policy).writer(FileSystemWriter(Path(local_path) / FOLDER), step, state)
        save(state, storage_writer=writer)  # first, as verl's own removes older ones
        with replaced(self, "checkpoint_save_contents", _others(saved)):
            return stock_save(self, local_path, *args, **options)

    @patch_method(manager, "load_checkpoint")
    def load_checkpoint(stock_load: Stock, self: Any, local_path: str | None, *args: Any, **options: Any) -> Any:
        folder = Path(local_path or "") / FOLDER
        if local_path is None or not (folder / METADATA).is_file():
            return stock_load(self, local_path, *args, **options)
        if self.should_load_optimizer:
            weights, states = get_state_dict(self.model, self.optimizer)
            load({"model": weights, "optimizer": states}, checkpoint_id=folder)
            set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=states)
            _saver(self, policy).resumed_from(folder)
        elif self.should_load_model:
            weights = get_model_state_dict(self.model)
            load({"model": weights}, checkpoint_id=folder)
            set_model_state_dict(self.model, weights)
        with replaced(self, "checkpoint_load_contents", _others(self.checkpoint_load_contents)):
            return stock_load(self, local_path, *args, **options)


def _saver(manager: Any, policy: Any) -> DcpSaver:
    if not hasattr(manager, "_llmtailor"):
        manager._llmtailor = DcpSaver(policy)
    saver: DcpSaver = manager._llmtailor
    return saver


def _others(contents: Collection[str]) -> list[str]:
    """Return what verl's own functions save and load."""
    return [one for one in contents if one not in _OURS]


def plug_in() -> None:
    """Do what the environment asks for. Raises SystemExit for any failure."""
    try:
        if (policy := from_environment(os.environ).get("policy")) is not None:
            from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

            install(FSDPCheckpointManager, policy)
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"llmtailor: the plug-in for verl failed: {error}") from error


plug_in()
