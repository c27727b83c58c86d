"""The one error tree, and the exit code of each branch.

::

    TailorError                 1   anything unexpected that still has a message
    ├── UsageError              2   the command line is off
    ├── RecipeError             3   the YAML is malformed, or asks for what makes no sense
    ├── SourceError             4   a checkpoint is missing, damaged or of a kind we can't read
    │   ├── UnsupportedCheckpoint   a whole checkpoint of a kind that is refused by name
    │   └── UnsafePickle            a pickle names a global that is not on the allow-list
    ├── MismatchError           5   the sources are fine one by one, but do not fit together
    ├── TargetError             6   the output exists, is locked or begun by another recipe, or would destroy a source
    ├── VerificationError       7   a checkpoint is not resumable, or what was written is not what was planned
    ├── StorageError            8   no space, or the operating system refused to read or write
    └── Interrupted           130   Ctrl-C or SIGTERM; the output is absent, and the same command goes on

An error carries *problems*, in the plural: a refusal names everything that is wrong at once.
Each says where it is, what it is, and how to mend it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


MAX_TEXT = 2000
"""Characters of a text that are shown."""


def printable(text: str) -> str:
    """Return a text fit for a terminal: names in a hostile file may hold control characters, or a megabyte."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} ..."
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where, what, and how to mend it."""

    where: str
    """A path, a recipe location such as ``recipe.yaml:12 slices[0].sources[0]``, or a flag."""
    what: str
    fix: str = ""

    def __str__(self) -> str:
        where, what, fix = map(printable, (self.where, self.what, self.fix))
        head = f"{where}: {what}" if where else what
        return f"{head}\n  fix: {fix}" if fix else head

    def to_json(self) -> dict[str, str]:
        return {"where": self.where, "what": self.what, "fix": self.fix}


class TailorError(Exception):
    """Base of everything llmtailor raises on purpose."""

    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem]):
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def at(cls, where: object, what: str, fix: str = "") -> Self:
        """Build an error with a single problem."""
        return cls(Problem(str(where), what, fix))


class UsageError(TailorError):
    exit_code = 2


class RecipeError(TailorError):
    exit_code = 3


class SourceError(TailorError):
    exit_code = 4


class UnsupportedCheckpoint(SourceError):
    pass


class UnsafePickle(SourceError):
    pass


class MismatchError(TailorError):
    exit_code = 5


class TargetError(TailorError):
    exit_code = 6


class VerificationError(TailorError):
    exit_code = 7


class StorageError(TailorError):
    exit_code = 8


class Interrupted(TailorError):
    exit_code = 130


class Problems:
    """Collects errors, so that a user sees all of them and not just the first."""

    def __init__(self) -> None:
        self._errors: list[TailorError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(self, error: TailorError) -> None:
        self._errors.append(error)

    @property
    def errors(self) -> tuple[TailorError, ...]:
        return tuple(self._errors)

    def raise_if_any(self) -> None:
        """Raise one error with every problem; its class is that of the earliest stage that failed."""
        if not self._errors:
            return
        first = min(self._errors, key=lambda error: error.exit_code)
        problems = dict.fromkeys(problem for error in self._errors for problem in error.problems)
        raise type(first)(problems)
