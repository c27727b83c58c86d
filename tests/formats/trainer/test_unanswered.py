"""Where transformers is not done in time, nothing is known of a checkpoint, and no older one is taken in its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.asking import in_a_fresh_process
from helpers.composing import convert
from helpers.files import contents
from llmtailor.cli.main import cli
from llmtailor.compose import readback
from llmtailor.errors import Unanswered, UsageError
from llmtailor.formats import param_names as model
from llmtailor.timing import too_slow
from saving.loop import Loop
from trainings.alone import finished
from trainings.models import build

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two checkpoints: of the newer one transformers is asked, the older one lists the names of its params."""
    root = tmp_path_factory.mktemp("pristine")
    shutil.copytree(finished().checkpoint(4), root / "checkpoint-4")
    convert(finished().checkpoint(2), root / "checkpoint-2")
    return root


@pytest.fixture
def run(pristine, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(pristine, tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model._describe.cache_clear()
    return Path()


def invoke(*words: str):
    return CliRunner().invoke(cli, words, catch_exceptions=False)


NEWEST = "checkpoint-4"
COMMANDS = [
    ["latest", "."],
    ["verify", NEWEST],
    ["inspect", NEWEST],
    ["convert", NEWEST, "out"],
    ["merge", "--run", "."],
    ["merge", "--run", ".", "--strategy", "parity"],
    ["recipe", "."],
    ["salvage", ".", "-o", "out"],
    ["thin", ".", "--strategy", "full", "--keep-full-last", "1", "--yes"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_stops_instead_of_taking_an_older_checkpoint(run, monkeypatch, command):
    before = contents(run, ".lock")
    monkeypatch.setenv("LLMTAILOR_TIMEOUT", "0")
    with (
        in_a_fresh_process(),
        pytest.raises(Unanswered, match="no result after 0 s; this says nothing about the checkpoint") as caught,
    ):
        invoke(*command)
    (problem,) = caught.value.problems
    assert problem.where == f"{NEWEST}/config.json"
    assert "LLMTAILOR_TIMEOUT" in problem.fix
    assert contents(run, ".lock") == before
    monkeypatch.delenv("LLMTAILOR_TIMEOUT")
    assert invoke(*command).exit_code == 0


def test_a_process_that_is_killed_gives_no_answer_either(run, monkeypatch):
    monkeypatch.setattr(model, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    with in_a_fresh_process(), pytest.raises(Unanswered, match="killed by signal 9"):
        invoke("latest", ".")


def test_transformers_is_asked_once_for_a_config(run, tmp_path, monkeypatch, caplog):
    """Other commands find the answer in the user's cache folder, unless it is damaged or of other versions."""
    caplog.set_level("INFO")
    waits = lambda: len([one for one in caplog.records if one.name == "llmtailor.waiting"])  # noqa: E731
    assert invoke("verify", NEWEST).exit_code == 0 and waits() == 1
    monkeypatch.setenv("LLMTAILOR_TIMEOUT", "0")
    model._describe.cache_clear()
    assert invoke("verify", NEWEST).exit_code == 0 and waits() == 1
    [answer] = (tmp_path / "cache" / "llmtailor" / "models").iterdir()
    monkeypatch.delenv("LLMTAILOR_TIMEOUT")
    for content in (b"{}", b"", b"[" * 100_000, b"null"):
        answer.write_bytes(content)
        model._describe.cache_clear()
        assert invoke("verify", NEWEST).exit_code == 0
    assert waits() == 5 and answer.stat().st_size > 1000
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    model._describe.cache_clear()
    assert invoke("verify", NEWEST).exit_code == 0


def give_up(path, name):
    raise too_slow(name, "verifying it", 0)


def test_a_composite_that_could_not_be_verified_in_time_stays_to_be_gone_on_with(tmp_path, monkeypatch):
    """Nothing asks transformers about a partial checkpoint, or about what is made of it, which lists its tied names."""
    monkeypatch.chdir(tmp_path)
    model._describe.cache_clear()
    Loop(Path("run"), model=build("qwen2", 2, tied=True), policy="full").trained(1)
    monkeypatch.setenv("LLMTAILOR_TIMEOUT", "0")
    with monkeypatch.context() as patch, pytest.raises(Unanswered, match="no result after 0 s"):
        patch.setattr(readback, "verify_checkpoint", give_up)
        invoke("merge", "--run", "run")
    assert not Path("run/checkpoint-1").exists()
    assert Path("run/.checkpoint-1.llmtailor-staging/out/optimizer.pt").exists()
    with in_a_fresh_process():
        done = invoke("merge", "--run", "run")
    assert done.exit_code == 0 and "resuming the merge" in done.output
    assert Path("run/checkpoint-1/optimizer.pt").exists()


@pytest.mark.parametrize("told", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(run, monkeypatch, told):
    monkeypatch.setenv("LLMTAILOR_TIMEOUT", told)
    with pytest.raises(UsageError, match="is not a number of seconds"):
        invoke("latest", ".")
