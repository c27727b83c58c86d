"""Partial saves through dcp.save: every folder loads with stock functions, and holds what a hand-made oracle says."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

from helpers.commands import call
from llmtailor.errors import UsageError
from llmtailor.frameworks.files import DCP_RECORD
from llmtailor.saving import DcpSaver
from llmtailor.verify.verify import verify_checkpoint
from saving.dcp_checks import MOMENTS, check, killed, oracle, read, tiny, train
from saving.dcp_loop import complete, same, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Six saves on two ranks, then four on three, which resume; the newest two folders are kept."""
    run = tmp_path_factory.mktemp("turns") / "run"
    train(run, 2, 6, 2)
    train(run, 3, 10, 2)
    return run


def test_each_folder_is_complete_after_older_ones_were_deleted(trained):
    assert [folder.name for folder in complete(trained)] == ["step-9", "step-10"]
    for step in (9, 10):
        check(read(trained / f"step-{step}"), oracle(trained, step))
    (loaded,) = trained.glob("loaded-*.pt")
    found = torch.load(loaded, weights_only=False)
    assert (found["folder"], found["ranks"]) == ("step-6", 3)
    wanted = oracle(trained, 6)
    check({key: found["state"][key] for key in wanted}, wanted)
    assert any(not same(value, torch.load(trained / "truth-6.pt")["state"][key]) for key, value in wanted.items())


def test_links_keep_no_old_masters(trained):
    """Beside its own files, a folder has only those of optimizer states, each linked from one save."""
    folder = trained / "step-10"
    own = sum(one.stat().st_size for one in folder.glob("*.distcp") if one.stat().st_nlink == 1)
    rows = FileSystemReader(folder).read_metadata().storage_data.items()
    linked = {info.relative_path: [] for _, info in rows if int(info.relative_path.split("_")[-1][:-7]) >= 1000}
    for index, info in rows:
        if info.relative_path in linked:
            linked[info.relative_path].append(index.fqn)
    assert own
    assert linked
    assert all(key.startswith("optim.state.layers.") for keys in linked.values() for key in keys)
    used = sum(info.length for _, info in rows if info.relative_path in linked)
    assert used == sum((folder / path).stat().st_size for path in linked), "every byte of them is needed"


def test_llmtailor_reads_it_as_any_other(trained, tmp_path):
    """A composite of the folder, and another arrangement of it, hold the same."""
    folder, out = trained / "step-10", tmp_path / "out"
    call("verify", "--deep", folder)
    call("convert", folder, out, "--num-gpu", 2)
    wanted, found = oracle(trained, 10), read(out)
    check({key: found[key] for key in wanted}, wanted)


@pytest.mark.parametrize("how", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_async_save(tmp_path, how):
    run = tmp_path / "run"
    train(run, 2, 3, 2, how)
    check(read(run / "step-3"), oracle(run, 3))
    assert any(one.stat().st_nlink > 1 for one in (run / "step-3").glob("*.distcp"))


def save(saver: DcpSaver, folder: Path, step: int, rows: int = 4, **options: object) -> None:
    dcp.save(tiny(step, rows), storage_writer=saver.writer(FileSystemWriter(folder, **options), step))


def ages(folder: Path) -> dict[str, int]:
    return {key: int(torch.as_tensor(one).flatten()[0]) for key, one in read(folder).items()}


def test_a_restart_goes_on_from_the_folder_that_was_loaded(tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    for step in (1, 2):
        save(saver, tmp_path / f"step-{step}", step)
    again = DcpSaver("moments_in_turn:2")
    again.resumed_from(tmp_path / "step-1")
    save(again, tmp_path / "step-3", 3)  # of another attempt than step-2, whose turn it repeats
    assert [ages(tmp_path / "step-3")[key] for key in MOMENTS] == [3, 3, 1, 1]
    save(again, tmp_path / "step-4", 4)
    assert [ages(tmp_path / "step-4")[key] for key in MOMENTS] == [3, 3, 4, 4]
    save(DcpSaver("moments_in_turn:2"), tmp_path / "step-5", 5)  # was not told what was loaded
    assert {*ages(tmp_path / "step-5").values()} == {5}


def test_whole_parts_in_turn(tmp_path):
    saver = DcpSaver("parity")
    for step in (1, 2):
        save(saver, tmp_path / f"step-{step}", step)
    found = ages(tmp_path / "step-2")
    assert {key: found[key] for key in found if "layers.0" in key} == dict.fromkeys(
        ["model.layers.0.weight", *MOMENTS[:2]], 1
    )
    assert {found[key] for key in found if "layers.0" not in key} == {2}


@pytest.mark.parametrize(("policy", "layer", "moments"), [("moments_in_turn:2", 1, 1), ("parity", 0, 2)])
def test_a_param_that_the_model_saves_in_pieces(tmp_path, policy, layer, moments):
    """As torchtitan's fused projections: the pieces are saved each time. The states may be older than the weights where
    the policy leaves moments out, but are of their step where it leaves out whole parts."""
    saver = DcpSaver(policy)
    for step in (1, 2):
        state = tiny(step)
        state["model"] |= {f"layers.{layer}.{half}": torch.full((2, 3), float(step)) for half in ("q", "k")}
        state["optim"]["state"][f"layers.{layer}.qk"] = {"exp_avg": torch.full((4, 3), float(step))}
        dcp.save(state, storage_writer=saver.writer(FileSystemWriter(tmp_path / f"step-{step}"), step))
    found = ages(tmp_path / "step-2")
    assert [found[f"model.layers.{layer}.{half}"] for half in ("q", "k")] == [2, 2]
    assert found[f"optim.state.layers.{layer}.qk.exp_avg"] == moments


def test_a_shape_that_changes_is_saved(tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, tmp_path / "step-1", 1)
    save(saver, tmp_path / "step-2", 2, rows=5)
    assert {*ages(tmp_path / "step-2").values()} == {2}


@pytest.mark.parametrize("options", [{"thread_count": 3}, {"single_file_per_rank": False}])
def test_other_layouts_of_files(tmp_path, options):
    saver = DcpSaver("moments_in_turn:2")
    for step in range(1, 6):
        save(saver, tmp_path / f"step-{step}", step, **options)
        shutil.rmtree(tmp_path / f"step-{step - 1}", ignore_errors=True)
    assert [ages(tmp_path / "step-5")[key] for key in MOMENTS] == [4, 4, 5, 5]


def test_saving_again_to_a_folder_does_not_change_those_that_link_to_it(tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    for step in (1, 2):
        save(saver, tmp_path / f"step-{step}", step)
    before = ages(tmp_path / "step-2")
    save(saver, tmp_path / "step-1", 3)
    assert ages(tmp_path / "step-2") == before
    assert [ages(tmp_path / "step-1")[key] for key in MOMENTS] == [2, 2, 3, 3]


def test_a_deleted_base_makes_the_next_save_whole(tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, tmp_path / "step-1", 1)
    shutil.rmtree(tmp_path / "step-1")
    save(saver, tmp_path / "step-2", 2)
    assert {*ages(tmp_path / "step-2").values()} == {2}
    save(saver, tmp_path / "step-3", 3)
    (tmp_path / "step-3" / "__0_90.distcp").unlink()  # partly deleted
    save(saver, tmp_path / "step-4", 4)
    assert {*ages(tmp_path / "step-4").values()} == {4}


def test_a_stock_save_over_a_folder_ends_its_record(tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, tmp_path / "step-1", 1)
    dcp.save({"model": tiny(9)["model"]}, checkpoint_id=tmp_path / "step-1")
    save(saver, tmp_path / "step-2", 2)
    assert {*ages(tmp_path / "step-2").values()} == {2}


def test_a_base_runs_no_code(tmp_path):
    """Its metadata is read before any key is, at the first save after a restart."""

    class Attack:
        def __reduce__(self):
            return os.mkdir, (f"{tmp_path}/attacked",)

    save(DcpSaver("moments_in_turn:2"), tmp_path / "step-1", 1)
    path = tmp_path / "step-1" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data["model"] = Attack()
    path.write_bytes(pickle.dumps(metadata))
    again = DcpSaver("moments_in_turn:2")
    again.resumed_from(tmp_path / "step-1")
    save(again, tmp_path / "step-2", 2)
    assert not (tmp_path / "attacked").exists()
    assert {*ages(tmp_path / "step-2").values()} == {2}


@pytest.mark.parametrize(
    "data", [b"\x80\x04K\x01)R.", b"\x80\x04\x8e" + b"\xff" * 8, b""], ids=["calls 1", "too long", "empty"]
)
def test_a_base_with_damaged_metadata_is_not_used(tmp_path, data):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, tmp_path / "step-1", 1)
    (tmp_path / "step-1" / ".metadata").write_bytes(data)
    again = DcpSaver("moments_in_turn:2")
    again.resumed_from(tmp_path / "step-1")
    save(again, tmp_path / "step-2", 2)
    assert {*ages(tmp_path / "step-2").values()} == {2}


HOSTILE = {
    "a large number in the memo": lambda at: (at / ".metadata").write_bytes(b"\x80\x04Nr\0\0\0\x080N."),
    "an attribute of a class": lambda at: (at / ".metadata").write_bytes(
        splice_in(at / ".metadata", b"cpathlib\nPosixPath\n(N}X\6\0\0\0parentX\1\0\0\0xstb0")
    ),
    "a pipe for the metadata": lambda at: ((at / ".metadata").unlink(), os.mkfifo(at / ".metadata")),
    "a pipe for the record": lambda at: ((at / DCP_RECORD).unlink(), os.mkfifo(at / DCP_RECORD)),
    "a huge record": lambda at: os.truncate(at / DCP_RECORD, 1 << 40),
    "a nested record": lambda at: (at / DCP_RECORD).write_text("[" * 200_000),
}


def splice_in(path: Path, code: bytes) -> bytes:
    """Return a pickle that runs more code first."""
    sound = path.read_bytes()
    assert sound[2:3] == b"\x95", "a frame, which is left out"
    return sound[:2] + code + sound[11:]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_base_is_not_used(tmp_path, how):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, tmp_path / "step-1", 1)
    HOSTILE[how](tmp_path / "step-1")
    peak, parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, PosixPath.parent
    again = DcpSaver("moments_in_turn:2")
    again.resumed_from(tmp_path / "step-1")
    save(again, tmp_path / "step-2", 2)
    assert {*ages(tmp_path / "step-2").values()} == {2}
    assert PosixPath.parent is parent
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 256 << 10


@pytest.mark.parametrize("checksum", ["none", 5, [], True, ""])
def test_a_damaged_record_is_said(tmp_path, checksum):
    saver = DcpSaver()
    save(saver, tmp_path / "step-1", 1)
    path = tmp_path / "step-1" / DCP_RECORD
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "files": dict.fromkeys(record["files"], checksum)}))
    errors = verify_checkpoint(tmp_path / "step-1").of_severity("error")
    assert any(one.path == DCP_RECORD and "the checksum of" in one.what for one in errors)
    save(saver, tmp_path / "step-2", 2)  # everything
    assert {*ages(tmp_path / "step-2").values()} == {2}


def test_a_local_folder_through_fsspec(tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    for step in (1, 2):
        dcp.save(tiny(step), storage_writer=saver.writer(FsspecWriter(f"file://{tmp_path}/step-{step}"), step))
    assert [ages(tmp_path / "step-2")[key] for key in MOMENTS] == [2, 2, 1, 1]


def test_a_model_alone_is_saved_whole(tmp_path):
    saver = DcpSaver()
    dcp.save({"model": tiny(1)["model"]}, storage_writer=saver.writer(FileSystemWriter(tmp_path / "step-1"), 1))
    assert {*ages(tmp_path / "step-1").values()} == {1}


def test_what_is_refused(tmp_path):
    saver = DcpSaver()
    in_blobs = FileSystemWriter(tmp_path / "step-1", serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(UsageError, match=r"in the safetensors format.*\n.*HuggingFaceStorageWriter"):
        saver.writer(in_blobs, 1)
    other = FileSystemWriter(tmp_path / "step-1")
    other.use_msc = True
    with pytest.raises(UsageError, match="through multistorageclient"):
        saver.writer(other, 1)
    for policy in ("adaptive", "budget:5"):
        with pytest.raises(UsageError, match=f"policy {policy.split(':')[0]}"):
            DcpSaver(policy)
    for options, match in (
        ({"planner": dcp.DefaultSavePlanner(enable_plan_caching=True)}, "enable_plan_caching"),
        ({"checkpoint_id": tmp_path / "other"}, "checkpoint_id"),
    ):
        with pytest.raises((UsageError, dcp.api.CheckpointException), match=match):
            dcp.save(tiny(1), storage_writer=saver.writer(FileSystemWriter(tmp_path / "step-1"), 1), **options)


@pytest.mark.long
def test_kills_at_random_moments(tmp_path):
    """Fifty saves on two ranks with thirty kills; the newest two folders are kept."""
    run, cut_off = tmp_path / "run", 0
    for _ in killed(run, ["2"], kills=30, saves=50, seconds=0.5, seed=5):  # a save takes 0.1 s
        cut_off += len([*run.glob("step-*")]) > len(complete(run))
        if folders := complete(run):
            check(read(folders[-1]), oracle(run, step_of(folders[-1])))
    for folder in complete(run):
        wanted = oracle(run, step_of(folder))
        for ranks in (1, 2, 3):
            alone = tmp_path / f"{folder.name}-{ranks}"  # moved, without its siblings
            shutil.copytree(folder, alone / folder.name)
            train(alone, ranks, 0)
            found = torch.load(next(alone.glob("loaded-*.pt")), weights_only=False)["state"]
            check({key: found[key] for key in wanted}, wanted)
    for path in run.glob("loaded-*.pt"):
        found = torch.load(path, weights_only=False)
        wanted = oracle(run, step_of(Path(found["folder"])))
        check({key: found["state"][key] for key in wanted}, wanted)
    assert cut_off, "no kill was in the middle of a save"
    print(f"{len([*run.glob('loaded-*.pt')])} resumes; {cut_off} kills in the middle of a save")
