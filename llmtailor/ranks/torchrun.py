"""The ranks that torchrun has started for one command: how they come together, and end together."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

from llmtailor.errors import TailorError, Unanswered, UsageError
from llmtailor.ranks.errors import as_error
from llmtailor.ranks.team import Ranks, of_this_start
from llmtailor.ranks.watch import Watch
from llmtailor.timing import time_limit

WATCHED_LIMIT_S = 180.0
"""Seconds without an answer after which a rank counts as hanging while the ranks watch each other, see `ranks.watch`"""
COLLECTIVE_LIMIT_S = 1800.0
"""The same for the collectives in between: one rank may take much longer to plan or to read back"""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """Yield the ranks that torchrun has started this command on; a context manager around all that they do together.

    An error that all ranks raise is reported by rank 0, that of a lost rank by the first of those that are left: it is
    `TailorError.is_reported` on the others. Raises UsageError if torchrun has not started this process, and Unanswered
    if the ranks do not come together.
    """
    rank, world_size = find_rank(os.environ)
    if world_size == 1:
        yield Ranks()
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost rank is a warning with a stack trace
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    limit_s = time_limit(WATCHED_LIMIT_S)
    try:
        timeout = timedelta(seconds=max(COLLECTIVE_LIMIT_S, limit_s))
        store = of_this_start(next(rendezvous("env://", timeout=timeout))[0])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        watch = Watch(rank, world_size, Ranks(rank, world_size).store(), limit_s)
    except (RuntimeError, ValueError) as error:
        what, fix = f"the ranks did not find each other: {error!s:.300}", "see torchrun's report, then start all again"
        raise Unanswered.at(f"rank {rank}", what, fix) from error
    try:
        ranks = Ranks(rank, world_size, watch)
        yield ranks
        with suppress(RuntimeError):  # all is done
            ranks.final_barrier()
    except TailorError as error:
        error.is_reported = rank != watch.reporter
        raise
    except KeyboardInterrupt:
        interrupted = as_error(KeyboardInterrupt())
        interrupted.is_reported = rank != watch.reporter
        raise interrupted from None
    finally:
        dist.destroy_process_group()


def find_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank and the number of ranks. Raises UsageError if torchrun has not started this process."""
    numbers = [environment.get(name, "") for name in _VARIABLES[:2]]
    rank, world_size = (int(text) if text.isdecimal() else -1 for text in numbers)
    if missing := [name for name in _VARIABLES if not environment.get(name)]:
        what = f"torchrun has not started this process: {', '.join(missing)} not set"
    elif not 0 <= rank < world_size:
        what = f"RANK={numbers[0]!r:.40} and WORLD_SIZE={numbers[1]!r:.40} contradict each other"
    else:
        return rank, world_size
    words = shlex.join(sys.argv[1:])
    fix = f"torchrun --nproc_per_node 4 -m llmtailor {words}; on Slurm: srun torchrun ...; or omit --distributed"
    raise UsageError.at("--distributed", what, fix)
