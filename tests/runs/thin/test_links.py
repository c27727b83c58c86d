"""Thinned out with ``--reference``: each folder stays complete to a stock load, and shares files with those before."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from helpers.commands import run_here
from helpers.composing import convert
from helpers.dcp import RUNS, assert_loads_alike
from llmtailor.errors import MismatchError, UsageError
from llmtailor.runs.guards import only_writer
from llmtailor.runs.prune import ThinOptions
from llmtailor.runs.thin import thin
from llmtailor.runs.thin_plan import plan_thinning
from llmtailor.saving import DcpSaver
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from saving.dcp_checks import check, oracle, read, tiny, train
from saving.dcp_loop import complete, step_of
from thin.scene import SHORT, call, compose, copy_of_trained, folders, make_run, sources, taken

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
STEPS = (100, 200, 300, 400)


def inodes(*roots: Path) -> dict[int, Path]:
    return {path.stat().st_ino: path for root in roots for path in root.rglob("*.distcp") if path.stat().st_size}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Seven stock saves on two ranks, thinned out; and the links that the data files between had afterwards."""
    run = tmp_path_factory.mktemp("links") / "run"
    train(run, 2, 7, 0, "sync", "stock")
    with ExitStack() as stack:
        paths = [path for step in range(2, 7) for path in (run / f"step-{step}").glob("*.distcp")]
        files, before = [stack.enter_context(path.open()) for path in paths], taken(run)
        told = call("thin", run, "--strategy", "moments_in_turn", "--reference", "--yes")
        links = [os.fstat(file.fileno()).st_nlink for file in files]
    return run, links, before - taken(run), told


def test_a_training_finds_what_its_policy_would_have_saved(trained, tmp_path):
    run, *_ = trained
    assert [step_of(folder) for folder in complete(run)] == [*range(1, 8)]
    for step in range(2, 7):
        held = read(run / f"step-{step}")
        check({key: one for key, one in held.items() if "llmtailor" not in key}, oracle(run, step))
    alone = tmp_path / "alone"
    shutil.copytree(run / "step-6", alone / "step-6")  # without its siblings
    train(alone, 3, 0)
    found = next(alone.glob("loaded-*.pt"))
    assert found.exists()


def test_the_bytes_are_shared_and_the_old_files_are_gone(trained):
    run, links, freed, told = trained
    assert links
    assert not any(links)
    assert [row["becomes"] for row in told["checkpoints"]] == ["stays", *["linked"] * 5, "stays"]
    assert freed == pytest.approx(told["freed_bytes"], rel=0.2)
    every = inodes(*(run / f"step-{step}" for step in range(1, 6)))
    linked = {every[inode].name for inode in inodes(run / "step-6") if inode in every}
    assert linked


def test_links_to_moments_keep_no_weights(trained):
    """As soon as a turn is over, no file with old weights is left in a folder, nor one of the first."""
    run, *_ = trained
    first = inodes(run / "step-1")
    folder = run / "step-6"
    assert not first.keys() & inodes(folder).keys()
    rows = dcp.FileSystemReader(folder).read_metadata().storage_data.items()
    linked = {index.fqn for index, info in rows if re.fullmatch(r"__\d+_[2-9]\.distcp", info.relative_path)}
    assert linked
    assert all(key.startswith("optim.state.layers.") for key in linked)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("dcp", ("--strategy", "parity")),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("dcp", ("--strategy", "moments_in_turn:2")),
                ("fsdp", ("--strategy", "moments_in_turn:2")),
                ("fsdp", ("--strategy", "parity")),
                ("dcp", ("--select", "last:1", "--select", "norm")),
                ("fsdp", ("--strategy", "round_robin:3", "--keep-full-last", 2)),
            )
        ),
    ],
)
def test_each_step_equals_the_composite_of_partial_ones(tmp_path, form, options):
    run, other = make_run(tmp_path / "run", STEPS, form, shape=SHORT), tmp_path / "other"
    shutil.copytree(run, other)
    before, planned = taken(run), call("thin", run, *options, "--reference")
    assert taken(run) == before
    told = call("thin", run, *options, "--reference", "--yes")
    assert told == planned
    assert (before - taken(run)) / told["freed_bytes"] == pytest.approx(1, rel=0.1)
    assert folders(run) == [f"checkpoint-{step}" for step in STEPS]
    call("thin", other, *options, "--yes")
    thinned = [row["step"] for row in told["checkpoints"] if row["becomes"] == "linked"]
    for step in thinned:
        folder, out = run / f"checkpoint-{step}", compose(other, step, tmp_path / f"out-{step}")
        assert_loads_alike(folder, out)
        assert sources(folder) == sources(out)
        assert verify_checkpoint(folder, deep=True).level == RESUMABLE
    shutil.rmtree(run / "checkpoint-100")
    assert verify_checkpoint(run / f"checkpoint-{thinned[-1]}", deep=True).level == RESUMABLE
    again = call("thin", run, *options, "--reference", "--yes")
    assert {row["why"] for row in again["checkpoints"] if row["step"] in thinned} == {"it has links already"}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parity", "moments_in_turn:2"])
@pytest.mark.parametrize("name", [*RUNS, "titan-bf16"])
def test_what_trainings_saved(runs, name, strategy, tmp_path):
    """Other layouts of keys and files; also of frozen and tied params. Both checkpoints are older ones here."""
    run, other = copy_of_trained(runs, name, tmp_path / "run"), copy_of_trained(runs, name, tmp_path / "other")
    with only_writer(run):
        thin(plan_thinning(run, ThinOptions(0, strategy, reference=True)))
    thin(plan_thinning(other, ThinOptions(0, strategy)))
    folder = run / runs.checkpoint(name, 4).name
    assert [path for path in folder.rglob("*.distcp") if path.stat().st_nlink > 1]
    out = compose(other, 4, tmp_path / "out")
    assert_loads_alike(folder, out)
    assert verify_checkpoint(folder, deep=True).level == verify_checkpoint(out, deep=True).level
    for shard in folder.glob("*.safetensors"):
        assert shard.read_bytes() == (out / shard.name).read_bytes()


@pytest.mark.long
def test_it_goes_on_where_it_was(tmp_path):
    """Thinned out again later, and once more from what has links: into partial ones, and to a copy."""
    run = make_run(tmp_path / "run", STEPS, "dcp", shape=SHORT)
    words = ("thin", run, "--strategy", "parity", "--reference", "--yes")
    first = call(*words)
    make_run(tmp_path / "more", (500, 600), "dcp", shape=SHORT)
    for step in (500, 600):
        (tmp_path / "more" / f"checkpoint-{step}").rename(run / f"checkpoint-{step}")
    second = call(*words)
    parts = {row["step"]: set(row["parts"]) for told in (first, second) for row in told["checkpoints"] if row["parts"]}
    assert parts[200] == parts[400] != parts[300] == parts[500]
    ledger = json.loads((run / "checkpoint-500/llmtailor.json").read_text())["ledger"]
    assert (ledger["saves"], {held for held, _ in ledger["held_by"].values()}) == (5, {3, 4})
    assert set(sources(run / "checkpoint-500").values()) == {400, 500}
    convert(run / "checkpoint-500", tmp_path / "whole")
    assert_loads_alike(tmp_path / "whole", run / "checkpoint-500")
    for command in (("gc", run, "--yes"), ("inspect", run / "checkpoint-300"), ("salvage", run, "--dry-run")):
        assert run_here(*command).returncode == 0, command
    call("thin", run, "--strategy", "full", "--yes")
    assert_loads_alike(compose(run, 500, tmp_path / "out"), tmp_path / "whole")


@pytest.mark.long
def test_another_attempt_gets_no_links_to_the_first(tmp_path):
    run = make_run(tmp_path / "run", (100, 200, 250, 300, 350), "fsdp", shape=SHORT)
    for path in run.glob("checkpoint-*/trainer_state.json"):
        state = json.loads(path.read_text())
        step = state["global_step"]
        loss = 2.0 if step == 200 else 2.5  # then it has resumed at 100, and come by 200 again
        logged = [{"step": 100, "loss": 3.0}, *([{"step": 200, "loss": loss}] if step >= 200 else [])]
        path.write_text(json.dumps({**state, "log_history": logged}))
    told = call("thin", run, "--strategy", "parity", "--reference", "--yes")
    links = {row["step"]: row["links_to"] and Path(row["links_to"]).name for row in told["checkpoints"]}
    assert links == {100: None, 200: "checkpoint-100", 250: "checkpoint-100", 300: "checkpoint-250", 350: None}


def test_what_stays(tmp_path):
    """One that is not resumable, and one with a file of the user."""
    run = make_run(tmp_path / "run", STEPS, "fsdp", shape=SHORT)

    def planned():
        rows = call("thin", run, "--strategy", "parity", "--reference")["checkpoints"]
        return {row["step"]: row for row in rows}

    folder = run / "checkpoint-200"
    scheduler = folder / "scheduler.pt"
    content = scheduler.read_bytes()
    scheduler.unlink()
    rows = planned()
    assert rows[200]["why"].startswith("it is not resumable")
    assert rows[300]["becomes"] == "linked"
    scheduler.write_bytes(content)
    (folder / "notes.txt").write_text("mine")
    rows = planned()
    assert "notes.txt" in rows[200]["why"]
    assert rows[300]["links_to"] == str(folder)


def test_what_a_dcp_saver_has_linked_stays(tmp_path):
    run, saver = tmp_path / "run", DcpSaver("parity")
    for step in (1, 2, 3):
        state = tiny(step)
        state["optim"]["param_groups"] = [{"lr": 0.1, "params": [*state["model"]]}]
        dcp.save(state, storage_writer=saver.writer(dcp.FileSystemWriter(run / f"step-{step}"), step))
    told = call("thin", run, "--strategy", "parity", "--reference")
    assert [row["why"] for row in told["checkpoints"]][:2] == ["its saver has made links already"] * 2


def test_what_is_refused(tmp_path):
    run = make_run(tmp_path / "run", (100, 200), "universal", shape=SHORT)
    with pytest.raises(MismatchError, match="only FSDP's and DCP's sharded checkpoints"):
        plan_thinning(run, ThinOptions(1, "parity", reference=True))
    run = make_run(tmp_path / "other", (100, 200), "dcp", shape=SHORT)
    with pytest.raises(UsageError, match="needs exact ones"):
        plan_thinning(run, ThinOptions(1, "budget:5", reference=True))
    done = run_here("thin", run, "--keep-optimizer-last", 1, "--reference")
    assert done.returncode == 2
    assert "nothing is left to link to" in done.stderr
