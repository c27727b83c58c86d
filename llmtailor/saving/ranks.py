"""The processes of a training, and the data that they exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from llmtailor.errors import StorageError, TailorError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process and the others; without torch.distributed it is the only one."""

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

    def gather(self, mine: _T) -> list[_T]:
        """Return every rank's value, in rank order, on every rank; also a barrier."""
        if self.world_size == 1:
            return [mine]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, mine)
        return values

    def together(self, call: Callable[[], _T]) -> list[_T]:
        """Make a call on every rank and return all results. An error on one rank is raised on all.

        OSError becomes StorageError. An unexpected exception is raised unchanged on its own rank, and as a TailorError
        on the others.
        """
        bug: Exception | None = None
        result, refusal = None, None
        try:
            result = call()
        except Exception as error:
            refused = as_refusal(error, self.rank)
            refusal = (type(refused), refused.problems)
            bug = None if isinstance(error, (TailorError, OSError)) else error
        results = self.gather((result, refusal))
        if bug is not None:
            raise bug
        refusals = [refusal for _, refusal in results if refusal is not None]
        if refusals:
            # a full disk must not hide a bug or a refusal
            kind = min((kind for kind, _ in refusals), key=lambda kind: kind.exit_code)
            raise kind(dict.fromkeys(problem for _, problems in refusals for problem in problems))
        return [result for result, _ in results]  # type: ignore[misc]

    def on_first(self, call: Callable[[], _T]) -> _T:
        """Make a call on rank 0 and return its result on every rank; raises as `together` does."""
        return self.together(lambda: call() if self.is_first else None)[0]  # type: ignore[return-value]

    def from_first(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[no-any-return]


def as_refusal(error: Exception, rank: int) -> TailorError:
    """Return an error of a rank as the other ranks raise it."""
    if isinstance(error, TailorError):
        return error
    if isinstance(error, OSError):
        what, fix = f"rank {rank} can't write: {error.strerror or error}", "free some space, or check the disk"
        return StorageError.at(error.filename or "saving", what, fix)
    fix = "this is a bug in llmtailor, or in what it saves: please report it with that rank's traceback"
    return TailorError.at("llmtailor.saving", f"rank {rank} raised {error!r:.500}", fix)
