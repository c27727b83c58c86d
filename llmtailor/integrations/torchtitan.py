"""For torchtitan: a checkpoint manager that saves parts in turn.

The config function of a run names it; ``--checkpoint.policy`` and all of torchtitan's options can be given on the
command line::

    from llmtailor.integrations.torchtitan import CheckpointManager

    def my_config() -> Trainer.Config:
        config = llama3_8b()
        config.checkpoint = CheckpointManager.Config(enable=True, interval=50, keep_latest_k=2)
        return config

Every ``step-N`` is complete to torchtitan itself and to ``dcp.load``, and needs no other folder, so that
``keep_latest_k`` may delete any. Checked against torchtitan 0.3.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from torchtitan.components import checkpoint as titan
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from llmtailor.dcp_saving.saver import DcpSaver
from llmtailor.policies import EXACT_POLICY


class CheckpointManager(titan.CheckpointManager):  # type: ignore[misc]
    """torchtitan's manager, with partial saves; see `DcpSaver`."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):  # type: ignore[misc]
        policy: str = EXACT_POLICY
        """Which parts of the optimizer's states, or of the model, each checkpoint writes anew. By default all."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        if self.enable:
            self._saver = DcpSaver(config.policy)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        # with other states of the optimizer, later saves must not link to those of this folder
        if titan.OPTIMIZER in state_dict:
            self._saver.resumed_from(checkpoint_id)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        saved: Future[Any] | AsyncSaveResponse | None = None
        if to_hf:
            saved = super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
            return saved  # noqa: RET504
        inner = FsspecWriter if filesystem.is_remote(checkpoint_id) else FileSystemWriter
        writer = self._saver.writer(inner(checkpoint_id), int(checkpoint_id.rpartition("-")[2]), state_dict)
        if async_mode == titan.AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
        elif async_mode == titan.AsyncMode.ASYNC:
            saved = async_save(state_dict, process_group=self.pg, storage_writer=writer)
        else:
            saved = async_save(
                state_dict,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
                storage_writer=writer,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved
