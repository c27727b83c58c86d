"""``--distributed``: one command in several processes, of which only rank 0 talks to the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from llmtailor.errors import UsageError

if TYPE_CHECKING:
    from llmtailor.engine.job import Job
    from llmtailor.engine.sharing import Team


@contextmanager
def shared(distributed: bool, out: Path | None) -> Iterator[Job | None]:
    """Yield the job of which this process is a rank; None if it works alone.

    Raises UsageError if no launcher has started the process, or if ranks would not find each other: that takes an
    output named on the command line, in a folder that all of them see.
    """
    if not distributed:
        yield None
        return
    from llmtailor.engine.job import Job
    from llmtailor.engine.launch import find_member
    from llmtailor.storage.stand_in import stand_in_of

    member = find_member(os.environ)
    if out is None:
        raise UsageError.at("--distributed", "the ranks meet beside the output", "name OUT on the command line")
    if stand_in_of(out):
        raise UsageError.at("--distributed", "an object store can't be written by several ranks", "name a folder")
    if member.world_size == 1:
        yield None
        return
    with Job(member, out) as job, nullcontext() if job.is_first else _silence():
        yield job


def team_of(job: Job | None, request: object) -> Team:
    """Return the ranks of a job as a team. Raises UsageError if they run another version, or were asked for another
    thing."""
    from llmtailor import __version__
    from llmtailor.engine.sharing import Team

    team = Team(job)
    if job is not None:
        team.agree(version=__version__, request=repr(request))
    return team


def is_for_rank_0(distributed: bool) -> bool:
    """Whether another process does what only one has to do."""
    if not distributed:
        return False
    from llmtailor.engine.launch import find_member

    return find_member(os.environ).rank > 0


@contextmanager
def _silence() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
