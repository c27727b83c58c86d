"""What a DCP resume trips over, or swallows: each damage is made in a real checkpoint, and `verify` says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import llmtailor  # noqa: E402
from llmtailor.codes import Code  # noqa: E402
from llmtailor.containers.dcp import lay_out_metadata, read_metadata  # noqa: E402
from llmtailor.recipe import Recipe  # noqa: E402
from llmtailor.verify.verify import verify_checkpoint  # noqa: E402

Damage = Callable[[Path, Path], object]


def without(*endings: str) -> Damage:
    """Drop keys from ``.metadata``, as a save of a smaller state dict would."""

    def damage(root: Path, other: Path) -> None:
        entries = read_metadata(root, ".metadata", "x")
        kept = {key: entry for key, entry in entries.items() if not key.endswith(endings)}
        assert len(kept) < len(entries)
        (root / ".metadata").write_bytes(lay_out_metadata(".metadata", kept).pieces[0].data)

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(root: Path, other: Path) -> None:
    chunk = read_metadata(root, ".metadata", "x")["model.lm_head.weight"].chunks[1]
    data = bytearray((root / chunk.blob.path).read_bytes())
    data[chunk.blob.start + 704 + 40] ^= 1
    (root / chunk.blob.path).write_bytes(data)


def round_weights(root: Path, other: Path) -> None:
    """What `dcp.save` makes of a model that was cast for inference."""
    saved: dict = {}
    planner = dcp.default_planner._EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(saved, dcp.FileSystemReader(root), planner=planner, no_dist=True)
    saved["model"] = {name: tensor.bfloat16() for name, tensor in saved["model"].items()}
    shutil.rmtree(root)
    dcp.save(saved, checkpoint_id=root, no_dist=True)


def edit(path: str, **changes: object) -> Damage:
    return lambda root, other: (root / path).write_text(json.dumps(json.loads((root / path).read_text()) | changes))


CASES: list[tuple[str, str, Damage, str, Code, str, str]] = [
    ("a lost data file", "loop", lambda root, _: (root / "__1_0.distcp").unlink(), "error", Code.FILE_MISSING,
     "the file is missing",
     "fails"),
    ("a truncated data file", "loop", lambda root, _: (root / "__1_0.distcp").write_bytes(b"PK" * 1000), "error",
     Code.FILE_DAMAGED, "refers to byte",
     "fails"),
    ("no .metadata", "loop", lambda root, _: (root / ".metadata").unlink(), "error", Code.FILE_MISSING,
     "the save was not finished",
     "fails"),
    ("the .metadata of another save", "loop", lambda root, other: shutil.copy(other / ".metadata", root), "error",
     Code.FILE_MISSING, "the file is missing",
     "fails"),
    ("a data file of another save", "columns",
     lambda root, other: shutil.copy(other / "__1_0.distcp", root / "__1_0.distcp"), "error", Code.FILE_DAMAGED, "",
     "fails"),
    ("a moment is missing", "loop", without("lm_head.weight.exp_avg"), "error", Code.STATE_MISSING,
     "exp_avg of lm_head.weight is missing",
     "fails; **silent** with allow_partial_load"),
    ("the states of a param are missing", "loop", without("lm_head.weight.exp_avg", "lm_head.weight.exp_avg_sq",
     "lm_head.weight.step"), "error", Code.STATE_MISSING, "the optimizer states of lm_head.weight are missing",
     "fails; **silent** with allow_partial_load"),
    ("a step is missing", "loop", without("lm_head.weight.step"), "error", Code.STATE_MISSING, "Adam's step of",
     "fails; **silent** with allow_partial_load"),
    ("an option of one param group is missing", "loop", without("param_groups.1.eps"), "error", Code.FIELD_MISSING,
     "eps of param group 1 is missing",
     "fails; **silent** with allow_partial_load"),
    ("a weight is missing", "loop", without("model.lm_head.weight"), "error", Code.STATE_MISSING,
     "the weights of lm_head.weight are missing",
     "fails; **silent** with allow_partial_load"),
    ("a rank's file of a wider save", "loop", lambda root, _: shutil.copy(root / "__1_0.distcp", root / "__5_0.distcp"),
     "warning", Code.FILE_UNKNOWN, "another save wrote to the same folder",
     "loads: not read"),
    ("a later save was not finished", "loop", lambda root, _: (root / ".metadata.tmp").touch(), "warning",
     Code.STEPS_DIFFER, "a later save",
     "loads"),
    ("rounded weights", "loop", round_weights, "warning", Code.WEIGHTS_DTYPE, "fewer bits than their moments",
     "**silent**: fp32 params get rounded values"),
    ("a flipped bit", "loop", flip, "error", Code.CHECKSUM, "does not match its checksum",
     "**silent**"),
    ("the optimizer of another save", "trainer",
     lambda root, _: (shutil.rmtree(root / "optimizer_0"),
                      shutil.copytree(root.parent / "next" / "optimizer_0", root / "optimizer_0")), "error",
     Code.STEPS_DIFFER, "the optimizer's states are from step 4",
     "**silent** (read)"),
    ("a rank's optimizer of another save", "trainer",
     lambda root, _: shutil.copy(root.parent / "next" / "optimizer_0/__1_0.distcp", root / "optimizer_0/__1_0.distcp"),
     "error", Code.STEPS_DIFFER, "the files of the ranks have different steps",
     "**silent** (read)"),
    ("no optimizer", "trainer", lambda root, _: shutil.rmtree(root / "optimizer_0"), "error", Code.FILE_MISSING,
     "the folder is missing",
     "**silent** (read)"),
    ("no weights", "trainer", lambda root, _: shutil.rmtree(root / "pytorch_model_fsdp_0"), "error", Code.FILE_MISSING,
     "the folder is missing",
     "fails (read)"),
    ("no scheduler", "trainer", lambda root, _: (root / "scheduler.pt").unlink(), "error", Code.SCHEDULER_MISSING,
     "neither schedule nor optimizer",
     "**silent**: neither schedule nor optimizer is loaded (read)"),
    ("no trainer state", "trainer", lambda root, _: (root / "trainer_state.json").unlink(), "error", Code.FILE_MISSING,
     "the file is missing",
     "fails (read)"),
    ("a counter that is behind", "trainer", edit("trainer_state.json", global_step=1), "error", Code.STEPS_DIFFER,
     "global_step is 1",
     "**silent** (read)"),
    ("a rank's weights are lost", "hf", lambda root, _: next(root.glob("shard-00001-*")).unlink(), "error",
     Code.FILE_MISSING, "the weights of 1 rank are missing",
     "fails (read)"),
    ("a truncated rank's weights", "hf", lambda root, _: cut(next(root.glob("shard-00001-*"))), "error",
     Code.FILE_DAMAGED, "truncated", "fails (read)"),
    ("a truncated pytorch_model_fsdp.bin", "full", lambda root, _: cut(root / "pytorch_model_fsdp.bin"), "error",
     Code.FILE_DAMAGED, "truncated", "fails (read)"),
    ("a truncated optimizer.bin", "full", lambda root, _: cut(root / "optimizer.bin"), "error", Code.FILE_DAMAGED,
     "truncated", "fails (read)"),
    ("a path to outside", "loop", lambda root, _: (root / ".metadata").write_bytes(
        (root / ".metadata").read_bytes().replace(b"__1_0.distcp", b"/etc/passwd_")), "error", Code.FIELD_RANGE,
     "not a data file", "fails"),
]  # fmt: skip
BARE = [case for case in CASES if case[1] in ("loop", "columns")]


@pytest.mark.parametrize(
    ("run", "damage", "severity", "code", "told"), [c[1:6] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_damage_is_told(trained, tmp_path, run, damage, severity, code, told):
    root = tmp_path / "checkpoint-2"
    shutil.copytree(trained.checkpoint(run), root)
    (tmp_path / "next").symlink_to(trained.checkpoint(run, 4))
    damage(root, trained.checkpoint("loop-w3"))
    verdict = verify_checkpoint(root, deep=True, name="x")
    found = [one for one in verdict.findings if one.code is code and told in one.what]
    assert found, "\n".join(map(str, verdict.findings))
    assert found[0].severity == severity and found[0].fix
    assert verdict.is_resumable == (severity != "error")
    if code in (Code.FILE_MISSING, Code.FILE_DAMAGED, Code.STATE_MISSING):
        with pytest.raises(llmtailor.TailorError):
            llmtailor.merge(Recipe("x", "", root, (), None, None), tmp_path / "out")


def load_with_torch(root: Path, pristine: Path, **options: bool) -> dict[str, Any]:
    """Have ``dcp.load`` fill a state dict with the keys of the pristine checkpoint."""
    state: dict[str, Any] = {}
    planner = dcp.default_planner._EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(state, dcp.FileSystemReader(pristine), planner=planner, no_dist=True)
    dcp.load(state, checkpoint_id=root, no_dist=True, planner=dcp.DefaultLoadPlanner(**options))
    return state


@pytest.mark.parametrize(("run", "damage", "stock"), [(c[1], c[2], c[6]) for c in BARE], ids=[c[0] for c in BARE])
def test_what_torch_does_with_it(trained, tmp_path, run, damage, stock):
    """What the Trainer does takes a training to tell; it was read in its code."""
    root = tmp_path / "checkpoint-2"
    shutil.copytree(trained.checkpoint(run), root)
    damage(root, trained.checkpoint("loop-w3"))
    try:
        load_with_torch(root, trained.checkpoint(run))
    except (Exception, CheckpointException):  # the latter is no Exception
        assert stock.startswith("fails")
    else:
        assert not stock.startswith("fails")
    if "allow_partial_load" in stock:
        load_with_torch(root, trained.checkpoint(run), allow_partial_load=True)


def test_the_page_lists_these_damages():
    page = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
    for title, _, _, severity, _, _, stock in CASES:
        assert f"| DCP: {title} | {severity} | {stock}" in page, title


def test_weights_alone_are_no_checkpoint(trained, tmp_path):
    saved = {"model": {"a.weight": torch.zeros(3)}}
    dcp.save(saved, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(llmtailor.TailorError, match="no optimizer states"):
        verify_checkpoint(tmp_path / "x")
