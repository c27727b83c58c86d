"""The ranks that make the same calls in the same order: the processes of torch.distributed, or this one alone.

torch is imported only where there are several.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from llmtailor.errors import Problem, TailorError, ranks_text
from llmtailor.ranks.errors import as_error, merged
from llmtailor.ranks.store import KeyValueStore, LocalStore
from llmtailor.ranks.watch import Stoppable, Watch

_T = TypeVar("_T")


class Ranks:
    """This process and the others that take the same steps; without torch.distributed it is the only one."""

    def __init__(self, rank: int = 0, world_size: int = 1, watch: Watch | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.watch = watch
        """Of the ranks of one command: how they notice that one is lost"""

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
        with self._naming_lost():
            dist.all_gather_object(values, mine)
        return values

    def broadcast(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        values: list[Any] = [value]
        with self._naming_lost():
            dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[no-any-return]

    @contextmanager
    def _naming_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.watch is None:
                raise
            raise self.watch.name_lost() from error

    def run_on_all(self, call: Callable[[], _T]) -> list[_T]:
        """Make a call on every rank and return all results. An error on one rank is raised on all.

        OSError becomes StorageError. An unexpected exception is raised unchanged on its own rank, and as a TailorError
        on the others.
        """
        return self._join(*_attempt(call))

    def run_long(
        self, call: Callable[[Callable[[int], None]], _T], stop: Stoppable, on_progress: Callable[[int], None]
    ) -> list[_T]:
        """Do what `run_on_all` does with a call that may take hours: an error on one rank stops it on all.

        The call gets a callback for bytes moved, which `on_progress` gets on rank 0 for all ranks.
        """
        if self.watch is None:
            return self.run_on_all(lambda: call(on_progress))
        return self._join(*self.watch.during(lambda report: _attempt(lambda: call(report)), stop, on_progress))

    def run_on_first(self, call: Callable[[], _T]) -> _T:
        """Make a call on rank 0 and return its result on every rank; raises as `run_on_all` does."""
        result, error = _attempt(call) if self.is_first else (None, None)
        result, refusal = self.broadcast((result, _refusal(error)))
        _raise(error, {0: refusal} if refusal is not None else {}, 1)
        return result  # type: ignore[return-value]

    def _join(self, result: _T | None, error: Exception | None) -> list[_T]:
        outcomes = self.all_gather((result, _refusal(error)))
        errors = {rank: refusal for rank, (_, refusal) in enumerate(outcomes) if refusal is not None}
        _raise(error, errors, self.world_size)
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def final_barrier(self) -> None:
        """Wait until all ranks are here, so that each can end without an error on another one: no collective is under
        way any more, and the process with the store ends last."""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        store = of_this_start(dist.distributed_c10d._get_default_store())
        for word in ("here", "leaving"):
            store.set(f"{word}/{self.rank}", "")
            if word == "here" or self.rank == 0:
                store.wait([f"{word}/{rank}" for rank in range(self.world_size)], timedelta(seconds=60))

    def store(self) -> KeyValueStore:
        """Return a new store for the threads of all ranks."""
        if self.world_size == 1:
            return KeyValueStore(LocalStore())
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()  # rank 0 serves it as long as it exists
        # a connection of its own: training may block on the other one
        own = store.clone() if hasattr(store, "clone") else store
        return KeyValueStore(of_this_start(own), store)


def of_this_start(store: Any) -> Any:
    """Return a store without the messages of processes that torchrun has started before (``--max-restarts``).

    Its agent may serve them the same store, where they would find addresses and answers of ranks that are gone.
    """
    import torch.distributed as dist

    return dist.PrefixStore(f"llmtailor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]


def _attempt(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _refusal(error: Exception | None) -> TailorError | None:
    return None if error is None else as_error(error)


def _raise(own: Exception | None, errors: Mapping[int, TailorError], num_ranks: int) -> None:
    """Raise this rank's unexpected exception, or else the errors of all ranks as one."""
    if own is not None and not isinstance(own, (TailorError, OSError)):
        raise own
    if errors:
        error = merged(errors, num_ranks)
        raise error from (own if own is not error else own.__cause__)


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
