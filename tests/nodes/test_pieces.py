"""The pieces of a shared merge, in one process."""

from __future__ import annotations

import json
import threading
import time
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.layout import FileLayout, Plan, Zeros
from llmtailor.compose import share
from llmtailor.engine.copy import FileResult, Moved
from llmtailor.engine.job import ENDED, READY, WRITING, WRITTEN, Job
from llmtailor.engine.journal import Identity, Mark, Unfinished
from llmtailor.engine.launch import Member, find_member
from llmtailor.engine.linking import LinkedTo
from llmtailor.engine.pool import Stop
from llmtailor.engine.posts import Posts
from llmtailor.engine.sharing import check_same, share_out, wait_for_files
from llmtailor.errors import SourceError, StorageError, Unanswered, UsageError
from llmtailor.storage.listing import FileFact

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "0",
}


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
    member = find_member(environment)
    assert (member.rank, member.world_size) == (rank, world_size)


def test_launches_differ():
    steps = [find_member({**SRUN, "SLURM_STEP_ID": step}).launch for step in "01"]
    assert steps[0] != steps[1]
    assert find_member({**SRUN, "SLURM_PROCID": "2"}).launch == steps[0]


def test_no_launcher():
    with pytest.raises(UsageError, match="no launcher"):
        find_member({"RANK": "1", "PATH": "/bin"})


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_shares_are_disjoint_complete_and_even(sizes, world_size):
    shares = share_out(sizes, world_size)
    assert sorted(number for files in shares for number in files) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in files) for files in shares]
    assert len(shares) == world_size
    # no rank has more than another without its smallest file
    for files, load in zip(shares, loads, strict=True):
        assert not files or load - min(sizes[number] for number in files) <= min(loads)


def test_the_first_difference_is_told():
    same = {"version": "1", "request": "r", "facts": "f", "plan": "p"}
    check_same({0: same, 1: dict(same)})
    with pytest.raises(UsageError) as caught:
        check_same({0: same, 1: {**same, "version": "2", "plan": "q"}, 2: {**same, "facts": "g", "plan": "q"}})
    assert [problem.where for problem in caught.value.problems] == ["rank 1", "rank 2"]
    with pytest.raises(SourceError, match="sizes or times"):
        check_same({0: same, 1: {**same, "facts": "g"}, 3: {**same, "facts": "g"}})


def test_a_post_is_whole_or_nothing(tmp_path):
    posts = Posts(tmp_path)
    assert posts.read(3) is None
    posts.write(3, {"stage": "failed", "problems": [{"what": "x" * 9000}]})
    found = posts.read(3)
    assert found is not None and len(found["problems"][0]["what"]) == 9000
    posts.write(3, {"stage": "ended"})
    assert posts.read(3) == {"stage": "ended"}
    data = bytearray((tmp_path / "3").read_bytes())
    data[20] ^= 1
    (tmp_path / "3").write_bytes(data)
    assert posts.read(3) is None
    with pytest.raises(FileNotFoundError):
        Posts(tmp_path / "gone").read(0)


def test_marks_of_other_ranks_continue_the_own_ones():
    identity = Identity("1", "plan", {}, "request", "recipe", "now", 100)
    own = Unfinished(identity, {"a": (Mark(10, 1), Mark(20, 2)), "b": (Mark(5, 9),)})
    other = Unfinished(identity, {"a": (Mark(20, 7), Mark(30, 3)), "c": (Mark(1, 1),)})
    foreign = Unfinished(Identity("1", "another", {}, "request", "recipe", "now", 100), {"b": (Mark(50, 1),)})
    marks = own.with_marks_of([other, None, foreign]).marks
    assert marks == {"a": (Mark(10, 1), Mark(20, 7), Mark(30, 3)), "b": (Mark(5, 9),), "c": (Mark(1, 1),)}


@pytest.fixture
def two(tmp_path):
    """The jobs of two ranks that have found each other, in one process."""
    jobs = [Job(Member(rank, 2, "test"), tmp_path / "out") for rank in range(2)]
    for job in jobs:
        job._poll_s = 0.02
        job.__enter__()
    jobs[1].say(READY)
    jobs[0].wait(READY)
    jobs[0].say(WRITING)
    jobs[1].wait(WRITING)
    yield jobs
    for job in jobs:
        job._silence()


def test_a_rank_that_was_stopped_meanwhile_leaves_the_next_merge_alone(two, tmp_path, monkeypatch):
    first, second = two
    first._silence()  # as if it had been killed
    first.lock.release()
    stop = Stop()
    second.attach(stop)
    monkeypatch.setenv("LLMTAILOR_TIMEOUT", "0.3")
    with Job(Member(0, 2, "test"), tmp_path / "out"):
        wait_until(lambda: stop.failed)
        with pytest.raises(Unanswered, match="another merge has taken its place"):
            second.check()
        with pytest.raises(Unanswered):
            second.__exit__(None, None, None)


def test_ranks_end_together(two, tmp_path):
    first, second = two
    thread = threading.Thread(target=first.__exit__, args=(None, None, None))
    thread.start()
    second.wait(ENDED)
    second.__exit__(None, None, None)
    thread.join()
    assert not [*tmp_path.iterdir()]


def test_the_error_of_one_is_that_of_all_and_is_told_once(two):
    first, second = two
    caught = []

    def fail() -> None:
        try:
            error = StorageError.at("disk", "full")
            second.__exit__(StorageError, error, None)
        except StorageError as raised:
            caught.append(raised)

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(StorageError) as told:
        first.wait(WRITTEN)
    first.__exit__(StorageError, told.value, None)
    thread.join()
    assert [str(problem) for problem in told.value.problems] == ["rank 1: disk: full"]
    assert not told.value.is_reported
    assert caught[0].is_reported


def test_results_of_other_ranks_are_as_they_were(monkeypatch):
    facts = [FileFact(7, 1, number, 3) for number in range(2)]
    file = FileLayout("w", (Zeros(7, "content"),))
    made = FileResult(
        file, 5, array("I", [5]), "digest", Moved(linked_bytes=7, linked_files=1), LinkedTo(0, "w", *facts)
    )
    monkeypatch.setattr(share, "take_over", lambda *_: json.loads(json.dumps([share._to_json(made)])))
    job = SimpleNamespace(member=Member(0, 1, "launch"))
    (found,) = share._collect(job, Plan((), (file,)), [[]])
    assert found == made


def test_files_of_other_nodes_that_appear_late(tmp_path):
    job = SimpleNamespace(limit_s=10.0, check=lambda: None, out=tmp_path / "out")
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    timers = [threading.Timer(0.05, path.write_bytes, [b"a"]), threading.Timer(0.25, path.write_bytes, [b"abc"])]
    for timer in timers:
        timer.start()
    wait_for_files(job, tmp_path, {"folder/file": 3})
    assert path.read_bytes() == b"abc"
    assert [*path.parent.iterdir()] == [path]
    path.unlink()
    job.limit_s = 0.1
    with pytest.raises(StorageError, match="this node does not see it"):
        wait_for_files(job, tmp_path, {"folder/file": 3})


def wait_until(is_true) -> None:
    for _ in range(3000):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it never was")
