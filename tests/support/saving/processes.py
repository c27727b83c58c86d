"""What tests do in processes of their own: saves that are killed, cut off or disagreed on, and jobs started again.

``start_ranks("saving.processes", [NAME, FOLDER], ...)`` calls the function of that name. It forks, so that one import
serves all.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from helpers.commands import call
from llmtailor.background import process_exit, tiers
from llmtailor.codes import Code
from llmtailor.copying import streams
from llmtailor.errors import PathIn, TailorError, UnsafePickle, UsageError
from llmtailor.ranks.team import Ranks
from llmtailor.saving import PartialSaving, newest_checkpoint
from saving.loop import Loop, check_states, fold, manifests, rounded
from trainings.alone import Alone
from trainings.spec import Spec
from trainings.trainer import deepspeed_config

write_all = streams.write_all


def forked(work: Callable[[], object]) -> int:
    """Do something in a child, which then ends as the interpreter does after a script; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        work()
    except Exception:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- memory ----------------------------------------------------------------------------------------------------------


def resident(folder: Path) -> None:
    """How much a process grows during a save in the background"""

    def read(key: str) -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status[key].split()[0]) << 10

    run = Loop(folder / "run", hidden=1024, layers=2, policy="full", host_buffer=8 << 20).start()
    run.train(2)
    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    num_bytes = run.save().wait().num_bytes  # type: ignore[union-attr]
    (folder / "found.json").write_text(json.dumps([num_bytes, read("VmHWM") - before]))


# --- the end of a process --------------------------------------------------------------------------------------------


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
    process_exit.GRACE_S = 1.0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = 1 if (child := os.fork()) == 0 else 0
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    loop = Loop(run, policy="full").start()
    loop.make_saves()
    if rank == 1:
        streams.write_all = lambda fd, data: os._exit(7)  # as when the kernel kills it
    loop.train()
    save = loop.save()
    assert save is not None
    if rank == 1:
        save.wait(60)
    assert ended(child) == 7 and not save.is_done


def endings(folder: Path) -> None:
    """Write the exit code of each."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")  # those who meet make a store of their own

    def work(how: str, at: Path) -> None:
        os.dup2(os.open(at / "stderr", os.O_WRONLY | os.O_CREAT), 2)
        end(how, at) if how != "die" else die(at)

    pids = {}
    for how in ("return", "raise", "wait", "die"):
        (at := folder / how).mkdir()
        pids[how] = forked(lambda how=how, at=at: work(how, at))
    while not (folder / "wait" / "saving").exists():
        time.sleep(0.01)
    os.kill(pids["wait"], signal.SIGTERM)
    (folder / "codes.json").write_text(json.dumps({how: ended(pid) for how, pid in pids.items()}))


# --- several ranks ---------------------------------------------------------------------------------------------------


def stations(folder: Path) -> None:
    """Two ranks that take themselves for nodes: their saves are not copied at first, but when they start again."""
    node = os.environ["GROUP_RANK"] = os.environ["RANK"]
    dist.init_process_group("gloo")
    run, staging, put = folder / "run", folder / f"node-{node}", tiers.SharedFolder.put
    tiers.SharedFolder.put = lambda *_: 1 / 0  # type: ignore[assignment]
    loop = Loop(run, policy="full", staging_dir=staging, write_timeout=1).start()
    loop.make_saves(3)
    loop.saver.close()
    dist.barrier()
    assert not manifests([run])
    assert len(manifests([staging])) == 3
    tiers.SharedFolder.put = put  # type: ignore[method-assign]
    again = Loop(run, policy="full", staging_dir=staging).start(3)
    assert again.saver.ledger.step == 3
    again.saver.close()
    dist.destroy_process_group()


def disagreeing(folder: Path) -> None:
    """Ranks with different environments; and what each of them learns of another one's error."""
    rank = int(os.environ["RANK"])
    os.environ["LLMTAILOR_SAVE_STEPS"] = str(2 + rank)
    run = Alone(folder / "run", callbacks=(PartialSaving("full"),))
    found: dict[str, Any] = {}
    try:
        run.train()
    except UsageError as error:
        found["options"] = str(error)

    def refuse() -> None:
        if rank == 1:
            place = PathIn("run/checkpoint-4", "model.safetensors")
            raise UnsafePickle.at(place, "it is odd", "use another one", Code.STATE_DTYPE)

    def facts(work: Callable[[], object]) -> list[Any]:
        """The class of an error, and code, path and ranks of each of its problems"""
        try:
            work()
        except TailorError as error:
            return [type(error).__name__, [[one.code.value, one.path, one.ranks] for one in error.problems]]
        raise AssertionError("no error")

    found["of rank 1"] = facts(lambda: Ranks.here().run_on_all(refuse))
    damaged = folder / "damaged" / "partial" / "step-00000004"
    damaged.mkdir(parents=True, exist_ok=True)
    (damaged / "manifest.json").write_text("{")
    found["newest"] = facts(lambda: newest_checkpoint(folder / "damaged"))
    (folder / f"told-{rank}").write_text(json.dumps(found))


# --- kills while a training saves in the background ------------------------------------------------------------------

STEPS, LIVES = 40, 3
LONGEST_LIFE = 12
"""Saves that a training makes at most before it is killed; 2 at least, so that one of them is published"""
LATEST_S = 0.05
"""Seconds that it lives on at most"""


def train_and_save(run: Path, node: Path, seed: int, begin: int) -> None:
    """Train to a step; save at each step from there on, on a disk of the node first, until killed."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    policy = chance.choice(["parity", "full", "round_robin:3", "rounded"])
    keep, in_flight = chance.choice([None, 2]), chance.choice([1, 3])
    how = {"policy": policy, "staging_dir": node, "keep_composable": keep, "in_flight": in_flight}
    loop = Loop(run, host_buffer=1 << 20, **how)
    loop.train(begin)
    loop.saver.start(begin)
    with (run / "made").open("ab", 0) as made:  # a byte for each save that has begun
        while loop.step < STEPS - 1:
            loop.train()
            loop.save()
            made.write(b".")
    time.sleep(60)


def write_truth(folder: Path) -> None:
    torch.set_num_threads(1)
    loop = Loop(folder / "unused", background=False)
    for _ in range(STEPS):
        loop.train()
    torch.save(loop.truth, folder / "truth.pt")


def check_newest(run: Path, node: Path, out: Path, truth: Any) -> int:
    """Compose the newest state, and compare it with the truth; return its step, 0 if nothing was published yet."""
    published = manifests([run, node])
    if not published:
        return 0
    also = ["--also", node] if (node / "partial").is_dir() else []
    shutil.rmtree(out, ignore_errors=True)
    done = call("merge", "--run", run, *also, out, "--json")
    assert json.loads(done.stdout)["global_step"] == max(published)
    are_rounded = {step for step, manifest in published.items() if manifest["policy"]["name"] == "rounded"}
    saved = {step: rounded(truth[step]) if step in are_rounded else truth[step] for step in published}
    check_states(out, fold(saved, published))
    return max(published)


def kills(folder: Path) -> None:
    """Kill trainings at random moments: while states are copied, written, published or copied to the run's folder.

    After each kill the newest published save must be composed, and the training continues from there. The folder's name
    says how many kills, and from which seed: ``3-1``.
    """
    count, seed = map(int, folder.name.split("-"))
    chance = random.Random(seed)
    assert ended(forked(lambda: write_truth(folder))) == 0
    truth, steps = torch.load(folder / "truth.pt"), []
    while len(steps) < count:
        run, node = folder / "run", folder / "node"
        for one in (run, node):
            shutil.rmtree(one, ignore_errors=True)
        begin = 0
        for _ in range(LIVES):
            (run / "made").unlink(missing_ok=True)
            life, saves = chance.randrange(1 << 30), min(chance.randint(2, LONGEST_LIFE), STEPS - 1 - begin)
            pid = forked(lambda life=life, begin=begin, run=run, node=node: train_and_save(run, node, life, begin))
            while not (run / "made").exists() or (run / "made").stat().st_size < saves:
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"the training has ended: {folder}, life {life}"
                time.sleep(0.001)
            time.sleep(chance.random() * LATEST_S)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            steps.append(begin := check_newest(run, node, folder / "out", truth))
            if begin >= STEPS - 2:
                break
    (folder / "steps.json").write_text(json.dumps(steps))


# --- jobs that are killed and started again by somebody who never looks ----------------------------------------------

JOB_STEPS, KILLED_AT = 6, (3, 5)
ATTACHED = {"policy": "full", "save_steps": 2, "on_restart": "compose"}


class Killed(TrainerCallback):
    """Kills the process at a step, once the save before it is published."""

    def __init__(self, step: int, saver: Any) -> None:
        self.step, self.saver = step, saver

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.saver().finish()
            if dist.is_initialized():
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def train_job(folder: Path, kill_at: int | None, attached: dict[str, Any] | None) -> None:
    torch.set_num_threads(1)
    more: dict[str, Any] = {}
    if folder.name == "zero3":
        more["deepspeed"] = deepspeed_config(Spec(name="zero3", dtype="fp32"))
    run = Alone(folder / ("run" if attached else "straight"), attached, max_steps=JOB_STEPS, dropout=0.1, **more)
    run.trainer.remove_callback(run.truth)  # it does not know DeepSpeed
    if kill_at is not None:
        run.trainer.add_callback(Killed(kill_at, lambda: run.callback.saver))
    run.trainer.train()
    if run.trainer.args.process_index == 0:
        (folder / ("resumed.json" if attached else "straight.json")).write_text(json.dumps(run.log))


def serve_store(path: Path) -> dist.TCPStore | None:
    """Make a store for the ranks of one attempt, as torchrun does, and tell the other ranks its port."""
    store = None
    if os.environ["RANK"] == "0":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "rank 0 made no store"
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = path.read_text()
    return store


def restarts(folder: Path) -> None:
    """``on_restart="compose"``: each attempt is a process with the same arguments, as a scheduler would start it.

    The folder's name says what trains: ``plain``, or ``zero3`` on two ranks.
    """
    attempts = [(None, None), *((step, ATTACHED) for step in KILLED_AT), (None, ATTACHED)]
    codes = []
    for number, attempt in enumerate(attempts):
        store = serve_store(folder / f"port-{number}")
        codes.append(ended(forked(lambda attempt=attempt: train_job(folder, *attempt))))
        del store
    assert codes == [0, *[-signal.SIGKILL] * len(KILLED_AT), 0], codes


def main(name: Path, folder: Path) -> None:
    works = {one.__name__: one for one in (resident, endings, stations, disagreeing, kills, restarts)}
    works[str(name)](folder)
