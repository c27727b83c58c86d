"""What --force replaces: one checkpoint, of which nothing is anybody's own. Anything else stays, whatever is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.checkpoints import make, make_run, model_states, optim_states
from helpers.commands import call
from helpers.files import cut
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.cli.main import cli
from llmtailor.errors import TargetError
from llmtailor.model.parts import Part
from thin.scene import save_partial

RECIPE = "base_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: [odd, norm]}\n"
PARTS = tuple(map(Part, ("embed_tokens", "layer 0", "layer 1", "layer 2", "layer 3", "norm", "lm_head")))


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, and ``old``, a composite of them."""
    root = make_run(tmp_path_factory.mktemp("force"), (100, 200))
    (root / "recipe.yaml").write_text(RECIPE)
    call("merge", root / "recipe.yaml", root / "old", "-q")
    return root


@pytest.fixture
def run(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = Path(shutil.copytree(pristine, tmp_path / "run"))
    monkeypatch.chdir(run)
    return run


def tree(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def refused(run: Path, *command: str) -> str:
    """Run a command, first as a dry run; return what it said. Nothing anywhere may have changed."""
    before = tree(run.parent)
    for words in ([*command, "--force", "--dry-run"], [*command, "--force"]):
        with pytest.raises(TargetError) as told:
            CliRunner().invoke(cli, words, catch_exceptions=False)
        assert tree(run.parent) == before
    return " ".join(str(told.value).split())


def put(*paths: str, text: str = "mine") -> Callable[[Path], None]:
    def change(out: Path) -> None:
        for path in paths:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_text(text)

    return change


def add_checkpoint(out: Path) -> None:
    make(out, 5)


def edit_card(out: Path) -> None:
    with (out / "README.md").open("a") as file:
        file.write("\nThis is the one that we have evaluated.\n")


INTO_A_COMPOSITE = {
    "notes.md": put("notes.md"),
    "eval/": put("eval/results.json"),
    "checkpoint-5/": add_checkpoint,
    "README.md": edit_card,
    ".hidden": put(".hidden"),
    "link": lambda out: (out / "link").symlink_to("/etc"),
    "config.json": lambda out: ((out / "config.json").unlink(), (out / "config.json").symlink_to("/etc/hostname")),
    "empty/": lambda out: (out / "empty").mkdir(),
}


@pytest.mark.parametrize("name", INTO_A_COMPOSITE)
def test_an_old_composite_with_something_in_it_stays(run: Path, name: str) -> None:
    INTO_A_COMPOSITE[name](run / "old")
    said = refused(run, "merge", "recipe.yaml", "old")
    assert f"that no training made: {name}" in said and "fix: move these away" in said


def test_all_that_is_unknown_is_named_at_once(run: Path) -> None:
    put(*(f"notes-{number}.md" for number in range(10)), "eval/x")(run / "old")
    said = refused(run, "merge", "recipe.yaml", "old")
    assert "eval/, notes-0.md" in said and "notes-6.md and 3 more" in said


def test_convert_refuses_the_same(run: Path) -> None:
    put("notes.md")(run / "old")
    assert "notes.md" in refused(run, "convert", "checkpoint-100", "old")


def test_salvage_refuses_the_same(run: Path) -> None:
    put("notes.md")(run / "old")
    cut(model_states(run / "checkpoint-200", 1))
    assert "notes.md" in refused(run, "salvage", ".", "-o", "old")


FOLDERS = {
    "another run": (lambda out: (make(out, 7), make(out, 8)), "checkpoint-7/, checkpoint-8/"),
    "documents": (put("thesis.docx", "photos/1.jpg"), "photos/, thesis.docx"),
    "hidden files": (put(".ssh/id", ".bashrc"), ".bashrc, .ssh/"),
    "a model": (put("model.safetensors", "config.json", "tokenizer.json"), "not a checkpoint: it has weights"),
    "a run's partial folder": (put("partial/step-00000100/manifest.json"), "partial/"),
    "only a readme": (put("README.md"), "README.md"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_checkpoint_stays(run: Path, name: str) -> None:
    change, told = FOLDERS[name]
    (run / "out").mkdir()
    change(run / "out")
    assert told in refused(run, "merge", "recipe.yaml", "out")


@pytest.mark.parametrize("is_finished", [True, False])
def test_partial_checkpoints_stay(run: Path, is_finished: bool) -> None:
    save_partial(run, run / "checkpoint-100", PARTS, Ledger("saver"))
    if not is_finished:
        (run / "partial" / "step-00000100" / "manifest.json").unlink()
    assert "partial checkpoint" in refused(run, "merge", "recipe.yaml", "partial/step-00000100")
    assert "step-00000100/" in refused(run, "merge", "recipe.yaml", "partial")


@pytest.mark.parametrize("name", ["recipe.yaml", "tokenizer.json"])
def test_the_folder_of_the_recipe_stays(run: Path, name: str) -> None:
    """Also if the recipe has the name of a file that trainings save."""
    (run / "old" / name).write_text(RECIPE.replace("checkpoint-", "../checkpoint-"))
    assert f"contains old/{name}" in refused(run, "merge", f"old/{name}", "old")


def test_the_folder_of_other_inputs_stays(run: Path) -> None:
    (run / "old" / "flags.jsonl").write_text('{"step": 100, "flag": [0, 1, 2, 3, 4, 5, 6]}\n')
    assert "flags.jsonl" in refused(run, "merge", "--run", ".", "--from-flags", "old/flags.jsonl", "old")


@pytest.mark.parametrize("out", [".", "..", "/", "old/..", "old/global_step200/.."])
def test_names_of_what_is_above(run: Path, out: str) -> None:
    refused(run, "merge", "recipe.yaml", out)


def test_the_current_folder_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "old" / "global_step200")
    assert "the current folder lies in it" in refused(run, "merge", "../../recipe.yaml", "../../old")


def test_home_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it holds: not even a link to it is followed."""
    home = run.parent / "home"
    (home / "work").mkdir(parents=True)
    (run / "out").symlink_to(home)
    assert "is not a folder" in refused(run, "merge", "recipe.yaml", "out")
    assert "work/" in refused(run, "merge", "recipe.yaml", str(home))


# --- what is replaced ------------------------------------------------------------------------------------------------


def carried(run: Path) -> None:
    """What the base holds, whatever it is, comes with a composite, and the composite's manifest says so."""
    put("modeling.txt")(run / "checkpoint-200")
    call("merge", "recipe.yaml", "old", "--force", "-q")
    assert (run / "old" / "modeling.txt").exists()


OLD = {
    "a composite": lambda run: None,
    "a composite with more": carried,
    "an empty folder": lambda run: (shutil.rmtree(run / "old"), (run / "old").mkdir()),
    "a stock checkpoint": lambda run: (shutil.rmtree(run / "old"), make(run, 300).rename(run / "old")),
    "a damaged one": lambda run: cut(optim_states(run / "old", 0)),
    "half of one": lambda run: [path.unlink() for path in (*(run / "old").glob("global*/*"), run / "old" / "latest")],
    "one without its trainer state": lambda run: (run / "old" / "trainer_state.json").unlink(),
}


@pytest.mark.parametrize("name", OLD)
def test_what_is_replaced(run: Path, name: str) -> None:
    OLD[name](run)
    call("merge", "recipe.yaml", "old", "--force", "-q")
    assert json.loads((run / "old" / "llmtailor.json").read_text())["global_step"] == 200
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-100", "checkpoint-200", "old", "recipe.yaml"]
