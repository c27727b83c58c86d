"""The processes of a training, and the little that they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all; without torch.distributed it is the only one."""

    rank: int
    world_size: int

    @classmethod
    def here(cls) -> Ranks:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, mine: _Told) -> list[_Told]:
        """Return what every rank has to tell, in their order, on every rank; also a barrier."""
        if self.world_size == 1:
            return [mine]
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, mine)
        return told

    def from_first(self, value: _Told) -> _Told:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        told: list[Any] = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]  # type: ignore[no-any-return]
