"""What ranks that share work do together: split it by bytes, and give each other what they have found.

Small facts are in the ranks' posts (`engine.posts`). What may be large is in a file in the same folder, whose size and
CRC-32 the post states, because NFS may show it late.
"""

from __future__ import annotations

import heapq
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.engine.job import EXCHANGING, Job
from llmtailor.engine.pool import Abandoned, Stop
from llmtailor.errors import PathIn, Problem, SourceError, StorageError, UsageError, ranges
from llmtailor.storage.local import make_folder, write_all

_POLL_S = 0.1
_MUST_BE_SAME = {
    "version": "version of llmtailor",
    "request": "recipe or options",
    "facts": "sizes or times of the sources' files",
    "plan": "content of the sources",
}


def share_out(num_bytes: Sequence[int], world_size: int) -> list[list[int]]:
    """Return the numbers of the files that each rank takes, given the sizes of all files.

    The largest come first, each to the rank that has least so far. All ranks compute the same. A file is not split.
    """
    loads = [(0, rank) for rank in range(world_size)]
    shares: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(num_bytes)), key=lambda number: (-num_bytes[number], number)):
        load, rank = loads[0]
        shares[rank].append(number)
        heapq.heapreplace(loads, (load + num_bytes[number], rank))
    return [sorted(share) for share in shares]


def check_same(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Check that all ranks plan the same; ``facts`` are their fingerprints, with that of rank 0.

    Raises UsageError, or SourceError if only what the ranks see of the sources differs.
    """
    differing: dict[str, list[int]] = defaultdict(list)
    for rank, found in sorted(facts.items()):
        # what follows from the first difference is not worth a message
        for key in [key for key in _MUST_BE_SAME if found[key] != facts[0][key]][:1]:
            differing[key].append(rank)
    fixes = {"facts": "wait until the sources are complete on all nodes, then run this again"}
    problems = [
        Problem(
            f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}",
            f"not the same {_MUST_BE_SAME[key]} as on rank 0",
            fixes.get(key, "start all ranks with the same command in the same environment"),
        )
        for key, ranks in differing.items()
    ]
    if problems:
        raise (UsageError if differing.keys() & {"version", "request"} else SourceError)(problems)


@contextmanager
def heeding(job: Job) -> Iterator[None]:
    """Raise what has ended the work elsewhere, where workers only say that they have stopped."""
    try:
        yield
    except Abandoned:
        job.check()
        raise


def hand_over(job: Job, name: str, content: Any) -> list[int]:
    """Write what other ranks need; return size and CRC-32 of the file. Raises StorageError."""
    path = job.folder / f"{job.member.rank}.{name}"
    data = json.dumps(content).encode()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError.at(path, f"can't write: {error.strerror}", "check the disk") from error
    return [len(data), zlib.crc32(data)]


def take_over(job: Job, rank: int, name: str, stated: Sequence[int]) -> Any:
    """Return what a rank has handed over, once this node sees it. Raises StorageError if it never does."""
    path = job.folder / f"{rank}.{name}"
    for _ in _until(job, path):
        with suppress(OSError):
            data = path.read_bytes()
            if [len(data), zlib.crc32(data)] == [*stated]:
                return json.loads(data)
    raise AssertionError("either it is there or that is an error")


def wait_for_files(job: Job, folder: Path, sizes: Mapping[str, int]) -> None:
    """Wait until this node sees the files of the others, by path below a folder, in their sizes.

    NFS remembers for up to a minute what is in a folder, unless this node changes it, and what a file is like until it
    is opened.
    """
    for parent in {(folder / path).parent for path in sizes}:
        probe = parent / ".llmtailor-probe"
        with suppress(OSError):
            make_folder(probe)
            probe.rmdir()
    for path, num_bytes in sizes.items():
        for _ in _until(job, PathIn(job.out.name, path)):
            with suppress(FileNotFoundError), (folder / path).open("rb") as file:
                if os.fstat(file.fileno()).st_size == num_bytes:
                    break


def _until(job: Job, where: object) -> Iterator[None]:
    """Yield from time to time, up to the job's limit. Raises StorageError then, and what ends the work."""
    until = time.monotonic() + job.limit_s
    while True:
        yield
        job.check()
        if time.monotonic() > until:
            what = f"another rank has written it, but this node does not see it after {job.limit_s:g} s"
            raise StorageError.at(where, what, "check that all nodes mount the same folder, then run this again")
        time.sleep(_POLL_S)


@dataclass(slots=True)
class Team:
    """The ranks that do the same steps at the same time; one process without a job does all of them alone."""

    job: Job | None = None
    rounds: int = 0
    """How often the ranks have exchanged something"""

    @property
    def is_first(self) -> bool:
        return self.job is None or self.job.is_first

    def exchange(self, content: Any = None) -> list[Any]:
        """Return what each rank gives, as JSON gives it back, in the order of the ranks; all ranks get the same.

        No rank returns before all have called it. Raises what ends the work on any rank.
        """
        job = self.job
        if job is None:
            return [content]
        self.rounds += 1
        name = f"round-{self.rounds}"
        handed = hand_over(job, name, content)
        if job.is_first:
            job.needs_all = True
            posts = job.wait(round_number=self.rounds)
            handed_of = [handed, *(post["handed"] for _, post in sorted(posts.items()))]
            job.say(EXCHANGING, round=self.rounds, handed_of=handed_of)
        else:
            job.say(EXCHANGING, round=self.rounds, handed=handed)
            handed_of = job.wait(round_number=self.rounds)[0]["handed_of"]
        found = [take_over(job, rank, name, stated) for rank, stated in enumerate(handed_of)]
        # all ranks are in this round, so they have read what was handed over in the one before
        with suppress(OSError):
            (job.folder / f"{job.member.rank}.round-{self.rounds - 1}").unlink()
        return found

    def agree(self, **facts: str) -> None:
        """Raise UsageError or SourceError if the ranks differ in any of these facts, see `check_same`."""
        own = dict.fromkeys(_MUST_BE_SAME, "") | facts
        check_same(dict(enumerate(self.exchange(own))))

    def mine(self, num_bytes: Sequence[int]) -> list[int]:
        """Return the numbers of the files that this rank takes, given the sizes of all."""
        if self.job is None:
            return list(range(len(num_bytes)))
        return share_out(num_bytes, self.job.member.world_size)[self.job.member.rank]

    def stretch(self, num_bytes: Iterable[int]) -> Iterator[bool]:
        """Yield for each of several items in a row whether this rank takes it: each rank takes as long a stretch."""
        sizes = list(num_bytes)
        rank, world_size = (self.job.member.rank, self.job.member.world_size) if self.job else (0, 1)
        total, at = max(sum(sizes), 1), 0
        for size in sizes:
            yield (at + size // 2) * world_size // total == rank or (world_size == 1)
            at += size

    @contextmanager
    def leading(self) -> Iterator[None]:
        """On rank 0, end the work on all ranks if the block fails, before what they have written is removed."""
        try:
            yield
        except BaseException as error:
            if self.job is not None and self.is_first:
                self.job.end(error)
            raise

    @contextmanager
    def working(self, stop: Stop, on_progress: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
        """Yield what counts the bytes that this rank moves, while the block stops when the work ends elsewhere."""
        if self.job is None:
            yield on_progress
            return
        self.job.attach(stop)
        if self.is_first:
            self.job.on_progress = on_progress
        with heeding(self.job):
            yield on_progress if self.is_first else self.job.count
