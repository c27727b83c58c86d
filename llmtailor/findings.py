"""Problems of a checkpoint, and how much they matter to a resume."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from llmtailor.errors import PathIn, Problem, some

ERROR = "error"
"""A stock resume fails, or silently continues from something other than the checkpoint claims."""
WARNING = "warning"
"""A stock resume works, but part of the saved state is lost, or is not as it should be."""
NOTE = "note"
"""Worth knowing; does not affect a resume."""
SEVERITIES = (ERROR, WARNING, NOTE)
_FEW = 2
"""The most findings of one kind that are listed one by one"""
_NAMED = 2
P = TypeVar("P", bound=Problem)


@dataclass(frozen=True, slots=True)
class Finding(Problem):
    """A problem with a severity. States can still be read, unless it is an error about them."""

    severity: str = NOTE
    params: tuple[str, ...] = ()
    """The params concerned, if not all are"""

    @classmethod
    def of(cls, problem: Problem, severity: str) -> Finding:
        """Return a problem with a severity."""
        return cls(problem.where, problem.what, problem.fix, problem.code, severity, ranks=problem.ranks)

    @property
    def problem(self) -> Problem:
        """The problem without its severity"""
        return Problem(self.where, self.what, self.fix, self.code, ranks=self.ranks)

    def to_json(self) -> dict[str, str | None]:
        return {"severity": self.severity, **Problem.to_json(self)}


def folded(problems: Iterable[P]) -> list[P]:
    """Return problems for people: three or more that differ in a single word, such as a param's name, become one.

    ``state[1].exp_avg is missing; the same for state[3].exp_avg, state[5].exp_avg and 16 more``
    """
    listed = list(dict.fromkeys(problems))
    counts = Counter(key for problem in listed for _, key in _without_a_word(problem))
    groups: dict[Hashable, list[tuple[P, str]]] = defaultdict(list)
    for problem in listed:
        word, key = max(_without_a_word(problem), key=lambda word_and_key: counts[word_and_key[1]])
        groups[key].append((problem, word))
    for_people = []
    for group in groups.values():
        first, names = group[0][0], [word.rstrip(".,;:)") for _, word in group[1:]]
        if isinstance(first.where, PathIn):
            names = [name.removeprefix(f"{first.where.checkpoint}/") for name in names]
        what = f"{first.what}; the same for {some(names, _NAMED)}"
        for_people += [replace(first, what=what)] if len(group) > _FEW else [problem for problem, _ in group]
    return for_people


def _without_a_word(problem: Problem) -> Iterator[tuple[str, Hashable]]:
    """Yield each word of a problem and a key that is equal for problems that differ in that word only."""
    words = list(enumerate([str(problem.where), *problem.what.split(" ")]))
    kind = (problem.code, problem.severity if isinstance(problem, Finding) else "", len(words))
    whole = sum(map(hash, words))
    for at, word in words:
        fix = problem.fix.replace(word, "") if word and word in problem.fix else problem.fix
        yield word, (kind, at, whole - hash((at, word)), fix)
