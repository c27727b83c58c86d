"""A training without DeepSpeed or FSDP whose states are only compared, by position: any optimizer, any adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmtailor.attestation.by_position import Positions
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.frameworks.files import ADAPTER
from llmtailor.live.model import is_adapted, saved_names
from llmtailor.live.tensors import DTYPES
from llmtailor.live.torch_training import NamedTraining
from llmtailor.live.training import dominant
from llmtailor.model.parts import Param


class AnyTraining(NamedTraining):
    """Implements the part of `live.training.Training` that is attested. Raises UnsupportedCheckpoint."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        if self.is_sharded or any(hasattr(param, "ds_id") for param in self.model.parameters()):
            what, fix = "its params are sharded", "use an elementwise one, such as AdamW"
            raise UnsupportedCheckpoint.at(self._where, what, fix)
        self.inventory = self._look()
        self.params, self.tied = self.inventory.params, self.inventory.tied
        self.precision = dominant([param.dtype for param in self._live.values()])
        self._stored = self._of_adapters() if is_adapted(self.model) else None

    def _of_adapters(self) -> dict[str, tuple[str, str]]:
        """Return where PEFT saves each param of its adapters; that of ``default`` is in the root.

        Params from which it computes what it saves, such as those of prompt tuning, are left out.
        """
        from peft import get_peft_model_state_dict

        by_place = {(param.data_ptr(), param.shape): name for name, param in self._live.items() if param.numel()}
        stored = {}
        for adapter in self.model.peft_config:  # type: ignore[union-attr]
            path = ADAPTER if adapter == "default" else f"{adapter}/{ADAPTER}"
            for key, tensor in get_peft_model_state_dict(self.model, adapter_name=adapter).items():
                if (name := by_place.get((tensor.data_ptr(), tensor.shape))) is not None:
                    stored[name] = (path, key)
        return stored

    @property
    def positions(self) -> Positions:
        params = {name: Param(name, fact.shape, fact.role) for name, fact in self.params.items()}
        saved_as = None if self._stored is not None else saved_names(self.model, self.params, self.tied)
        return Positions(params, self._names_in_groups(), self._stored, saved_as, self.tied)

    def _compared(self, name: str) -> Mapping[str, torch.Tensor]:
        return {
            kind: value
            for kind, value in self._saved(name).items()
            if type(value) is torch.Tensor and kind != "step" and value.dtype in DTYPES and value.numel()
        }
