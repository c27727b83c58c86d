"""A training under FSDP2 (``fully_shard``): every rank saves its own rows of each param.

A param is a DTensor that is cut along dimension 0, so the elements of a rank are contiguous. In a hybrid mesh (HSDP),
which also has replicas, the first replica saves. Verified with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmtailor.balance import deal
from llmtailor.checkpoint.index import FSDP
from llmtailor.errors import Problem, UnsupportedCheckpoint
from llmtailor.formats.partial.manifest import frozen_name
from llmtailor.model.states import FROZEN
from llmtailor.saving.plain import PlainTraining
from llmtailor.saving.training import FrozenFile, HasState

_WHERE = "FSDP"


class ShardedTraining(PlainTraining):
    """Implements `saving.training.Training`.

    Raises UnsupportedCheckpoint, with every reason, for what it can't save.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: HasState | None = None
    ) -> None:
        problems = []
        for name, param in model.named_parameters():
            cuts = [one for one in param.placements if one != Replicate()] if isinstance(param, DTensor) else []
            if len(cuts) > 1 or any(not (type(one) is Shard and one.dim == 0) for one in cuts):
                what = f"{name} is sharded as {param.placements}"  # type: ignore[attr-defined]
                problems.append(Problem(_WHERE, what, "shard along dimension 0 of one mesh dimension"))
        if problems:
            raise UnsupportedCheckpoint(problems)
        super().__init__(model, optimizer, scaler)

    def look_again(self) -> bool:
        # after a forward without backward, the model has unsharded params in their place
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().look_again()

    def shards(self) -> Mapping[str, Any]:
        return {"framework": FSDP}  # which a composite takes the form of

    def frozen(self) -> FrozenFile | None:
        names = self._frozen_names()
        if not any(isinstance(self._live[name], DTensor) for name in names):
            return super().frozen()
        begin = dict(self._mine(names))
        tensors = {f"{FROZEN}/{name}": self._elements(self._live[name]) for name in begin}
        return FrozenFile(frozen_name(self.ranks.rank, self.ranks.world_size), tensors, begin)

    def _mine(self, params: Collection[str]) -> Iterator[tuple[str, int]]:
        live = {name: self._live[name] for name in params}
        whole = {name: live[name].numel() for name in sorted(live) if not isinstance(live[name], DTensor)}
        shared = {*deal(whole, self.ranks.world_size)[self.ranks.rank]}
        for name, param in live.items():
            if not isinstance(param, DTensor):
                if name in shared:
                    yield name, 0
                continue
            mesh = param.device_mesh
            shape, offset = compute_local_shape_and_global_offset(param.shape, mesh, param.placements)
            place = zip(param.placements, mesh.get_coordinate() or (), strict=True)
            is_first_replica = all(at == 0 for how, at in place if how == Replicate())
            if is_first_replica and torch.Size(shape).numel():
                yield name, offset[0] * torch.Size(param.shape[1:]).numel() if shape else 0

    def _elements(self, tensor: torch.Tensor) -> torch.Tensor:
        return super()._elements(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
