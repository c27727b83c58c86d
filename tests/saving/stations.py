"""Two ranks that take themselves for nodes: their saves are not copied at first, but when they start again."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from llmtailor.saving import tiers
from saving.loop import Loop


def main(folder: Path) -> None:
    node = os.environ["GROUP_RANK"] = os.environ["RANK"]
    dist.init_process_group("gloo")
    run, staging, put = folder / "run", folder / f"node-{node}", tiers.SharedFolder.put
    tiers.SharedFolder.put = lambda *_: 1 / 0  # type: ignore[assignment]
    loop = Loop(run, policy="full", staging_dir=staging, write_timeout=1).start()
    for _ in range(3):
        loop.train()
        loop.save().wait(60)
    loop.saver.close()
    dist.barrier()
    assert not [*run.glob("partial/*/manifest.json")]
    assert len([*staging.glob("partial/*/manifest.json")]) == 3
    tiers.SharedFolder.put = put  # type: ignore[method-assign]
    again = Loop(run, policy="full", staging_dir=staging).start(3)
    assert again.saver.ledger.step == 3
    again.saver.close()
    dist.destroy_process_group()
