"""The processes of a training, and the little that they tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from llmtailor.errors import Problem, StorageError, TailorError

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

    def together(self, call: Callable[[], _Told]) -> list[_Told]:
        """Make a call on every rank and return all results. What fails on one rank is raised on all.

        OSError becomes StorageError. What is no refusal, but a bug, is raised as it is where it happened, and as a
        TailorError on the other ranks.
        """
        bug: Exception | None = None
        result, refusal = None, None
        try:
            result = call()
        except TailorError as error:
            refusal = (type(error), error.problems)
        except OSError as error:
            what = f"rank {self.rank} can't write: {error.strerror or error}"
            refusal = (
                StorageError,
                (Problem(str(error.filename or "saving"), what, "free some space, or check the disk"),),
            )
        except Exception as error:
            bug = error
            what = f"rank {self.rank} raised {error!r:.500}"
            refusal = (TailorError, (Problem("llmtailor.saving", what, "see the first error of that rank"),))
        told = self.gather((result, refusal))
        if bug is not None:
            raise bug
        refusals = [refusal for _, refusal in told if refusal is not None]
        if refusals:
            # a disk that is full excuses no bug and no refusal
            kind = min((kind for kind, _ in refusals), key=lambda kind: kind.exit_code)
            raise kind(dict.fromkeys(problem for _, problems in refusals for problem in problems))
        return [result for result, _ in told]  # type: ignore[misc]

    def on_first(self, call: Callable[[], _Told]) -> _Told:
        """Make a call on rank 0 and return its result on every rank; raises as `together` does."""
        return self.together(lambda: call() if self.is_first else None)[0]  # type: ignore[return-value]

    def from_first(self, value: _Told) -> _Told:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        told: list[Any] = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]  # type: ignore[no-any-return]
