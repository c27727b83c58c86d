"""The ranks that do the same steps at the same time, whatever way they exchange values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from llmtailor.errors import Problem, TailorError, ranks_text
from llmtailor.ranks.codec import as_error, from_json, merged, to_json

_T = TypeVar("_T")


class Team(ABC):
    """This process, and the others that take the same steps."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def gather(self, mine: _T) -> list[_T]:
        """Return every rank's value, in rank order, on every rank; also a barrier."""

    @abstractmethod
    def from_first(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""

    def together(self, call: Callable[[], _T]) -> list[_T]:
        """Make a call on every rank and return all results. An error on one rank is raised on all.

        OSError becomes StorageError. An unexpected exception is raised unchanged on its own rank, and as a TailorError
        on the others.
        """
        return self._call(call, self.world_size)

    def on_first(self, call: Callable[[], _T]) -> _T:
        """Make a call on rank 0 and return its result on every rank; raises as `together` does."""
        return self._call(lambda: call() if self.is_first else None, 1)[0]  # type: ignore[return-value]

    def _call(self, call: Callable[[], _T], num_callers: int) -> list[_T]:
        result, refusal, bug = None, None, None
        try:
            result = call()
        except Exception as error:
            refusal, bug = to_json(as_error(error)), None if isinstance(error, (TailorError, OSError)) else error
        results = self.gather((result, refusal))
        if bug is not None:
            raise bug
        if refusals := {rank: from_json(one) for rank, (_, one) in enumerate(results) if one is not None}:
            raise merged(refusals, num_callers)
        return [result for result, _ in results]  # type: ignore[misc]


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
