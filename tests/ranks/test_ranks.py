"""Ranks that share a merge write what one process writes, and whatever happens to one of them ends it on all."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from faults.driver import Request, ask
from faults.scene import RECIPE, Scene, contents
from helpers.commands import call, run_here
from helpers.places import ROOT, SUPPORT
from llmtailor.copying.staging import acquire, lock_of
from llmtailor.storage.local import Lock, LockHeld

MERGE = ["merge", "recipe.yaml", "out", "--quiet", "--distributed"]
MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
DEAD = -signal.SIGKILL
SILENT_S = 4.0
"""A limit for tests in which a rank hangs: the others look many times meanwhile, even on a slow machine."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("run"), "merge")


@pytest.fixture(autouse=True)
def begin(scene):
    scene.reset()


def run(scene, command, world_size, faults=None, *, others=None, limit_s=60.0) -> list[int]:
    """Run a command on all ranks; return their exit codes: -9 if killed, -19 if stopped for good.

    ``faults`` are of `faults.driver.Request`, by rank, and ``others`` commands of ranks that differ. What rank N says
    is in ``said-N``, and what it has counted in ``record-N``.
    """
    requests = []
    for rank in range(world_size):
        told = {name: str(scene.root / f"{name}-{rank}") for name in ("said", "record")}
        request = Request([*(others or {}).get(rank, command)], str(scene.root), **told)
        requests.append(replace(request, **(faults or {}).get(rank, {})))
    return ask({"LLMTAILOR_TIMEOUT": str(limit_s)}, requests)


def said(scene: Scene, rank: int = 0) -> str:
    """Return what a rank printed, without torch's warnings: it was imported before a command sets its log level."""
    lines = (scene.root / f"said-{rank}").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"(\[rank\d+\]:)?\[W\d+ ", line))


def nothing_is_left(scene: Scene) -> bool:
    return not scene.staging.exists()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_output_is_the_same(scene, world_size):
    assert run(scene, MERGE, world_size) == [0] * world_size
    assert scene.state() == "complete"
    assert nothing_is_left(scene)
    assert f"wrote {Path('out')}" in said(scene)
    assert not any(said(scene, rank) for rank in range(1, world_size))


def test_convert_with_checksums_and_an_old_output(scene):
    command = ["convert", "checkpoint-200", "out", "--num-gpu", "3", "--checksum", "--quiet"]
    assert run(scene, command, 1) == [0]
    wanted = contents(scene.out)
    assert run(scene, [*command, "--distributed", "--force"], 3) == [0] * 3
    assert contents(scene.out) == wanted
    assert nothing_is_left(scene)


def test_a_source_whose_checksum_is_wrong(scene):
    """Whichever rank reads the file again says so."""
    damaged = next(scene.root.glob("checkpoint-100/global_step*/*rank_1*optim_states.pt"))
    data, at = damaged.read_bytes(), damaged.stat()
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    try:
        damaged.write_bytes(changed)
        os.utime(damaged, ns=(at.st_atime_ns, at.st_mtime_ns))
        assert run(scene, [*MERGE, "--checksum"], 3) == [4, 4, 4]
        assert "does not match its checksum" in said(scene)
    finally:
        damaged.write_bytes(data)
        os.utime(damaged, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert nothing_is_left(scene)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_one_is_killed_while_sources_are_read_again(scene, rank):
    command, fault = [*MERGE, "--checksum"], {"fault": "count", "only": ("preadv", "readv")}
    assert run(scene, command, 2, {rank: fault}) == [0, 0]
    at = pickle.loads((scene.root / f"record-{rank}").read_bytes()) - 3
    scene.reset()
    codes = run(scene, command, 2, {rank: {**fault, "fault": "kill", "at": at}})
    assert (codes[rank], codes[1 - rank]) == (DEAD, 9), said(scene, 1 - rank)
    assert run(scene, command, 3) == [0, 0, 0]
    assert "resuming the merge" in said(scene)


def operations(scene: Scene, world_size: int) -> list[int]:
    """How many operations on the disk each rank does, if nothing happens."""
    faults = {rank: {"fault": "count"} for rank in range(world_size)}
    assert run(scene, MERGE, world_size, faults) == [0] * world_size
    scene.reset()
    return [pickle.loads((scene.root / f"record-{rank}").read_bytes()) for rank in range(world_size)]


def kill_one(scene: Scene, world_size: int, rank: int, at: int, next_size: int) -> str:
    """Kill a rank at an operation, and run the command again on another number of ranks."""
    codes = run(scene, MERGE, world_size, {rank: {"fault": "kill", "at": at}})
    state, others = scene.state(), {code for number, code in enumerate(codes) if number != rank}
    if codes[rank] == 0:  # it had less to do this time
        assert codes == [0] * world_size
    else:
        assert codes[rank] == DEAD, codes
        # rank 0 may go once it has published and said so
        assert others == {9} or (others == {0} and state == "complete"), (codes, said(scene))
        reports = [said(scene, number) for number in range(world_size) if number != rank]
        assert others == {0} or f"error: rank {rank}: it has died or hangs" in reports[0], reports
        assert not any(reports[1:]), reports
    if state == "complete":
        scene.reset()
        return f"rank {'0' if rank == 0 else 'N'}, complete"
    codes = run(scene, MERGE, next_size)
    assert codes == [0] * next_size, (codes, said(scene))
    assert scene.state() == "complete"
    assert nothing_is_left(scene)
    went_on = "resuming the merge" in said(scene)
    scene.reset()
    return f"rank {'0' if rank == 0 else 'N'}, {'resumed' if went_on else 'started over'}"


def test_one_is_killed(scene):
    counts = operations(scene, 3)
    outcomes = [
        kill_one(scene, 3, 0, counts[0] // 2, 2),
        kill_one(scene, 3, 0, counts[0] - 6, 4),
        kill_one(scene, 3, 1, counts[1] // 2, 1),
    ]
    assert any("resumed" in outcome for outcome in outcomes), outcomes


@pytest.mark.long
def test_kills_at_any_moment(scene):
    chance, outcomes = random.Random(7), Counter()
    counts = operations(scene, 3)
    last = [(0, at) for at in range(counts[0] - 12, counts[0] + 1)]  # where the output is published
    for trial in range(72):
        rank = trial % 3
        rank, at = last[trial // 5 % len(last)] if trial % 5 == 0 else (rank, chance.randint(1, counts[rank]))
        outcomes[kill_one(scene, 3, rank, at, chance.randint(1, 4))] += 1
    print(dict(outcomes))
    assert outcomes["rank 0, resumed"] and outcomes["rank N, resumed"], outcomes


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_one_hangs(scene, rank):
    at = operations(scene, 2)[rank] // 2
    codes = run(scene, MERGE, 2, {rank: {"fault": "SIGSTOP", "at": at}}, limit_s=SILENT_S)
    assert codes[rank] == -signal.SIGSTOP
    assert codes[1 - rank] == 9
    assert f"rank {rank}: it has died or hangs" in said(scene, 1 - rank)
    assert scene.state() == "absent"
    assert run(scene, MERGE, 3) == [0] * 3, said(scene)
    assert scene.state() == "complete"


def test_one_has_another_recipe(scene):
    (scene.root / "other.yaml").write_text(RECIPE.replace("odd", "even"))
    other = ["merge", "other.yaml", *MERGE[2:]]
    assert run(scene, MERGE, 3, others={1: other, 2: other}) == [2, 2, 2]
    assert "ranks 1-2: not the same recipe or options as on rank 0" in said(scene)
    assert not said(scene, 1)
    assert nothing_is_left(scene)


def test_one_sees_another_state_of_a_source(scene):
    copies = scene.root / "elsewhere"
    shutil.copytree(scene.root / "checkpoint-100", copies / "checkpoint-100", copy_function=shutil.copy2)
    os.utime(copies / "checkpoint-100" / "config.json")
    os.utime(next(copies.glob("checkpoint-100/global_step*/*rank_0*optim_states.pt")))
    for path in ("checkpoint-200", "recipe.yaml"):
        (copies / path).symlink_to(scene.root / path)
    program = ["merge", "recipe.yaml", "../out", *MERGE[3:]]
    codes = run(scene, MERGE, 2, {1: {"cwd": str(copies)}}, others={1: program})
    assert codes in ([4, 4], [2, 2]), said(scene)
    assert "rank 1: " in said(scene)
    assert nothing_is_left(scene)
    shutil.rmtree(copies)


def test_one_can_not_read_the_recipe(scene):
    assert run(scene, MERGE, 2, others={1: ["merge", "missing.yaml", *MERGE[2:]]}) == [3, 3]
    assert "rank 1: " in said(scene)
    assert "missing.yaml" in said(scene)
    assert nothing_is_left(scene)


def test_the_disk_is_full_for_one(scene):
    at = operations(scene, 3)[2] // 2
    full = {"fault": "ENOSPC", "at": at, "lasting": True, "only": ("write", "open", "mkdir")}
    assert run(scene, MERGE, 3, {2: full}) == [8, 8, 8]
    assert "rank 2: " in said(scene)
    assert "No space left on device" in said(scene)
    assert "then rerun the same command: it resumes with" in said(scene)
    assert scene.state() == "absent"
    assert run(scene, MERGE, 2) == [0, 0]
    assert "resuming the merge" in said(scene)
    assert scene.state() == "complete"


def test_one_is_interrupted(scene):
    at = operations(scene, 2)[1] // 2
    assert run(scene, MERGE, 2, {1: {"fault": "SIGTERM", "at": at}}) == [130, 130]
    assert "rank 1: interrupted" in said(scene)
    assert scene.run() == 0  # one process goes on with what several have written
    assert scene.state() == "complete"


def test_a_rank_of_an_earlier_merge_still_writes(scene, monkeypatch):
    """It was stopped, for instance; without its lock, two processes would write one file."""
    at = operations(scene, 2)[1] // 2
    assert run(scene, MERGE, 2, {1: {"fault": "SIGTERM", "at": at}}) == [130, 130]
    monkeypatch.setattr("llmtailor.copying.staging._LEAVING_S", 0.2)
    lock = Lock(scene.staging / "journal-1")
    lock.acquire(create=False)
    refused = run_here(*MERGE[:-1], cwd=scene.root)
    lock.release()
    assert refused.returncode == 6
    assert "rank 1 of an earlier merge is still writing this output" in refused.stderr
    resumed = call(*MERGE[:-1], cwd=scene.root)
    assert "resuming the merge" in resumed.stderr
    assert scene.state() == "complete"


def test_another_merge_into_the_same_output(scene):
    """Its ranks are refused without disturbing the one that has the output."""
    lock = lock_of(scene.out)
    acquire(lock, scene.out)
    assert run(scene, MERGE, 2) == [6, 6]
    assert "another llmtailor is writing this output" in said(scene)
    assert not said(scene, 1)
    lock.release()


def test_without_the_option_a_command_is_alone(scene):
    """A training's rank 0 may start one, and its variables are inherited."""
    call(*MERGE[:-1], cwd=scene.root, env={"RANK": "0", "WORLD_SIZE": "8", "SLURM_NTASKS": "8"})
    assert scene.state() == "complete"


def test_a_world_of_one(scene):
    call(*MERGE, cwd=scene.root, env={"RANK": "0", "WORLD_SIZE": "1", **MASTER})
    assert scene.state() == "complete"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "torchrun has not started this process"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' and WORLD_SIZE='2' contradict each other"),
    ],
)
def test_what_torchrun_has_not_started(scene, env, message):
    result = call(*MERGE, cwd=scene.root, env={**env, **(MASTER if "RANK" in env else {})}, code=2)
    assert message in result.stderr
    assert "torchrun --nproc_per_node 4 -m llmtailor merge recipe.yaml out --quiet --distributed" in result.stderr
    assert nothing_is_left(scene)


def test_a_dry_run_is_shown_once(scene):
    assert run(scene, [*MERGE, "--dry-run"], 2) == [0, 0]
    assert "dry run: nothing was written" in said(scene)
    assert not said(scene, 1)
    assert nothing_is_left(scene)


@contextmanager
def torchrun(scene, faults, *options) -> Iterator[subprocess.Popen[str]]:
    """Start the merge on as many ranks as there are faults, and end with it."""
    requests = [
        asdict(Request(MERGE, str(scene.root), said=str(scene.root / f"said-{rank}"), **fault))
        for rank, fault in enumerate(faults)
    ]
    (scene.root / "requests.json").write_text(json.dumps(requests))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(len(faults)), *options]
    words = [*launch, str(SUPPORT / "faults" / "driver.py"), str(scene.root / "requests.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    with (scene.root / "torchrun.log").open("w") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(is_true) -> None:
    for _ in range(6000):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it never was")


def has_written(scene: Scene) -> bool:
    """Return whether the journal of rank 1 records more than what the merge is."""
    journal = scene.staging / "journal-1"
    return journal.exists() and journal.read_bytes().count(b"\n{") > 1


def is_locked(path: Path) -> bool:
    lock = Lock(path)
    try:
        lock.acquire(create=False)
    except FileNotFoundError:
        return False
    except LockHeld:
        return True
    lock.release()
    return False


def test_torchrun_starts_again_what_has_died(scene):
    at = operations(scene, 2)[1] // 2
    with torchrun(scene, [{}, {"fault": "kill", "at": at}], "--max-restarts", "1") as process:
        assert process.wait(240) == 0, (scene.root / "torchrun.log").read_text()
    assert "resuming the merge" in said(scene)
    assert scene.state() == "complete"
    assert nothing_is_left(scene)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_torchrun_itself_is_ended(scene, number):
    with torchrun(scene, [{"fault": "slow"}] * 2) as process:
        wait_until(lambda: has_written(scene))
        process.send_signal(number)
        process.wait(60)
        wait_until(lambda: not is_locked(scene.staging / "journal") and not is_locked(scene.staging / "journal-1"))
    assert scene.state() == "absent"
    expected = "torchrun: it has ended" if number == signal.SIGKILL else "error: interrupted"
    wait_until(lambda: expected in said(scene))
    assert "error:" not in said(scene, 1)
    assert run(scene, MERGE, 3) == [0] * 3, said(scene)
    assert "resuming the merge" in said(scene)
    assert scene.state() == "complete"
