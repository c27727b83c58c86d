"""A training without DeepSpeed or FSDP whose states are only compared, by position: any optimizer, any adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from llmtailor.attestation.by_position import Positions
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.loaders.files import ADAPTER
from llmtailor.model.parts import Param
from llmtailor.model.roles import BUFFER, KIND_OF_ROLE, MASTER
from llmtailor.saving.model import is_adapted, saved_names
from llmtailor.saving.snapshot import DTYPES
from llmtailor.saving.torch_training import innermost, unwrap
from llmtailor.saving.training import Fragment, describe, dominant, tied_names


class AnyTraining:
    """Implements the part of `saving.training.Training` that is attested. Raises UnsupportedCheckpoint."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = unwrap(model), innermost(optimizer)
        where = f"the optimizer {type(self.optimizer).__name__}"
        self._live = dict(self.model.named_parameters())
        if any(hasattr(param, "to_local") or hasattr(param, "ds_id") for param in self._live.values()):
            raise UnsupportedCheckpoint.at(where, "its params are sharded", "use an elementwise one, such as AdamW")
        names = {param: name for name, param in self._live.items()}
        groups = [[names.get(param, "") for param in group["params"]] for group in self.optimizer.param_groups]
        if any("" in group for group in groups):
            raise UnsupportedCheckpoint.at(where, "it has params that are not the model's", "give it only the model's")
        self._groups = groups
        self.params = describe(self.model, {name for group in groups for name in group})
        self.tied: dict[str, str] = tied_names(self.model)
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
        return Positions(params, self._groups, self._stored, saved_as, self.tied)

    def present(self) -> Iterator[Fragment]:
        for name, fact in self.params.items():
            kind = KIND_OF_ROLE[fact.role]
            tensor = self.model.get_buffer(name) if kind == BUFFER else self._live[name]
            yield Fragment(name, kind, 0, tensor.detach().reshape(-1))
            for state, value in self._state(name).items() if kind == MASTER else ():
                if type(value) is torch.Tensor and state != "step" and value.dtype in DTYPES and value.numel():
                    yield Fragment(name, state, 0, value.detach().reshape(-1))

    def _state(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.state.get(self._live[name]) or {}
        return found

    def shape_of(self, one: Fragment) -> tuple[int, ...]:
        """Return the shape of a whole state; moments may have another one than their param."""
        own = self._state(one.param).get(one.kind)
        return self.params[one.param].shape if own is None else tuple(own.shape)

    def weight_of(self, master: Fragment) -> torch.Tensor | None:
        return None

    def steps(self) -> Mapping[str, float | None]:
        names = [name for name, fact in self.params.items() if fact.role == "trainable"]
        found = {name: self._state(name).get("step") for name in names}
        return {name: None if step is None else float(step) for name, step in found.items()}

    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        return list(zip(self._groups, self.optimizer.param_groups, strict=True))
