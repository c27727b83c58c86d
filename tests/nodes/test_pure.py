"""What decides in a shared merge, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.compose.share import check_same, share_out
from llmtailor.engine.journal import Identity, Mark, Unfinished
from llmtailor.engine.launch import find_member
from llmtailor.engine.posts import Posts
from llmtailor.errors import SourceError, UsageError

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
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in shares]
    assert len(shares) == world_size
    # no rank has more than another without its smallest file
    for share, load in zip(shares, loads, strict=True):
        assert not share or load - min(sizes[number] for number in share) <= min(loads)


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
