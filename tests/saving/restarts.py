"""Trainings that are killed and started again by somebody who never looks: ``on_restart="compose"``.

Each attempt is a forked process with the same arguments, as a scheduler would start it. The folder's name says what
trains: ``plain``, or ``zero3`` on two ranks.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from trainings.alone import Alone
from trainings.spec import Spec
from trainings.trainer import deepspeed_config

STEPS, KILLS = 8, (3, 6)
ATTACHED = {"policy": "full", "save_steps": 2, "on_restart": "compose"}


class Killed(TrainerCallback):
    """Kills the process at a step, once the save before it is published."""

    def __init__(self, step: int, saver: Any) -> None:
        self.step, self.saver = step, saver

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.saver().finish()
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kill_at: int | None, attached: dict[str, Any] | None) -> None:
    torch.set_num_threads(1)
    more: dict[str, Any] = {}
    if folder.name == "zero3":
        more["deepspeed"] = deepspeed_config(Spec(name="zero3", dtype="fp32"))
    run = Alone(folder / ("run" if attached else "straight"), attached, max_steps=STEPS, dropout=0.1, **more)
    run.trainer.remove_callback(run.truth)  # it does not know DeepSpeed
    if kill_at is not None:
        run.trainer.add_callback(Killed(kill_at, lambda: run.callback.saver))
    run.trainer.train()
    if run.trainer.args.process_index == 0:
        (folder / ("resumed.json" if attached else "straight.json")).write_text(json.dumps(run.log))


def serve_store(path: Path) -> torch.distributed.TCPStore | None:
    """Make a store for the ranks of one attempt, as torchrun does, and tell the other ranks its port."""
    store = None
    if os.environ["RANK"] == "0":
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "rank 0 made no store"
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = path.read_text()
    return store


def forked(attempt: int, folder: Path, kill_at: int | None, attached: dict[str, Any] | None) -> int:
    """Return the exit code of a training in a process of its own, negative for a signal."""
    store = serve_store(folder / f"port-{attempt}")  # lives as long as this function
    if (pid := os.fork()) == 0:
        code = 1
        try:
            train(folder, kill_at, attached)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    del store
    return code


def main(folder: Path) -> None:
    attempts = [(None, None), *((step, ATTACHED) for step in KILLS), (None, ATTACHED)]
    codes = [forked(number, folder, *attempt) for number, attempt in enumerate(attempts)]
    assert codes == [0, *[-signal.SIGKILL] * len(KILLS), 0], codes
