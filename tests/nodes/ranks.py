"""Several ranks of one merge, each a forked child of a server, so that a trial takes little more than the merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from faults.driver import Request, Server

SILENT_S = 1.0
"""A limit for tests in which a rank dies: the others speak many times meanwhile, even on a slow machine."""


class Ranks:
    """Asks the server for several at once."""

    def __init__(self) -> None:
        self.server = Server()

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
            requests.append(replace(request, **(faults or {}).get(rank, {})))
        return self.server.run_all({"LLMTAILOR_TIMEOUT": str(limit_s), "MASTER_ADDR": "localhost"}, requests)
