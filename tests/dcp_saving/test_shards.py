"""Partial saves through HuggingFaceStorageWriter: torch's own reader finds every tensor once, in every folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from helpers.commands import call
from llmtailor.errors import UsageError
from llmtailor.frameworks.files import DCP_RECORD
from llmtailor.saving import DcpSaver
from llmtailor.verify.verify import verify_checkpoint
from saving.dcp_checks import MOMENTS, check, killed, oracle, tiny, train
from saving.dcp_checks import read as read_blobs
from saving.dcp_loop import complete, load_whole, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def read(folder: Path) -> dict[str, Any]:
    return load_whole(HuggingFaceStorageReader(f"{folder}"))


def ages(folder: Path) -> dict[str, int]:
    return {key: int(one.flatten()[0]) for key, one in read(folder).items()}


def state_of(step: int, rows: int = 4) -> dict[str, Any]:
    return {**tiny(step, rows), "train": {"step": torch.tensor(step)}}


def save(saver: DcpSaver, folder: Path, step: int, rows: int = 4, **options: Any) -> None:
    inner = HuggingFaceStorageWriter(f"{folder}", **{"save_distributed": True, **options})
    dcp.save(state_of(step, rows), storage_writer=saver.writer(inner, step))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Six saves on two ranks, then four on three, which resume; the newest two folders are kept."""
    run = tmp_path_factory.mktemp("shards") / "run"
    for ranks, until in ((2, 6), (3, 10)):
        train(run, ranks, until, 2, "sync", "moments_in_turn", "shards")
    return run


def test_each_folder_is_complete_after_older_ones_were_deleted(trained):
    assert [folder.name for folder in complete(trained, DCP_RECORD)] == ["step-9", "step-10"]
    for step in (9, 10):
        check(read(trained / f"step-{step}"), oracle(trained, step))
    linked = {one.name for one in (trained / "step-10").iterdir() if one.stat().st_nlink > 1}
    assert linked
    assert linked <= {one.name for one in (trained / "step-9").iterdir()}
    (loaded,) = trained.glob("loaded-*.pt")
    assert torch.load(loaded)["ranks"] == 3


def test_llmtailor_reads_it_as_any_other(trained, tmp_path):
    folder, out = trained / "step-10", tmp_path / "out"
    call("verify", "--deep", folder)
    call("convert", folder, out, "--num-gpu", 2)
    wanted, found = oracle(trained, 10), read_blobs(out)
    check({key: found[key] for key in wanted}, wanted)


def test_a_link_keeps_nothing_that_is_out_of_date(trained):
    """A file holds the masters of one layer, or its states, or what belongs to none of both."""
    for path in (trained / "step-10").glob("shard-*"):
        kinds = {key if "param_groups" in key else re.split(r"(?<=layers\.\d)", key)[0] for key in load_file(path)}
        assert len(kinds) == 1 or "-model-00001-" in path.name
        assert path.stat().st_nlink == 1 or "optim.state" in kinds.pop()


def test_torch_consolidates_a_folder_of_links(trained, tmp_path):
    wanted = {key: one for key, one in oracle(trained, 10).items() if key.startswith("model.")}
    shutil.copytree(trained / "step-10", tmp_path / "step-10")
    consolidate_safetensors_files(f"{tmp_path}/step-10", f"{tmp_path}", dict.fromkeys(wanted, 1))
    check(load_file(tmp_path / "model-00001-of-00001.safetensors"), wanted)


@pytest.mark.parametrize("options", [{}, {"save_distributed": False}, {"thread_count": 3}])
def test_a_folder_needs_no_older_one(tmp_path, options):
    saver = DcpSaver("moments_in_turn:2")
    for step in range(1, 6):
        save(saver, tmp_path / f"step-{step}", step, **options)
        shutil.rmtree(tmp_path / f"step-{step - 1}", ignore_errors=True)
    found = ages(tmp_path / "step-5")
    assert [found[key] for key in MOMENTS] == [4, 4, 5, 5]
    assert {found[key] for key in found.keys() - {*MOMENTS}} == {5}
    if index := [*(tmp_path / "step-5").glob("*.index.json")]:
        where = json.loads(index[0].read_text())["weight_map"]
        assert {key: path for path in {*where.values()} for key in load_file(tmp_path / "step-5" / path)} == where


def test_a_restart_and_a_save_to_the_same_folder(tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    for step in (1, 2):
        save(saver, tmp_path / f"step-{step}", step)
    before = ages(tmp_path / "step-2")
    again = DcpSaver("moments_in_turn:2")
    again.resumed_from(tmp_path / "step-2")
    save(again, tmp_path / "step-1", 3)
    assert ages(tmp_path / "step-2") == before
    assert [ages(tmp_path / "step-1")[key] for key in MOMENTS] == [2, 2, 3, 3]


@pytest.mark.parametrize("change", ["shape", "parts", "deleted", "cut off", "overwritten", "other writer"])
def test_what_makes_a_save_whole(tmp_path, change):
    saver, old = DcpSaver("moments_in_turn:2"), tmp_path / "step-1"
    inner: Any = (
        FileSystemWriter(old) if change == "other writer" else HuggingFaceStorageWriter(f"{old}", None, 1, True)
    )
    dcp.save(state_of(1), storage_writer=saver.writer(inner, 1))
    state = state_of(2, rows=5 if change == "shape" else 4)
    if change == "parts":
        state["model"]["head.weight"] = torch.full((2,), 2.0)
        state["optim"]["state"]["head.weight"] = {"exp_avg": torch.full((2,), 2.0)}
    elif change == "deleted":
        next(old.glob("*-00005-of-*")).unlink()
    elif change == "cut off":
        (old / DCP_RECORD).unlink()
    elif change == "overwritten":
        path = next(old.glob("*-00005-of-*"))
        values = {key: one + 5 for key, one in load_file(path).items()}
        save_file(values, path)
    inner = HuggingFaceStorageWriter(f"{tmp_path}/step-2", save_distributed=True)
    dcp.save(state, storage_writer=saver.writer(inner, 2))
    assert {*ages(tmp_path / "step-2").values()} == {2}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("a link", "another save has overwritten it"),
        ("another save", "another save wrote shard-00009-"),
        ("lost", "missing"),
    ],
)
def test_verify_finds_what_another_save_did(tmp_path, change, problem):
    saver, folder = DcpSaver("moments_in_turn:2"), tmp_path / "step-2"
    for step in (1, 2):
        save(saver, tmp_path / f"step-{step}", step)
    linked = next(path for path in folder.glob("shard-*") if path.stat().st_nlink > 1)
    if change == "a link":
        header = linked.read_bytes()[:-8]
        linked.write_bytes(header + torch.tensor([7.0, 7.0]).numpy().tobytes())  # in place: it is step-1's, too
    elif change == "another save":
        shutil.copy(linked, folder / "shard-00009-model-00009-of-00009.safetensors")
    else:
        linked.unlink()
    errors = verify_checkpoint(folder).of_severity("error")
    assert any(problem in one.what for one in errors)


def test_a_failed_save_publishes_nothing(tmp_path, monkeypatch):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, tmp_path / "step-1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceStorageWriter, "finish", lambda *_: 1 / 0)
        with pytest.raises(dcp.api.CheckpointException):
            save(saver, tmp_path / "step-2", 2)
    assert [one.name for one in complete(tmp_path, DCP_RECORD)] == ["step-1"]
    save(saver, tmp_path / "step-3", 3)
    assert [ages(tmp_path / "step-3")[key] for key in MOMENTS] == [3, 3, 1, 1]


def test_what_is_refused(tmp_path):
    def refused(match: str, state: dict[str, Any], **options: Any) -> None:
        with pytest.raises((UsageError, dcp.api.CheckpointException), match=match):
            inner = HuggingFaceStorageWriter(f"{tmp_path}/step-1", **options)
            dcp.save(state, storage_writer=DcpSaver().writer(inner, 1))

    refused("train.step are not tensors", tiny(1), save_distributed=True)
    refused("enable_consolidation", state_of(1), save_distributed=True, enable_consolidation=True)
    refused("fqn_to_index_mapping", state_of(1), fqn_to_index_mapping={})


def test_ranks_that_would_overwrite_each_other_are_refused():
    """Without save_distributed, torch gives the files of all ranks the same names."""
    writer = DcpSaver().writer(HuggingFaceStorageWriter("x"), 1)
    plan = create_default_local_save_plan(flatten_state_dict(state_of(1))[0], True)
    with pytest.raises(UsageError, match=r"several ranks have tensors.*\n.*save_distributed"):
        writer.prepare_global_plan([plan, plan])


@pytest.mark.long
def test_kills_at_random_moments(tmp_path):
    """What has a record is complete, wherever two ranks were killed."""
    run, cut_off = tmp_path / "run", 0
    arguments = ["2", "sync", "moments_in_turn", "shards"]
    for _ in killed(run, arguments, kills=10, saves=30, seconds=2, seed=4):
        folders = complete(run, DCP_RECORD)
        cut_off += len([*run.glob("step-*")]) > len(folders)
        for folder in folders[-2:]:  # an older one may have been killed while it was removed
            check(read(folder), oracle(run, step_of(folder)))
    assert cut_off, "no kill was in the middle of a save"
    print(f"{cut_off} kills in the middle of a save")
