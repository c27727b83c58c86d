"""Several ranks of one merge, each a forked child of a server, so that a trial takes little more than the merge.

python ranks.py          reads a list of requests per line (JSON), one per rank, answers with a list of exit codes
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults.driver import Request, load, run  # noqa: E402


def serve() -> None:
    load()
    for line in sys.stdin:
        environment, requests = json.loads(line)
        ranks = {}
        for rank, request in enumerate(requests):
            child = os.fork()
            if child == 0:
                os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(len(requests)))
                run(Request(**request))
            ranks[child] = rank
        codes = dict.fromkeys(range(len(requests)), 0)
        stopped = {}
        while len(ranks) > len(stopped):
            child, status = os.waitpid(-1, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                stopped[child] = ranks[child]
            else:
                codes[ranks.pop(child)] = os.waitstatus_to_exitcode(status)
        for child, rank in stopped.items():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            codes[rank] = -signal.SIGSTOP
        print(json.dumps([codes[rank] for rank in range(len(requests))]), flush=True)


class Ranks:
    """The other end: starts the server and asks it."""

    def __enter__(self) -> Ranks:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def run(
        self,
        root: Path,
        command: Sequence[str],
        world_size: int,
        faults: dict[int, dict[str, object]] | None = None,
        *,
        others: dict[int, Sequence[str]] | None = None,
        limit_s: float = 60.0,
    ) -> list[int]:
        """Run a command on all ranks; return their exit codes: -9 if killed, -19 if stopped for good.

        ``faults`` are of `faults.driver.Request`, by rank, and ``others`` commands of ranks that differ. What rank N
        says is in ``said-N``, and what it has counted in ``record-N``.
        """
        requests = []
        for rank in range(world_size):
            words = [*(others or {}).get(rank, command)]
            request = Request(words, str(root), said=str(root / f"said-{rank}"), record=str(root / f"record-{rank}"))
            requests.append(asdict(replace(request, **(faults or {}).get(rank, {}))))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        environment = {"LLMTAILOR_TIMEOUT": str(limit_s), "MASTER_ADDR": "localhost"}
        self.process.stdin.write(json.dumps([environment, requests]) + "\n")
        self.process.stdin.flush()
        codes: list[int] = json.loads(self.process.stdout.readline())
        return codes


if __name__ == "__main__":
    serve()
