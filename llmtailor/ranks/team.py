"""The ranks that make the same calls in the same order: the processes of torch.distributed, or this one alone.

torch is imported only where there are several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from llmtailor.errors import Problem, TailorError, ranks_text
from llmtailor.ranks.errors import as_error, from_json, merged, to_json
from llmtailor.ranks.store import KeyValueStore, LocalStore

_T = TypeVar("_T")


class Ranks:
    """This process and the others that take the same steps; without torch.distributed it is the only one."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @classmethod
    def here(cls) -> Ranks:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, mine: _T) -> list[_T]:
        """Return every rank's value, in rank order, on every rank; also a barrier."""
        if self.world_size == 1:
            return [mine]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, mine)
        return values

    def broadcast(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[no-any-return]

    def run_on_all(self, call: Callable[[], _T]) -> list[_T]:
        """Make a call on every rank and return all results. An error on one rank is raised on all.

        OSError becomes StorageError. An unexpected exception is raised unchanged on its own rank, and as a TailorError
        on the others.
        """
        result, refusal, bug = self._try(call)
        results = self.all_gather((result, refusal))
        if bug is not None:
            raise bug
        if refusals := {rank: from_json(one) for rank, (_, one) in enumerate(results) if one is not None}:
            raise merged(refusals, self.world_size)
        return [result for result, _ in results]  # type: ignore[misc]

    def run_on_first(self, call: Callable[[], _T]) -> _T:
        """Make a call on rank 0 and return its result on every rank; raises as `run_on_all` does."""
        result, refusal, bug = self._try(call) if self.is_first else (None, None, None)
        result, refusal = self.broadcast((result, refusal))
        if bug is not None:
            raise bug
        if refusal is not None:
            raise merged({0: from_json(refusal)}, 1)
        return result  # type: ignore[return-value]

    @staticmethod
    def _try(call: Callable[[], _T]) -> tuple[_T | None, dict[str, Any] | None, Exception | None]:
        """Return a call's result, or its error for other ranks; an unexpected exception as well."""
        try:
            return call(), None, None
        except Exception as error:
            return None, to_json(as_error(error)), None if isinstance(error, (TailorError, OSError)) else error

    def final_barrier(self) -> None:
        """Wait until all ranks are here, so that each can end without an error on another one: no collective is under
        way any more, and the process with the store ends last."""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        for word in ("here", "leaving"):
            store.set(f"llmtailor/{word}/{self.rank}", "")
            if word == "here" or self.rank == 0:
                store.wait([f"llmtailor/{word}/{rank}" for rank in range(self.world_size)], timedelta(seconds=60))

    def store(self) -> KeyValueStore:
        """Return a new store for the threads of all ranks."""
        if self.world_size == 1:
            return KeyValueStore(LocalStore())
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()  # rank 0 serves it as long as it exists
        # a connection of its own: training may block on the other one
        own = store.clone() if hasattr(store, "clone") else store
        return KeyValueStore(dist.PrefixStore("llmtailor", own), store)  # type: ignore[attr-defined]


def check_same(
    found: Sequence[Mapping[str, object]], must_be_same: Mapping[str, tuple[str, type[TailorError]]]
) -> None:
    """Check that all ranks have the same facts, given those of each by name.

    ``must_be_same`` has the fix and the error of each fact, in the order in which one follows from the others: only the
    first difference of a rank is reported. Raises the error of the lowest exit code.
    """
    differing: dict[str, list[int]] = defaultdict(list)
    for rank, facts in enumerate(found):
        for name in [name for name in must_be_same if facts[name] != found[0][name]][:1]:
            differing[name].append(rank)
    if differing:
        kind = min((must_be_same[name][1] for name in differing), key=lambda kind: kind.exit_code)
        raise kind(
            Problem(ranks_text(ranks), f"not the same {name} as on rank 0", must_be_same[name][0])
            for name, ranks in differing.items()
        )
