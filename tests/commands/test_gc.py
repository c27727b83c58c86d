"""What gc removes, and what it never does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.checkpoints import make, optim_states
from helpers.files import cut
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.cli.main import cli
from llmtailor.compose import plan, write
from llmtailor.errors import SourceError
from llmtailor.runs import scan
from thin.scene import call, compose, folders, make_run, save_partial, sources, taken

ODD = ["layer 1", "layer 3", "lm_head"]
EVEN = ["layer 0", "layer 2", "norm", "embed_tokens"]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Full checkpoints, from which partial ones are made."""
    return make_run(tmp_path_factory.mktemp("full"), range(100, 600, 100))


@pytest.fixture(scope="module")
def original(tmp_path_factory, full):
    """A base, then the halves in turn."""
    run, ledger = tmp_path_factory.mktemp("partial"), Ledger("saver")
    for step, parts in {100: ODD + EVEN, 200: ODD, 300: EVEN, 400: ODD, 500: EVEN}.items():
        ledger = save_partial(run, full / f"checkpoint-{step}", parts, ledger)
    return run


@pytest.fixture
def run(tmp_path, original):
    return Path(shutil.copytree(original, tmp_path / "run"))


def removed(told: dict) -> list[str]:
    return sorted(Path(row["path"]).name for row in told["removed"])


def test_the_newest_steps_keep_what_they_need(run, tmp_path):
    composites = {step: sources(compose(run, step, tmp_path / f"before-{step}")) for step in (400, 500)}
    before = taken(run)
    assert removed(call("gc", run, "--keep", 1)) == ["step-00000100", "step-00000200", "step-00000300"]
    told = call("gc", run, "--keep", 2, "--yes")
    assert removed(told) == ["step-00000100", "step-00000200"]
    assert told["composable_after"] == [400, 500]
    assert taken(run) == before - told["freed_bytes"]
    for step, wanted in composites.items():
        assert sources(compose(run, step, tmp_path / f"after-{step}")) == wanted
    assert removed(call("gc", run, "--keep", 2, "--yes")) == []
    for step, what in ((350, "no usable checkpoint at or before step 350 holds"), (200, "the first is 300")):
        gone = CliRunner().invoke(cli, ["merge", "--run", str(run), "--at", str(step)])
        assert (gone.exit_code, type(gone.exception)) == (1, SourceError)
        assert what in str(gone.exception)
        assert "use --at with a step that can be composed: 400, 500; or omit it" in str(gone.exception)


@pytest.mark.parametrize("when", ["scan", "plan", "write"])
def test_what_is_deleted_while_a_merge_reads(run, monkeypatch, when):
    """As the saver of a running training does with ``keep_composable``."""
    place = {"scan": (scan, "describe_checkpoint"), "plan": (plan, "plan_merge"), "write": (write, "write")}[when]
    then = getattr(*place)

    def delete(*arguments, **options):
        for step in (100, 200, 300, 400):
            shutil.rmtree(run / "partial" / f"step-00000{step}", ignore_errors=True)
        return then(*arguments, **options)

    monkeypatch.setattr(*place, delete)
    result = CliRunner().invoke(cli, ["merge", "--run", str(run)])
    assert isinstance(result.exception, SourceError)
    [problem] = result.exception.problems
    assert "deleted while they were read" in problem.what and "partial/step-00000100" in problem.what
    assert problem.fix == "rerun the same command"


def test_a_newer_full_checkpoint_takes_nothing_away(run, tmp_path):
    """Rotation deletes it, and the newest step of the partial ones must still be there; a composite counts as full."""
    make(run, 600)
    told = call("gc", run, "--keep", 1)
    assert removed(told) == ["step-00000100", "step-00000200", "step-00000300"]
    assert told["composable_after"] == [500, 600]
    shutil.rmtree(run / "checkpoint-600")
    before = sources(compose(run, 500, run / "checkpoint-500"))
    assert removed(call("gc", run, "--keep", 1, "--yes")) == ["step-00000100", "step-00000200", "step-00000300"]
    shutil.rmtree(run / "checkpoint-500")
    assert sources(compose(run, 500, tmp_path / "again")) == before


def test_nothing_is_removed_where_nothing_can_be_composed(run):
    for step in (100, 200, 300, 400):
        shutil.rmtree(run / "partial" / f"step-00000{step}")
    with pytest.raises(SourceError, match="no step of this run can be composed, so nothing is removed"):
        call("gc", run, "--keep", 1, "--yes")
    assert folders(run) == ["partial/step-00000500"]


def test_it_says_how_old_the_parts_of_each_step_are(run):
    told = call("gc", run, "--keep", 2)
    old = {step: {"steps_back": 100, "parts": parts} for step, parts in ((400, EVEN), (500, ODD))}
    assert [age["step"] for age in told["ages"]] == [400, 500]
    for age in told["ages"]:
        assert age["now"] == age["afterwards"]
        assert age["now"]["steps_back"] == old[age["step"]]["steps_back"]
        assert set(age["now"]["parts"]) == set(old[age["step"]]["parts"])
    text = CliRunner().invoke(cli, ["gc", str(run), "--keep", "2"], catch_exceptions=False).stdout
    assert " 400  100 steps back: embed_tokens, layers 0, 2, norm" in text


def test_a_damaged_older_checkpoint_stays(run):
    bundle = run / "partial" / "step-00000200" / "rank-00001-of-00002.safetensors"
    cut(bundle, 4)
    told = call("gc", run, "--keep", 1)
    assert removed(told) == ["step-00000100", "step-00000300"]
    assert "partial/step-00000200" in told["skipped"][0]["where"]


def test_what_was_never_finished_goes(run, tmp_path):
    partial = run / "partial"
    for name in (
        "step-00000600",
        "step-00000450.abandoned",
        "step-00000450.abandoned-2",
        ".step-00000350.llmtailor-thinning",
    ):
        shutil.copytree(partial / "step-00000500", partial / name)
    (partial / "step-00000600" / "manifest.json").unlink()
    shutil.copytree(partial / "step-00000500", run / ".checkpoint-100.llmtailor-thinned")
    make(run / "made", 700).rename(run / "other")  # not ours
    (run / "made").rmdir()
    before = taken(run)
    told = call("gc", run, "--yes")
    whys = {Path(row["path"]).name: row["why"] for row in told["removed"]}
    assert whys == {
        "step-00000600": "unfinished save",
        "step-00000450.abandoned": "abandoned attempt",
        "step-00000450.abandoned-2": "abandoned attempt",
        ".step-00000350.llmtailor-thinning": "left over from a killed thin",
        ".checkpoint-100.llmtailor-thinned": "left over from a killed thin",
    }
    assert taken(run) == before - told["freed_bytes"]
    assert folders(run) == ["other", *(f"partial/step-00000{step}" for step in (100, 200, 300, 400, 500))]


def test_what_people_have_put_there_stays(run, monkeypatch):
    """Also into saves that are not needed, given up, or did not finish."""
    partial = run / "partial"
    for name in ("step-00000600", "step-00000450.abandoned"):
        shutil.copytree(partial / "step-00000500", partial / name)
    (partial / "step-00000600" / "manifest.json").unlink()
    names = ("step-00000100", "step-00000600", "step-00000450.abandoned")
    for name in names:
        (partial / name / "notes.md").write_text("mine")
    told = call("gc", run, "--keep", 1, "--yes")
    assert removed(told) == ["step-00000200", "step-00000300"]
    reasons = {Path(row["where"]).name: row["what"] for row in told["skipped"]}
    assert reasons == dict.fromkeys(names, "it contains unknown files: notes.md")
    assert all((partial / name / "notes.md").read_text() == "mine" for name in names)


def test_what_a_merge_left_goes_unless_one_is_at_work(tmp_path):
    run = make_run(tmp_path / "run", (100, 200))
    (run / "recipe.yaml").write_text("base_model: checkpoint-200\nparts: [{from: checkpoint-100, select: odd}]\n")
    program = (
        "import sys, llmtailor; from pathlib import Path\n"
        "def wait(*_):\n    print('in', flush=True); input()\n"
        "import llmtailor.compose.write as p; p.check_sources = wait\n"
        "llmtailor.merge(Path(sys.argv[1]) / 'recipe.yaml', Path(sys.argv[1]) / 'out')\n"
    )
    command = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as merge:
        assert merge.stdout.readline() == "in\n"
        told = call("gc", run, "--yes")
        assert (removed(told), [Path(path).name for path in told["in_use"]]) == ([], [".out.llmtailor-staging"])
        merge.kill()
    told = call("gc", run, "--yes")
    assert removed(told) == [".out.llmtailor-staging"]
    assert folders(run) == ["checkpoint-100", "checkpoint-200"]


def test_the_only_copy_of_an_output_stays(tmp_path):
    """A merge was killed while it replaced OUT on a file system that can't exchange folders."""
    run = make_run(tmp_path / "run", (100, 200))
    (run / ".out.llmtailor-staging").mkdir()
    (run / "checkpoint-100").rename(run / ".out.llmtailor-staging" / "old")
    told = call("gc", run, "--yes")
    assert (removed(told), len(told["in_use"])) == ([], 1)


def test_a_dry_run_tells(run):
    result = CliRunner().invoke(cli, ["gc", str(run), "--keep", "1"], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert lines[2].startswith("step-00000100  removed: no step needs it")
    assert lines[5].startswith("step-00000400  stays")
    assert "steps that can be composed afterwards: 500" in lines
    assert "dry run: nothing was changed" in result.stderr
    assert len(folders(run)) == 5


def test_after_thinning(tmp_path):
    """Partial checkpoints made of full ones are not needed by later full ones."""
    run = make_run(tmp_path / "run", (100, 200, 300))
    call("thin", run, "--strategy", "parity", "--yes")
    assert removed(call("gc", run)) == []
    optim = optim_states(run / "checkpoint-300")
    optim.rename(tmp_path / "kept")
    with pytest.raises(SourceError, match="newest checkpoint can't be used"):
        call("gc", run, "--keep", 1)
    (tmp_path / "kept").rename(optim)
    assert removed(call("gc", run, "--keep", 1, "--yes")) == []
    shutil.rmtree(run / "checkpoint-300")
    assert call("gc", run)["composable_after"] == [100, 200]


def test_two_folders_of_one_step(run):
    """Somebody has copied a partial checkpoint under a name with another number of zeros: what the plan names goes."""
    shutil.copytree(run / "partial" / "step-00000200", run / "partial" / "step-000000200")
    assert removed(call("gc", run, "--yes")) == []
    told = call("gc", run, "--keep", 2, "--yes")
    assert removed(told) == ["step-000000200", "step-00000100", "step-00000200"]
    assert folders(run) == [f"partial/step-00000{step}" for step in (300, 400, 500)]
