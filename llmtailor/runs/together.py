"""Files of a run's folder that a team of ranks writes: each rank its share, which it reads back."""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from llmtailor.checkpoint.layout import Plan
from llmtailor.engine.copy import Context, Moved, execute
from llmtailor.engine.sharing import Team, wait_for_files


@dataclass(frozen=True, slots=True)
class Written:
    """Files that are on the disk."""

    crcs: Mapping[str, int]
    """Path -> CRC-32"""
    unread: Mapping[str, int]
    """Those that nobody has read back yet: of this process"""
    moved: Moved


def write_files(
    plan: Plan, staging: Path, context: Context, team: Team, read_back: Callable[[Mapping[str, int], Context], None]
) -> Written:
    """Write the files of a plan into a new folder, each fsynced, together with a team; all ranks get the same.

    Ranks other than 0 read back what they have written. Raises what `execute` raises, on whatever rank.
    """
    if team.is_first:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    team.exchange()
    numbers = team.mine([file.num_bytes for file in plan.files])
    with team.working(context.stop, context.on_progress) as count:
        own_context = replace(context, on_progress=count)
        mine = replace(plan, files=tuple(plan.files[number] for number in numbers))
        results = execute(mine, staging, own_context)
        crcs = {result.path: result.crc for result in results}
        if not team.is_first:
            read_back(crcs, own_context)
    moved = sum((result.moved for result in results), Moved())
    found = team.exchange([crcs, astuple(moved)])
    of_all = {path: crc for one, _ in found for path, crc in one.items()}
    if team.job is not None and team.is_first:
        wait_for_files(team.job, staging, {file.path: file.num_bytes for file in plan.files})
    return Written(
        {file.path: of_all[file.path] for file in plan.files}, crcs, sum((Moved(*one) for _, one in found), Moved())
    )


def new_ids(team: Team) -> Callable[[], str]:
    """Return a source of random ids (32 hex digits), the same on all ranks of a team."""
    if team.job is None:
        return lambda: uuid.uuid4().hex
    known = random.Random(team.exchange(uuid.uuid4().hex)[0])
    return lambda: f"{known.getrandbits(128):032x}"
