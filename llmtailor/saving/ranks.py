"""The processes of a training. They exchange values by collectives; threads, by a board."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from llmtailor.ranks.board import OwnStore, StoreBoard
from llmtailor.ranks.team import Team

_T = TypeVar("_T")


class Ranks(Team):
    """This process and the others; without torch.distributed it is the only one."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    @classmethod
    def here(cls) -> Ranks:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    def gather(self, mine: _T) -> list[_T]:
        if self.world_size == 1:
            return [mine]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, mine)
        return values

    def from_first(self, value: _T) -> _T:
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[no-any-return]

    def board(self) -> StoreBoard:
        """Return a new board for the threads of all ranks."""
        if self.world_size == 1:
            return StoreBoard(OwnStore())
        store = dist.distributed_c10d._get_default_store()  # rank 0 serves it as long as it exists
        # a connection of its own: training may block on the other one
        own = store.clone() if hasattr(store, "clone") else store
        return StoreBoard(dist.PrefixStore("llmtailor", own), store)  # type: ignore[attr-defined]
