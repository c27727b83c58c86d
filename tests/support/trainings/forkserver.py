"""A process that has imported torch, transformers and DeepSpeed, and forks the ranks of one training after another.

Importing them takes ten seconds of CPU time for each rank; a tiny training takes one. What a rank finds is what
torchrun would give it, but for one thing: all ranks share the server's hash seed.

The server says ``null`` when it is ready. Each line of standard input is an order, a JSON object: ``module``, which has
a function ``main``; ``arguments``, paths to call it with; ``environments``, one for each rank; ``folder`` to work in;
``log`` for what the ranks print; ``timeout_s``. Each line of standard output answers one: null, or the rank that failed
first and its exit code; rank -1 if they hung.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

PR_SET_PDEATHSIG = 1


LATE = (
    *(f"deepspeed.runtime.zero.{name}" for name in ("muon.original_muon", "stage3", "stage_1_and_2")),
    *("deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload", "torch.utils.serialization"),
)
"""The first asks torch for its compiler, which takes some seconds to import."""


MIN_HOST_BUFFER = 4 << 20
"""Of a saver, in bytes; else each fills 64 MiB with zeros"""


def warm_up() -> None:
    """Import what trainings import, also what they import late."""
    gc.disable()
    import deepspeed
    import peft
    import torch
    import transformers

    from llmtailor.background import arena
    from llmtailor.storage import rounding
    from trainings.models import CONFIGS, build

    arena.LEAST_BUFFER = MIN_HOST_BUFFER
    rounding.loops()  # numba takes a second to import, and a saver rounds with it in each rank
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute; gloo will do
    assert peft.LoraConfig and transformers.Trainer and transformers.default_data_collator
    for name in LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    torch.set_printoptions(threshold=0, edgeitems=0)  # DeepSpeed formats tensors all the time, to print none of them
    for arch in CONFIGS:
        model = build(arch, 1, tied=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the first call in a process compiles the names of all models, for a second
    gc.freeze()
    gc.enable()


def serve(replies: TextIO) -> None:
    print("null", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(start(json.loads(line))), file=replies, flush=True)


def start(order: dict[str, Any]) -> tuple[int, int] | None:
    """Fork the ranks and wait for all of them; when one fails, or they take too long, kill the others.

    They find the module imported already.
    """
    with suppress(Exception):  # else the ranks say what is wrong
        importlib.import_module(order["module"])
        gc.freeze()
    ranks: dict[int, int] = {}
    for rank, environment in enumerate(order["environments"]):
        pid = os.fork()
        if not pid:
            become_rank(order, environment)
        ranks[pid] = rank
    failed = None
    signal.setitimer(signal.ITIMER_REAL, order["timeout_s"])
    while ranks:
        try:
            pid, status = os.wait()
        except TimeoutError:
            pid, status = -1, 0
            failed = (-1, 0)
        rank, code = ranks.pop(pid, -1), os.waitstatus_to_exitcode(status)
        if code and failed is None:
            failed = (rank, code)
        if failed:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return failed


def time_is_up(*_: object) -> NoReturn:
    raise TimeoutError


def become_rank(order: dict[str, Any], environment: dict[str, str]) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, number)
        os.environ.update(environment)
        os.chdir(order["folder"])
        importlib.import_module(order["module"]).main(*map(Path, order["arguments"]))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no teardown: a gloo thread that wakes up in it aborts the process now and then


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGALRM, time_is_up)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm_up()
    serve(answers)
