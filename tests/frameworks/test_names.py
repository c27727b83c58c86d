"""Other names of a run's checkpoints: the tags of one folder of DeepSpeed's, ``step_N``, and Lightning's."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner

from helpers.commands import forget_urls, run_here
from helpers.states import assert_same_states
from llmtailor.checkpoint.step_names import step_of
from llmtailor.cli.main import cli
from llmtailor.errors import SourceError
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import find_latest
from llmtailor.salvage import replace as replacing
from llmtailor.storage.local import with_tag
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from thin.scene import call, folders
from trainings.harness import Runs

pytestmark = pytest.mark.real


@pytest.fixture
def tags(runs: Runs, tmp_path: Path) -> Path:
    """The folder of a loop that saves all of its checkpoints into one, as DeepSpeed's examples do."""
    run = tmp_path / "run"
    for step in (2, 4):
        saved = runs.checkpoint("engine-3", step)
        shutil.copytree(saved / f"global_step{step}", run / f"global_step{step}")
        shutil.copy(saved / "latest", run / "latest")
    return run


def assert_same(out: Path, source: Path) -> None:
    made, saved = index_checkpoint(out), index_checkpoint(source)
    assert (made.framework, made.global_step, made.zero.tag) == ("deepspeed", saved.global_step, saved.zero.tag)
    assert_same_states(made, saved)


def test_each_tag_is_a_checkpoint(tags: Path, runs: Runs, tmp_path: Path) -> None:
    assert [*RunFolder(tags).full()] == [2, 4]
    for step in (2, 4):
        for name in (f"{tags}@global_step{step}", tags / f"global_step{step}"):
            told = call("inspect", name)
            assert (told["global_step"], told["framework"], told["findings"]) == (step, "deepspeed", [])
        assert call("verify", f"{tags}@global_step{step}", "--deep")["verdict"] == RESUMABLE
    assert call("inspect", tags)["global_step"] == 4  # as ``latest`` says
    assert_same(Path(call("convert", f"{tags}@global_step2", tmp_path / "out")["out"]), runs.checkpoint("engine-3"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base_model: {tags}@global_step4\nparts:\n- {{from: {tags}@global_step2, select: [odd]}}\n")
    told = call("merge", recipe, tmp_path / "mixed")
    assert {row["step"] for row in told["parts"]} == {2, 4}
    assert verify_checkpoint(tmp_path / "mixed", deep=True).level == RESUMABLE


def test_a_wrong_tag_is_told_with_the_right_ones(tags: Path) -> None:
    with pytest.raises(SourceError, match=r"has no tag global_step9\n.*are global_step2, global_step4"):
        index_checkpoint(with_tag(Path(f"{tags}@global_step9")))
    with pytest.raises(SourceError, match=r"next to it are global_step2, global_step4"):
        index_checkpoint(tags / "global_step9")


def test_a_tag_at_a_url(tags: Path, runs: Runs, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/run"
    fsspec.filesystem("memory").put(str(tags), url, recursive=True)
    for name in (f"{url}@global_step2", f"{url}/global_step2"):
        forget_urls()
        assert call("inspect", name)["global_step"] == 2
    forget_urls()
    (recipe := tmp_path / "recipe.yaml").write_text(f"base_model: {url}@global_step2\n")
    assert_same(Path(call("merge", recipe, tmp_path / "out")["out"]), runs.checkpoint("engine-3"))
    forget_urls()
    told = run_here("inspect", f"{url}@global_step9")
    assert told.returncode == 4 and f"{url} has no tag global_step9" in told.stderr
    assert "its tags are global_step2, global_step4" in told.stderr


def test_a_folder_of_tags_is_a_run(tags: Path, runs: Runs, tmp_path: Path) -> None:
    assert find_latest(tags).path == tags / "global_step4"
    torn = tags / "global_step4" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    data = torn.read_bytes()
    torn.write_bytes(data[:100])
    assert find_latest(tags).path == tags / "global_step2"
    torn.write_bytes(data)
    call("merge", "--run", tags, tmp_path / "odd", "--strategy", "parity")
    assert verify_checkpoint(tmp_path / "odd", deep=True).level == RESUMABLE
    call("thin", tags, "--strategy", "full", "--keep-full-last", "1", "--yes")
    assert folders(tags) == ["global_step4", "partial/step-00000002"]
    assert not [*(tags / "partial/step-00000002").glob("*.pt")]
    call("merge", "--run", tags, tmp_path / "two", "--at", 2)
    assert_same(tmp_path / "two", runs.checkpoint("engine-3"))


def lose(tags: Path) -> None:
    next((tags / "global_step4").glob("*_rank_1_*_optim_states.pt")).unlink()


def salvage(tags: Path, code: int = 0) -> str:
    told = CliRunner().invoke(cli, ["salvage", str(tags), "--replace"])
    assert told.exit_code == code, told.output
    return told.output


def test_salvage_replaces_a_tag(tags: Path) -> None:
    """What was moved aside is no tag."""
    lose(tags)
    told = salvage(tags)
    assert f'resume with engine.load_checkpoint("{display_name(tags)}", tag="global_step2")' in told
    assert "latest now names global_step2 instead of global_step4" in told
    assert (tags / "latest").read_text() == "global_step2" and find_latest(tags).path == tags / "global_step2"
    assert (tags / "damaged-global_step4").is_dir()
    (tags / "latest").unlink()
    told = CliRunner().invoke(cli, ["verify", str(tags)]).output
    assert "damaged-" not in told and "printf %s global_step2 >" in told
    with pytest.raises(SourceError, match=r"its tags are global_step2$"):
        index_checkpoint(Path(f"{tags}@global_step4"))


def test_latest_is_mended_also_if_the_rest_is_intact(tags: Path) -> None:
    shutil.rmtree(tags / "global_step4")
    assert "latest now names global_step2 instead of global_step4" in salvage(tags)
    assert (tags / "latest").read_text() == "global_step2"
    assert "latest now names" not in salvage(tags)


def test_an_interrupted_replacement_of_a_tag_is_completed(tags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tags / "global_step4" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    monkeypatch.setattr(replacing, "_rewrite_latest", lambda *_: sys.exit(3))
    salvage(tags, code=3)
    monkeypatch.undo()
    assert (tags / "latest").read_text() == "global_step4" and (tags / "damaged-global_step4").is_dir()
    assert "latest now names checkpoint-4/global_step4" in salvage(tags)
    assert (tags / "latest").read_text() == "checkpoint-4/global_step4" and not (tags / replacing.RECORD).exists()
    with pytest.raises(SourceError, match=f"name that checkpoint: {tags / 'checkpoint-4'}"):
        index_checkpoint(tags)
    assert find_latest(tags).path == tags / "checkpoint-4"


def test_a_tag_folder_of_other_clients_is_no_checkpoint(runs: Runs, tmp_path: Path) -> None:
    root = tmp_path / "checkpoint-2"
    shutil.copytree(runs.checkpoint("accelerate-2"), root)
    with pytest.raises(SourceError, match="tag folder inside a checkpoint"):
        index_checkpoint(root / "pytorch_model")
    root = tmp_path / "of-the-trainer"
    shutil.copytree(runs.checkpoint("engine-3"), root)
    (root / "trainer_state.json").write_text('{"global_step": 2, "log_history": []}')
    with pytest.raises(SourceError, match="tag folder inside a checkpoint"):
        index_checkpoint(root / "global_step2")


@pytest.mark.parametrize("newest", ["step=4", "step-4"])
def test_folders_of_a_loop_are_a_run(newest: str, runs: Runs, tmp_path: Path) -> None:
    run, names = tmp_path / "run", ("step_2", newest)
    for step, name in zip((2, 4), names, strict=True):
        shutil.copytree(runs.checkpoint("accelerate-ddp", step), run / name)
    (run / "step_9").mkdir()  # anything else
    assert [path.name for path in RunFolder(run).full().values()] == [*names]
    assert find_latest(run).path == run / newest
    with pytest.raises(SourceError, match=f"name one of step_2, {newest}, step_9 inside it"):
        index_checkpoint(run)
    with pytest.raises(SourceError, match=f"next to it are step_2, {newest}, step_9"):
        index_checkpoint(run / "step_5")
    call("merge", "--run", tmp_path / "run", tmp_path / "out", "--strategy", "parity")
    assert verify_checkpoint(tmp_path / "out", deep=True).level == RESUMABLE


STEP_400 = {f"{before}400" for before in ("checkpoint-", "step-", "step_", "step=", "global_step")}
STEP_400 |= {
    f"{before}step=0400{after}.ckpt"
    for before in ("", "epoch=1-", "llama-epoch=01-")
    for after in ("", "-v1", "-loss=2.31")
}
NAMELESS = "global_step400_universal last.ckpt epoch=3.ckpt checkpoint_3 my-step_4 checkpoint-400-merged "
NAMELESS += "damaged-epoch=1-step=4.ckpt replaced-step=4.ckpt abandoned-llama-epoch=1-step=4.ckpt "
NAMELESS += "abandoned-step=4.ckpt-2 salvaged-checkpoint-4"


@pytest.mark.parametrize("name", [*sorted(STEP_400), *NAMELESS.split()])
def test_the_step_in_a_name(name: str) -> None:
    assert step_of(Path("run") / name) == (400 if name in STEP_400 else None)
