"""The one error tree, and the exit code of each branch.

::

    TailorError                      1  unexpected: a bug
    ├── UsageError                   2  invalid command-line usage
    ├── RecipeError                  3  the recipe is malformed or contradicts itself
    ├── SourceError                  4  a checkpoint is missing, damaged or of an unsupported kind
    │   ├── DamagedSource               files of a checkpoint have other bytes than were written
    │   ├── UnsupportedCheckpoint       an intact checkpoint of an unsupported kind
    │   │   ├── AnotherOptimizer        an intact checkpoint of an optimizer whose states can't be judged
    │   │   └── ObjectKeys              an intact file whose dicts have objects as keys
    │   └── UnsafePickle                a pickle names a global that no checkpoint needs
    ├── MismatchError                5  the sources do not fit together
    ├── TargetError                  6  the output exists, is in use, has another unfinished merge, or overlaps a source
    ├── VerificationError            7  a checkpoint is not resumable, or the output does not read back as planned
    ├── StorageError                 8  no space, or the operating system refused to read or write
    ├── Unanswered                   9  a helper process or another rank did not answer in time, or at all
    └── Interrupted                130  interrupted by Ctrl-C or SIGTERM

An error carries *problems*, in the plural: all problems of a stage are reported together. Each says where it is, what
it is, and how to fix it. `docs/errors.md` is generated from this file.

The module also formats names, lists of names and sizes for messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from llmtailor.codes import Code

if TYPE_CHECKING:
    from typing_extensions import Self


COPY_FILE = "copy the file again, or leave this checkpoint out"
COPY_BACK = "copy it back, or leave this checkpoint out"
COPY_CHECKPOINT = "copy the whole checkpoint again, or use another one"
COPY_OR_ANOTHER = "copy the file again, or use another checkpoint"

MAX_TEXT = 2000
"""The number of characters of a text that messages show."""


def printable(text: str) -> str:
    """Return a text fit for a terminal: names in a hostile file may hold control characters, or be megabytes long, so
    they are cut after `MAX_TEXT` characters, and URLs may hold passwords."""
    text = masked(text)
    return escaped(f"{text[:MAX_TEXT]} ..." if len(text) > MAX_TEXT else text)


_USER = re.compile(r"([a-z][a-z0-9+.-]*)://((?:[^\s/'\"]*|[^\s/@:'\"]+:(?![0-9]+/)[^\s@'\"]*)@)", re.IGNORECASE)
"""The scheme of a URL, and the user and password in it, which may hold a slash that should have been written as %2F"""
_QUERY = re.compile(r"(://[^\s?'\"]+)\?[^\s'\"]+")
_CONTAINERS = ("abfs", "abfss", "az", "wasb", "wasbs")
"""Schemes in whose URLs a name before ``@`` is that of a container"""


def masked(text: str) -> str:
    """Return a text without the users, keys, passwords and queries of the URLs in it."""
    if "://" not in text:
        return text

    def mask(match: re.Match[str]) -> str:
        is_container = match[1].lower() in _CONTAINERS and ":" not in match[2]
        return match[0] if is_container else f"{match[1]}://***@"

    return _QUERY.sub(r"\1?***", _USER.sub(mask, text))


def escaped(text: str) -> str:
    """Return a text with control characters escaped, whole."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()


class PathIn(str):
    """A path in a checkpoint, shown with the checkpoint's name. Code uses `path` itself."""

    checkpoint: str
    """What messages call it"""
    path: str
    """Relative to its root; ``.`` for a checkpoint that is one file"""

    def __new__(cls, checkpoint: str, path: str) -> PathIn:
        place = super().__new__(cls, checkpoint if path == "." else f"{checkpoint}/{path}")
        place.checkpoint, place.path = checkpoint, path
        return place

    def __reduce__(self) -> tuple[type[PathIn], tuple[str, str]]:  # for a copy on another rank
        return PathIn, (self.checkpoint, self.path)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: its place, a description, and a fix. The texts are for people; code decides by the other fields."""

    where: str
    """A path (`PathIn`), a recipe location such as ``recipe.yaml:12 slices[0].sources[0]``, or a flag."""
    what: str
    fix: str = ""
    code: Code = Code.OTHER
    ranks: tuple[int, ...] = field(default=(), kw_only=True)
    """The ranks that have it, if several processes work together and not all have it"""

    @property
    def path(self) -> str | None:
        """The file or folder concerned, relative to the checkpoint; None if the problem concerns all of it."""
        return self.where.path if isinstance(self.where, PathIn) else None

    def __str__(self) -> str:
        where, what, fix = map(printable, (self.where, self.what, self.fix))
        head = ": ".join(filter(None, (ranks_text(self.ranks), where, what)))
        return f"{head}\n  fix: {fix}" if fix else head

    def to_json(self) -> dict[str, str | None]:
        return {
            "code": self.code.value,
            "where": self.where,
            "path": self.path,
            "what": self.what,
            "fix": self.fix,
        }


class TailorError(Exception):
    """Base of everything llmtailor raises on purpose."""

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "unexpected: a bug"
    afterwards: ClassVar[str] = "Rerun with `LLMTAILOR_DEBUG=1` and report what it prints."
    """What the user should do"""
    code: ClassVar[Code] = Code.OTHER
    """The code of problems that have none of their own"""

    def __init__(self, problems: Problem | Iterable[Problem]):
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.came_late = False
        """Whether the command had already written or removed something permanently"""
        self.is_reported = False
        """Whether another process tells the user"""
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Problem, ...]], dict[str, object]]:
        return type(self), (self.problems,), self.__dict__

    @classmethod
    def at(cls, where: object, what: str, fix: str = "", code: Code | None = None) -> Self:
        """Build an error with a single problem."""
        return cls(Problem(where if isinstance(where, str) else f"{where}", what, fix, code or cls.code))


class UsageError(TailorError):
    exit_code = 2
    meaning = "invalid command-line usage"
    afterwards = "Correct the command; `llmtailor COMMAND --help` has examples."


class RecipeError(TailorError):
    exit_code = 3
    meaning = "the recipe is malformed or contradicts itself"
    afterwards = "Correct the recipe at the named place; docs/recipes.md describes every form."


class SourceError(TailorError):
    exit_code = 4
    code = Code.DAMAGED
    meaning = "a checkpoint is missing, damaged or of an unsupported kind"
    afterwards = (
        "Correct the path, or use another checkpoint. `llmtailor verify` lists all problems of a checkpoint; "
        "`llmtailor salvage` recovers what it can from a run whose newest checkpoint is damaged."
    )


class DamagedSource(SourceError):
    """Files of checkpoints have other bytes than llmtailor wrote."""

    meaning = "files of a checkpoint have other bytes than were written"

    def __init__(self, problems: Problem | Iterable[Problem], roots: Iterable[Path] = ()):
        super().__init__(problems)
        self.roots = frozenset(roots)
        """The folders of these checkpoints"""


def damaged(where: str, what: str, code: Code = Code.DAMAGED) -> SourceError:
    """Return an error on a file that is to be copied again."""
    return SourceError.at(where, what, COPY_FILE, code)


class UnsupportedCheckpoint(SourceError):
    code = Code.UNSUPPORTED
    meaning = "an intact checkpoint of an unsupported kind"


class AnotherOptimizer(UnsupportedCheckpoint):
    meaning = "an intact checkpoint of an optimizer whose states can't be judged"


class ObjectKeys(UnsupportedCheckpoint):
    meaning = "an intact file whose dicts have objects as keys"


class UnsafePickle(SourceError):
    code = Code.UNSAFE_PICKLE
    meaning = "a pickle names a global that no checkpoint needs"
    names: tuple[tuple[str, str], ...] = ()
    """Module and name of each global"""


class MismatchError(TailorError):
    exit_code = 5
    meaning = "the sources do not fit together"
    afterwards = "Use sources of the same model and the same kind of run; the message says which differs, and how."


class TargetError(TailorError):
    exit_code = 6
    meaning = "the output exists, is in use, has another unfinished merge, or overlaps a source"
    afterwards = (
        "Choose another output, wait for the other process, or use `--force` or `--restart`; the message says which."
    )


class VerificationError(TailorError):
    exit_code = 7
    meaning = "a checkpoint is not resumable, or the output does not read back as planned"
    afterwards = (
        "Do not resume from that checkpoint; `llmtailor latest` prints the newest one that verifies. "
        "An output that does not read back is not published."
    )


class StorageError(TailorError):
    exit_code = 8
    meaning = "no space, or the operating system refused to read or write"
    afterwards = "Free space, or fix the disk or the permissions. Then rerun the same command to resume."


class Unanswered(TailorError):
    """Not a SourceError, because it must not make a command use an older checkpoint."""

    exit_code = 9
    meaning = "a helper process or another rank did not answer in time, or at all"
    afterwards = (
        "This says nothing about the checkpoint, so no older one was used instead. Rerun the same command when the "
        "machine is less busy, or with a higher limit: `LLMTAILOR_TIMEOUT`, in seconds. A merge then resumes."
    )


class Interrupted(TailorError):
    exit_code = 130
    meaning = "interrupted by Ctrl-C or SIGTERM"
    afterwards = "Rerun the same command to resume. Until it completes, the output is absent."


BRANCHES: tuple[type[TailorError], ...] = (
    *(TailorError, UsageError, RecipeError, SourceError, MismatchError),
    *(TargetError, VerificationError, StorageError, Unanswered, Interrupted),
)
"""The classes that define an exit code, by exit code"""


class Problems:
    """A collector of errors, so that a user sees all of them and not just the first."""

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


_Result = TypeVar("_Result")


def attempt(call: Callable[[], _Result], problems: Problems, kind: type[TailorError] = SourceError) -> _Result | None:
    """Return the result of a call; add an error of this kind to ``problems`` and return None. Raises all others."""
    try:
        return call()
    except kind as error:
        problems.add(error)
        return None


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as short text: ``1-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the name of some ranks: ``rank 1``, ``ranks 1-3, 5``."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}" if ranks else ""


def some(names: Iterable[str], shown: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``1,024 ranks``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def about(number: float) -> str:
    """Return an estimate without digits that it does not have: ``3.1``, ``57``."""
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def size(num_bytes: int) -> str:
    """Return a number of bytes in decimal units, e.g. ``16.1 GB``."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
