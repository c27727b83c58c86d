"""Ranks that share ``verify --deep``, ``salvage --deep`` and ``thin`` say and leave what one process does."""

from __future__ import annotations

import pickle
import random
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from helpers.cases import mostly_long
from helpers.checkpoints import edit, optim_states
from llmtailor.checkpoint.lineage import composable_steps
from llmtailor.model.states import EXP_AVG, WEIGHT, State
from llmtailor.runs.scan import scan_run
from nodes.ranks import SILENT_S, Ranks
from salvage.damage import flip
from thin.scene import compose, contents, folders, make_run

STEPS = (100, 200, 300)
DEAD = -signal.SIGKILL
VERIFY = ["verify", "run/checkpoint-200", "--deep"]
THIN = ["thin", "run", "--strategy", "parity", "--yes"]
READS = ("preadv", "readv")


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by form, never to be written to"""
    made: dict[str | None, Path] = {}

    def run(form: str | None = None) -> Path:
        if form not in made:
            made[form] = make_run(tmp_path_factory.mktemp("original") / "run", STEPS, form)
        return made[form]

    return run


@pytest.fixture
def root(tmp_path, runs):
    shutil.copytree(runs(), tmp_path / "run")
    return tmp_path


def put(value: float) -> object:
    def change(tree) -> None:
        tree["optimizer_state_dict"]["fp32_flat_groups"][0].data[5::7] = value

    return change


DAMAGES = {
    "none": lambda root: None,
    "not finite": lambda root: edit(optim_states(root, 1), put(float("nan"))),
    "not the rounded masters": lambda root: edit(optim_states(root), put(3.0)),
    "a wrong checksum": lambda root: flip(root, State("model.layers.1.mlp.up_proj.weight", EXP_AVG), 3),
    "weights": lambda root: flip(root, State("model.layers.1.mlp.up_proj.weight", WEIGHT), 3),
    "no moments": lambda root: [edit(optim_states(root, rank), erase) for rank in (0, 1)],
}


def erase(tree) -> None:
    for state in tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind] = torch.zeros_like(state[kind])


@pytest.mark.parametrize("damage", mostly_long(DAMAGES, "none", "not finite", "a wrong checksum"))
def test_the_verdict_is_the_same(root, ranks, damage):
    DAMAGES[damage](root / "run/checkpoint-200")
    (code,) = ranks.run(root, VERIFY, 1)
    wanted = (root / "said-0").read_text()
    assert (code == 7) == (damage != "none"), wanted
    assert ranks.run(root, [*VERIFY, "--distributed"], 3) == [code] * 3
    assert (root / "said-0").read_text() == wanted
    assert not any((root / f"said-{rank}").read_text() for rank in (1, 2))
    assert folders(root / "run") == [f"checkpoint-{step}" for step in STEPS]


def count(root: Path, ranks: Ranks, command: list[str], rank: int, only: tuple[str, ...]) -> int:
    """How many operations on the disk a rank of three does, if nothing happens."""
    assert ranks.run(root, command, 3, {rank: {"fault": "count", "only": only}}) == [0] * 3
    return int(pickle.loads((root / f"record-{rank}").read_bytes()))


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_one_is_killed_while_it_reads(root, ranks, rank):
    command = [*VERIFY, "--distributed"]
    at = count(root, ranks, command, rank, READS) - 2
    fault = {"fault": "kill", "only": READS, "at": at}
    codes = ranks.run(root, command, 3, {rank: fault}, limit_s=SILENT_S)
    assert codes.pop(rank) == DEAD and codes == [9, 9]
    witness = (root / f"said-{1 if rank == 0 else 0}").read_text()
    assert f"rank {rank}" in witness and "Traceback" not in witness
    assert ranks.run(root, command, 2) == [0, 0]


def test_ranks_that_verify_something_else(root, ranks):
    other = ["verify", "run/checkpoint-200", "--deep", "--distributed", "--for", "deepspeed"]
    assert ranks.run(root, [*VERIFY, "--distributed"], 2, others={1: other}) == [2, 2]
    assert "rank 1: not the same recipe or options" in (root / "said-0").read_text()
    assert ranks.run(root, ["verify", "run/checkpoint-200", "--distributed"], 1) == [2]
    assert "only the reading of --deep is shared" in (root / "said-0").read_text()


def test_a_salvage_reads_together(root, ranks):
    edit(optim_states(root / "run/checkpoint-300", 1), put(float("nan")))
    flip(root / "run/checkpoint-200", State("model.layers.1.mlp.up_proj.weight", WEIGHT), 3)
    command = ["salvage", "run", "--deep", "--fragments", "--quiet"]
    assert ranks.run(root, [*command, "-o", "alone"], 1) == [0]
    assert ranks.run(root, [*command, "-o", "out", "--distributed"], 3) == [0] * 3
    assert contents(root / "out") == contents(root / "alone")


@pytest.mark.parametrize(
    ("form", "how"),
    [
        (None, THIN[2:]),
        ("dcp", ["--keep-optimizer-last", "1", "--yes"]),
        *(pytest.param(form, THIN[2:], marks=pytest.mark.long) for form in ("fsdp", "dcp", "universal")),
    ],
)
def test_what_is_left_is_the_same(tmp_path, runs, ranks, form, how):
    for name in ("alone", "shared"):
        shutil.copytree(runs(form), tmp_path / name / "run")
    assert ranks.run(tmp_path / "alone", ["thin", "run", *how], 1) == [0]
    assert ranks.run(tmp_path / "shared", ["thin", "run", *how, "--distributed"], 3) == [0] * 3
    said = [(tmp_path / name / "said-0").read_text() for name in ("alone", "shared")]
    assert said[0] == said[1] and "checkpoint-200: done" in said[1]
    alone, shared = (tmp_path / name / "run" for name in ("alone", "shared"))
    assert folders(alone) == folders(shared)
    if "--strategy" in how:
        for step in STEPS[:2]:
            outs = [compose(run, step, run.parent / f"out-{step}") for run in (alone, shared)]
            assert contents(outs[0]) == contents(outs[1])
    else:
        assert contents(alone) == contents(shared)


def test_a_dry_run_and_a_run_that_is_not_there(root, ranks):
    assert ranks.run(root, [*THIN[:-1], "--distributed"], 2) == [0, 0]
    assert "dry run: nothing was changed" in (root / "said-0").read_text()
    assert ranks.run(root, ["thin", "nowhere", *THIN[2:], "--distributed"], 2) == [4, 4]
    assert not (root / "nowhere").exists()


def kill_one(root: Path, run: Path, ranks: Ranks, rank: int, at: int) -> str:
    """Kill a rank of three at a change of the disk, and carry on with two; return how far it had come."""
    shutil.rmtree(root / "run")
    shutil.copytree(run, root / "run")
    codes = ranks.run(root, [*THIN, "--distributed"], 3, {rank: {"fault": "kill", "at": at}}, limit_s=SILENT_S)
    scan = scan_run(root / "run", every_chain=True)
    assert composable_steps(scan.usable, scan.structure.parts) == list(STEPS), (rank, at)
    if codes[rank] == 0:  # it had less to do this time
        return "complete"
    dead, others = codes[rank], {code for number, code in enumerate(codes) if number != rank}
    witness = (root / f"said-{1 if rank == 0 else 0}").read_text()
    assert dead == DEAD and others <= {0, 9} and (others == {0} or f"rank {rank}" in witness), (codes, witness)
    assert "Traceback" not in witness
    assert ranks.run(root, [*THIN, "--distributed"], 2) == [0, 0], (root / "said-0").read_text()
    assert folders(root / "run") == ["checkpoint-300", "partial/step-00000100", "partial/step-00000200"]
    return "resumed"


def test_a_thinning_whose_ranks_are_killed(root, runs, ranks):
    outcomes = [kill_one(root, runs(), ranks, rank, at) for rank, at in ((0, 25), (2, 6))]
    assert "resumed" in outcomes
    for step in STEPS[:2]:
        compose(root / "run", step, root / f"out-{step}")


@pytest.mark.long
def test_a_thinning_whose_ranks_are_killed_anywhere(root, runs, ranks):
    choose = random.Random(0)
    for _ in range(30):
        rank = choose.randrange(3)
        kill_one(root, runs(), ranks, rank, choose.randrange(1, 120 if rank == 0 else 30))
