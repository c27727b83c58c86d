"""The pieces of work that ranks share, in one process: the board, the errors on it, and how a group ends."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.balance import deal
from llmtailor.codes import Code
from llmtailor.copying.journal import Identity, Mark, Unfinished
from llmtailor.copying.pool import Stop
from llmtailor.errors import (
    Interrupted,
    PathIn,
    Problem,
    SourceError,
    StorageError,
    TailorError,
    Unanswered,
    UsageError,
)
from llmtailor.findings import WARNING, Finding
from llmtailor.ranks import group as ranks_group
from llmtailor.ranks import store as ranks_store
from llmtailor.ranks.errors import as_error, from_json, merged, to_json
from llmtailor.ranks.group import FileBoard, RankGroup
from llmtailor.ranks.launch import RankInfo, find_rank
from llmtailor.ranks.store import KeyValueStore, LocalStore, Pulse, await_messages
from llmtailor.ranks.team import check_same

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "9"}


@pytest.mark.parametrize(
    ("environment", "rank", "world_size"),
    [
        (TORCHRUN, 3, 8),
        (SRUN, 1, 4),  # of the step, not of the job
        ({**SRUN, **TORCHRUN}, 3, 8),
        ({"RANK": "3", **SRUN}, 1, 4),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 0, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2),
    ],
)
def test_members(environment, rank, world_size):
    info = find_rank(environment)
    assert (info.rank, info.world_size) == (rank, world_size)


def test_launches():
    steps = [find_rank({**SRUN, "SLURM_STEP_ID": step, "SLURM_PROCID": rank}).launch for step in "01" for rank in "02"]
    assert steps[0] == steps[1] != steps[2] == steps[3]
    with pytest.raises(UsageError, match="no launcher"):
        find_rank({"RANK": "1", "PATH": "/bin"})


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_shares_are_disjoint_complete_and_even(sizes, hands):
    shares = deal(dict(enumerate(sizes)), hands)
    assert sorted(number for files in shares for number in files) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in files) for files in shares]
    assert len(shares) == hands
    # no rank has more than another without its smallest file
    for files, load in zip(shares, loads, strict=True):
        assert not files or load - min(sizes[number] for number in files) <= min(loads)


def test_the_first_difference_of_each_rank_is_reported():
    names = {"version": ("update", UsageError), "recipe": ("the same", UsageError), "sources": ("wait", SourceError)}
    same = {"version": 1, "recipe": "r", "sources": "s"}
    check_same([same, dict(same)], names)
    with pytest.raises(UsageError) as caught:
        check_same([same, {**same, "version": 2, "sources": "t"}, {**same, "sources": "t"}], names)
    problems = caught.value.problems
    assert [(one.where, one.what, one.fix) for one in problems] == [
        ("rank 1", "not the same version as on rank 0", "update"),
        ("rank 2", "not the same sources as on rank 0", "wait"),
    ]
    other = {**same, "sources": "t"}
    with pytest.raises(SourceError, match="ranks 1, 3: not the same sources"):
        check_same([same, other, same, other], names)


@pytest.fixture(params=["files", "torch", "alone"])
def board(request, tmp_path):
    if request.param == "files":
        return FileBoard(tmp_path)
    if request.param == "alone":
        return KeyValueStore(LocalStore())
    import torch

    return KeyValueStore(torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))


def test_messages(board):
    assert board.get("a") is None
    board.set("a", {"stage": "failed", "texts": ["x" * 9000]})
    assert board.get("a") == [{"stage": "failed", "texts": ["x" * 9000]}]
    board.set("a", [1, None])
    assert board.get("a") == [[1, None]]
    assert board.get("a", "b") is None
    threading.Timer(0.1, board.set, ("b", 2)).start()
    assert await_messages(board, ["a", "b"], lambda: None) == [[1, None], 2]
    board.remove("a", "never")
    assert board.get("a") is None
    with pytest.raises(ZeroDivisionError):
        await_messages(board, ["a"], lambda: 1 / 0)


def test_a_message_in_a_file_is_complete_or_not_there(tmp_path):
    board = FileBoard(tmp_path)
    board.set("3", {"stage": "ended"})
    data = bytearray((tmp_path / "3").read_bytes())
    data[20] ^= 1
    (tmp_path / "3").write_bytes(data)
    assert board.get("3") is None
    with pytest.raises(FileNotFoundError):
        FileBoard(tmp_path / "gone").get("0")


def test_a_sign_of_life_is_seen_once(monkeypatch):
    monkeypatch.setattr(ranks_store, "PULSE_S", -1.0)
    store = KeyValueStore(LocalStore())
    mine, others = Pulse(store, "alive"), Pulse(store, "alive")
    assert not mine.is_new()
    others.beat()
    assert mine.is_new()
    assert not mine.is_new()


def kinds(kind: type[TailorError] = TailorError) -> list[type[TailorError]]:
    return [kind, *(one for below in kind.__subclasses__() for one in kinds(below))]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_no_fact_of_an_error_is_lost_between_ranks(kind):
    place = PathIn("run/checkpoint-4", "model.safetensors")
    error = kind(
        [
            Problem(place, "it is damaged", "copy it", Code.STATE_DTYPE, ranks=(1, 2)),
            Finding(place, "it is odd", "look", Code.TIED, WARNING, ("a", "b")),
            Problem("--flag", "it is wrong"),
        ]
    )
    error.came_late = True
    found = from_json(json.loads(json.dumps(to_json(error))))
    assert type(found) is kind
    assert found.problems == error.problems
    assert [type(one) for one in found.problems] == [Problem, Finding, Problem]
    assert [one.path for one in found.problems] == ["model.safetensors", "model.safetensors", None]
    assert isinstance(found.problems[0].where, PathIn) and found.problems[0].where.checkpoint == "run/checkpoint-4"
    assert found.came_late and str(found) == str(error)


def test_an_error_of_a_class_that_this_rank_does_not_know_has_its_exit_code():
    content = {**to_json(SourceError.at("x", "y", "z")), "class": "OfTomorrow"}
    assert type(from_json(content)) is SourceError


def test_a_brief_error_fits_a_full_disk():
    error = SourceError(Problem(f"{number}", "w" * 9000, "f") for number in range(99))
    found = from_json(to_json(error, brief=True))
    assert len(json.dumps(to_json(error, brief=True))) < 4000
    assert [one.where for one in found.problems] == ["0", "1"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyboardInterrupt(), Interrupted),
        (OSError(28, "No space left on device", "disk"), StorageError),
        (KeyError("x"), TailorError),
        (UsageError.at("x", "y"), UsageError),
    ],
)
def test_what_other_ranks_raise_for_an_exception(error, kind):
    assert type(as_error(error, "x")) is kind


def test_problems_of_some_ranks_name_them():
    full, bug = StorageError.at("disk", "full"), TailorError.at("x", "bug")
    place = SourceError.at(PathIn("c", "f"), "gone")
    found = merged({1: full, 2: full, 3: place}, 4)
    assert type(found) is SourceError
    assert [(str(one), one.ranks, one.path) for one in found.problems] == [
        ("ranks 1-2: disk: full", (1, 2), None),
        ("rank 3: c/f: gone", (3,), "f"),
    ]
    assert str(merged(dict.fromkeys(range(2), full), 2)) == "disk: full"
    assert type(merged({0: full, 1: bug}, 2)) is TailorError


def test_marks_of_other_ranks_continue_the_own_ones():
    identity = Identity("1", "plan", {}, "request", "recipe", "now", 100)
    own = Unfinished(identity, {"a": (Mark(10, 1), Mark(20, 2)), "b": (Mark(5, 9),)})
    other = Unfinished(identity, {"a": (Mark(20, 7), Mark(30, 3)), "c": (Mark(1, 1),)})
    foreign = Unfinished(Identity("1", "another", {}, "request", "recipe", "now", 100), {"b": (Mark(50, 1),)})
    marks = own.with_marks_of([other, None, foreign]).marks
    assert marks == {"a": (Mark(10, 1), Mark(20, 7), Mark(30, 3)), "b": (Mark(5, 9),), "c": (Mark(1, 1),)}


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two ranks that have found each other, in one process."""
    monkeypatch.setattr(ranks_group, "POLL_S", (0.02, 0.02))
    monkeypatch.setattr(ranks_group, "BEAT_S", 0.02)
    groups = [ranks_of(tmp_path, rank).__enter__() for rank in range(2)]
    both(groups, lambda group: group.all_gather(group.rank))
    yield groups
    for group in groups:
        group._silence()


def ranks_of(folder, rank: int) -> RankGroup:
    return RankGroup(RankInfo(rank, 2, "test"), folder / ".staging" / "ranks", folder / "out")


def both(groups, call) -> list:
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(call, group) for group in groups]]


def test_a_rank_that_was_stopped_meanwhile_leaves_the_next_merge_alone(two, tmp_path, monkeypatch):
    first, second = two
    first._silence()  # as if it had been killed
    stop = Stop()
    second.attach(stop)
    monkeypatch.setenv("LLMTAILOR_TIMEOUT", "0.3")
    with ranks_of(tmp_path, 0):
        wait_until(lambda: stop.failed)
        with pytest.raises(Unanswered, match="another merge has taken its place"):
            second.check()
        with pytest.raises(Unanswered):
            second.__exit__(None, None, None)


def test_what_an_earlier_group_has_left_means_nothing(two, tmp_path):
    """Rank 0 was killed: its folder stayed, with values by the same names."""
    for group in two:
        group._silence()
    again = [ranks_of(tmp_path, rank).__enter__() for rank in range(2)]
    assert both(again, lambda group: group.all_gather("new")) == [["new", "new"]] * 2
    for group in again:
        group._silence()


def test_files_of_other_nodes_that_appear_late(tmp_path, monkeypatch):
    group = ranks_of(tmp_path, 0)
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    timers = [threading.Timer(0.05, path.write_bytes, [b"a"]), threading.Timer(0.25, path.write_bytes, [b"abc"])]
    for timer in timers:
        timer.start()
    group.wait_for_files(tmp_path, {"folder/file": 3})
    assert path.read_bytes() == b"abc"
    assert [*path.parent.iterdir()] == [path]
    path.unlink()
    monkeypatch.setenv("LLMTAILOR_TIMEOUT", "0.1")
    with pytest.raises(StorageError, match="this node does not see it"):
        ranks_of(tmp_path, 0).wait_for_files(tmp_path, {"folder/file": 3})


def wait_until(is_true) -> None:
    for _ in range(3000):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it never was")
