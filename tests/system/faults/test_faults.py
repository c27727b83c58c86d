"""Whatever fails while a merge writes: its output is absent or complete, and the same command then succeeds.

With --all, every operation of every command fails in every way.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from faults.powercut import Disk, File, read_tree
from faults.scene import COMMANDS, Scene
from faults.trials import ERRORS, errors, large_scene, power, races, steps
from helpers.cases import diagonal
from helpers.places import ROOT
from llmtailor.copying.staging import JOURNAL

COMMANDS_TO_TRY = sorted(COMMANDS)
SOME_ERRORS = [fault for fault in ERRORS if fault["fault"] in ("ENOSPC", "SIGTERM") or fault == {"fault": "EIO"}]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    made: dict[str, Scene] = {}

    def get(kind: str) -> Scene:
        if kind not in made:
            made[kind] = Scene(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return get


def some(count: int, *, ends: int = 2):
    """Choose some all over, one late, and the last ones, where the output is published."""

    def points(total: int) -> set[int]:
        spread = (1 + total * number // (count + 1) for number in range(count))
        return {total * 2 // 3, *spread, *range(total + 1 - ends, total + 1)}

    return points


@pytest.mark.parametrize(("kind", "no_exchange"), [("merge", False), ("force", False), ("force", True)])
def test_killed_at_any_operation(scenes, kind, no_exchange):
    all_over = kind == "merge"  # until the output is published, all do the same
    counts = steps(scenes(kind), some(2 if all_over else 0, ends=6 if no_exchange else 4), no_exchange=no_exchange)
    assert any(outcome.endswith("went on") for outcome in counts)


def every(total: int) -> range:
    return range(1, total + 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("no_exchange", [False, True])
@pytest.mark.parametrize("kind", COMMANDS_TO_TRY)
def test_killed_and_without_power_at_every_operation(scenes, kind, no_exchange):
    assert steps(scenes(kind), every, no_exchange=no_exchange)
    assert power(scenes(kind), every, no_exchange=no_exchange)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", COMMANDS_TO_TRY)
@pytest.mark.parametrize("fault", ERRORS, ids=lambda fault: "-".join(map(str, fault.values())))
def test_every_operation_fails(scenes, kind, fault):
    assert errors(scenes(kind), every, fault)


@pytest.mark.parametrize("fault", SOME_ERRORS, ids=lambda fault: "-".join(map(str, fault.values())))
def test_an_operation_fails(scenes, fault):
    counts = errors(scenes("merge"), some(1), fault)
    assert any(outcome.endswith("went on") for outcome in counts)


@pytest.mark.parametrize(("fault", "kind"), diagonal(["short", "EINTR"], COMMANDS_TO_TRY))
def test_calls_that_do_less_than_was_asked_are_no_fault(scenes, kind, fault):
    scene = scenes(kind)
    assert scene.run(fault=fault) == 0, scene.said.read_text()
    assert scene.state() == "complete"
    scene.reset()


@pytest.mark.parametrize(("no_exchange", "kind"), [(False, "merge"), (True, "force")])
def test_the_power_is_cut(scenes, kind, no_exchange):
    counts = power(scenes(kind), some(1, ends=9), no_exchange=no_exchange)
    assert len({outcome.split(":")[0] for outcome in counts}) == 3


@pytest.mark.parametrize(("no_exchange", "kind"), diagonal([False, True], COMMANDS_TO_TRY))
def test_everything_is_durable_before_the_rename_and_the_rename_afterwards(scenes, kind, no_exchange):
    """Every file and folder of the output, and before that all that the journal vouches for, and each of its lines."""
    scene = scenes(kind)
    disk = Disk(scene.root, read_tree(scene.root, (scene.out.name,)))
    assert scene.run(fault="trace", no_exchange=no_exchange) == 0
    shown, journaled = [], 0
    for event in scene.recorded():
        if event[0] == "rename" and event[2] == str(scene.out):
            assert disk.at(event[1]).lasts()
            shown.append(disk.at(event[1]))
        if event[0] == "write" and event[3].startswith(b'\n{"path"'):
            journaled += 1
            own = disk.at(str(scene.staging / JOURNAL))
            assert isinstance(own, File) and own.lasts()  # the lines before this one
            mark = json.loads(event[3])
            file = disk.at(str(scene.staging / "out" / mark["path"]))
            assert isinstance(file, File)
            assert int(mark["crc32"], 16) == zlib.crc32(file.durable[: mark["num_bytes"]])
            assert len(file.durable) >= mark["num_bytes"]
        disk.apply(event)
        if shown and event[0] in ("truncate", "unlink"):  # the way back is given up only when there is no need for one
            assert disk.folder.durable["out"] is shown[0]
    assert len(shown) == 1
    assert journaled > 15
    assert disk.folder.durable["out"] is shown[0]
    scene.reset()


def test_the_trace_misses_nothing(scenes, tmp_path):
    """What strace sees of a merge is what the wrapped functions have seen."""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-f", "true"], capture_output=True).returncode:
        pytest.skip("strace is not installed, or may not trace here")
    scene = scenes("merge")
    log = tmp_path / "log"
    calls = "trace=/^(open|creat|write|pwrite|fsync|fdatasync|rename)"
    command = [strace, "-f", "-y", "-qq", "-e", calls, "-o", str(log)]
    run = [sys.executable, "-m", "llmtailor", *COMMANDS["merge"]]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([*command, *run], cwd=scene.root, check=True, capture_output=True, env=environment)
    scene.reset()
    assert scene.run(fault="trace") == 0
    trace = scene.recorded()
    scene.reset()

    last: dict[str, dict[str, int]] = {"write": {}, "fsync": {}}
    made, published = set(), 0
    for number, line in enumerate(log.read_text().splitlines()):
        if call := re.search(r'openat\(.*"(.*)", \S*O_CREAT', line):
            made.add(call[1])
        elif call := re.search(r"(write|fsync|fdatasync)\(\d+<(.*?)>", line):
            last["write" if call[1] == "write" else "fsync"][call[2]] = number
        elif call := re.search(r'renameat2\(.*"(.*)", RENAME', line):
            assert call[1] == str(scene.out)
            published = number
    assert made == {event[1] for event in trace if event[0] == "create"}
    written = {path for path in last["write"] if path.startswith(str(scene.staging / "out"))}
    assert len(written) == len(scene.wanted)
    folders = {str(Path(path).parent) for path in written}
    assert all(last["write"][path] < last["fsync"][path] < published for path in written)
    assert all(last["fsync"][folder] < published for folder in folders)
    assert last["fsync"][str(scene.root)] > published > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", COMMANDS_TO_TRY)
def test_of_several_processes_at_once_one_writes(tmp_path, kind):
    """Also where one was killed before."""
    assert races(large_scene(tmp_path, kind, 64), 5, 4, random.Random(0))
