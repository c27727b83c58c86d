"""Processes that end while they save in the background, each in its way; forked, so that one import serves all."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from llmtailor.engine import streams
from llmtailor.saving import save as shutdown
from saving.loop import Loop

write_all = streams.write_all


def slowly(fd: int, data: bytes | memoryview) -> None:
    time.sleep(0.2)
    write_all(fd, data)


def end(how: str, run: Path) -> None:
    """Save, and end: by returning, by an exception, or by waiting for SIGTERM."""
    streams.write_all = slowly
    loop = Loop(run, policy="full").start()
    loop.train()
    loop.save()
    (run / "saving").touch()
    if how == "raise":
        raise RuntimeError("out of memory")
    if how == "wait":
        time.sleep(60)


def die(run: Path) -> None:
    """Two ranks, of which one dies in the middle of a write."""
    shutdown.GRACE_S = 1.0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = 1 if (child := os.fork()) == 0 else 0
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    loop = Loop(run, policy="full").start()
    loop.train()
    loop.save().wait(60)
    if rank == 1:
        streams.write_all = lambda fd, data: os._exit(7)  # as when the kernel kills it
    loop.train()
    save = loop.save()
    if rank == 1:
        save.wait(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and not save.is_done


def run(work: Callable[[], None]) -> NoReturn:
    """Do something, and end as the interpreter does after a script."""
    code = 0
    try:
        work()
    except Exception:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError


def main(folder: Path) -> None:
    """Write the exit code of each."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")  # those who meet make a store of their own
    pids = {}
    for how in ("return", "raise", "wait", "die"):
        (at := folder / how).mkdir()
        if (pid := os.fork()) == 0:
            os.dup2(os.open(at / "stderr", os.O_WRONLY | os.O_CREAT), 2)
            run(lambda how=how, at=at: end(how, at) if how != "die" else die(at))
        pids[how] = pid
    while not (folder / "wait" / "saving").exists():
        time.sleep(0.01)
    os.kill(pids["wait"], signal.SIGTERM)
    codes = {how: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for how, pid in pids.items()}
    (folder / "codes.json").write_text(json.dumps(codes))
