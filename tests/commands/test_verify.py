"""``llmtailor verify`` and ``llmtailor latest``: what goes where, and the exit codes."""

from __future__ import annotations

import html
import json
import shutil
import zipfile

import pytest

from helpers.checkpoints import edit, make, make_run, optim_states
from helpers.commands import call
from helpers.files import cut
from llmtailor.findings import ERROR, NOTE, WARNING, Finding, folded


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_run(tmp_path / "run", (90, 100, 1000))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_clean_checkpoint(folder):
    done = call("verify", "run/checkpoint-100")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "run/checkpoint-100: resumable",
        "deepspeed-zero3, step 100, for 2 ranks; structure only, no tensor was read",
        "files only; llmtailor attest run/checkpoint-100 -- PROGRAM compares what your training loads of them",
    ]
    deep = call("verify", "run/checkpoint-100", "--deep")
    assert deep.stderr == ""
    assert "every byte was read" in deep.stdout


def test_warnings_resume(folder):
    (folder / "run/checkpoint-100/rng_state_1.pth").unlink()
    (folder / "run/checkpoint-100/config.json").unlink()
    lines = call("verify", "run/checkpoint-100").stdout.splitlines()
    assert lines[0] == "run/checkpoint-100: resumable with warnings (1 warning, 1 note)"
    assert [line.split(":")[0] for line in lines[2:-1]] == ["warning", "  fix", "note", "  fix"]
    assert lines[-1].startswith("files only; llmtailor attest run/checkpoint-100 -- PROGRAM")


def test_errors_do_not(folder):
    cut(optim_states(folder / "run/checkpoint-100", 1), 50)
    cut(folder / "run/checkpoint-100/scheduler.pt", 50)
    done = call("verify", "run/checkpoint-100", "-vv", code=7)
    assert done.stdout.splitlines()[0] == "run/checkpoint-100: not resumable (2 errors)"
    lines = [line.partition(" ")[2] for line in done.stderr.splitlines()]
    assert [line for line in lines if line.startswith("damaged file: ")] == [
        "damaged file: global_step100/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "damaged file: scheduler.pt",
    ]
    assert "damaged state: exp_avg of model.norm.weight, elements 3-5" in lines
    assert call("verify", "run/checkpoint-100", code=7).stderr == ""


def test_findings_of_one_kind_are_one_line(folder):
    """Two are not; the counts and the JSON know each of them."""
    checkpoint = make(folder / "of-5", 100, world_size=5)
    for rank in range(1, 5):
        (checkpoint / f"rng_state_{rank}.pth").unlink()
    for rank in range(2):
        cut(optim_states(checkpoint, rank), 50)
    lines = call("verify", checkpoint, code=7).stdout.splitlines()
    assert lines[0].endswith("not resumable (2 errors, 4 warnings)")
    assert [line.split(":")[0] for line in lines[2:]] == ["error", "  fix"] * 2 + ["warning", "  fix"]
    assert lines[-2].endswith("is missing; the same for rng_state_2.pth, rng_state_3.pth and 1 more")
    assert len(json.loads(call("verify", checkpoint, "--json", code=7).stdout)["findings"]) == 6


def test_one_word_that_differs_makes_one_kind():
    def lacks(rank, kind, param, severity=NOTE):
        return Finding("a", f"rank {rank} lacks {kind} of {param}", f"give {param} a {kind}", severity=severity)

    kinds = [(rank, kind) for rank in range(2) for kind in ("exp_avg", "exp_avg_sq")]
    every = [lacks(rank, kind, f"p.{number}") for rank, kind in kinds for number in range(4)]
    expected = [f"rank {rank} lacks {kind} of p.0; the same for p.1, p.2 and 1 more" for rank, kind in kinds]
    assert [one.what for one in folded(every)] == expected
    assert [one.fix for one in folded(every)] == [f"give p.0 a {kind}" for _, kind in kinds]
    apart = [lacks(0, "exp_avg", f"p.{at}", severity) for at, severity in enumerate((ERROR, WARNING, NOTE))]
    assert folded(apart) == apart and folded([apart[0]] * 9) == apart[:1]


def test_json(folder):
    edit(
        optim_states(folder / "run/checkpoint-100", 0),
        lambda tree: tree["optimizer_state_dict"]["fp32_flat_groups"][1].detach().__setitem__(0, float("inf")),
    )
    content = json.loads(call("verify", "run/checkpoint-100", "--deep", "--json", code=7).stdout)
    assert (content["verdict"], content["resumable"], content["deep"]) == ("not resumable", False, True)
    first = "model.layers.0.input_layernorm.weight"
    assert content["damaged_states"] == [
        {"param": first, "kind": kind, "elements": [[0, 1]]} for kind in ("master", "weight")
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["verify", "nowhere"], 4, "there is no such checkpoint folder"),
        (["verify", "run"], 4, "this is a run's folder"),
        (["verify", "run/checkpoint-100/global_step100"], 4, "the tag folder inside a checkpoint"),
        (["verify"], 2, "Missing argument"),
        (["latest", "nowhere"], 4, "the folder does not exist"),
        (["latest", "run/checkpoint-100"], 7, "it has no checkpoint"),
        (["latest", "run", "--at", "80"], 7, "it has no checkpoint at or before step 80"),
    ],
)
def test_wrong_calls(folder, arguments, code, told):
    done = call(*arguments, code=code)
    assert done.stdout == ""
    assert told in done.stderr


def test_the_newest_is_the_one_with_the_highest_number(folder):
    done = call("latest", "run")
    assert (done.stdout, done.stderr) == ("run/checkpoint-1000\n", "")
    assert call("latest", "run", "--at", "999").stdout == "run/checkpoint-100\n"


def test_newer_ones_that_do_not_verify_are_passed_over_with_the_reason(folder):
    cut(optim_states(folder / "run/checkpoint-1000"), 50)
    (folder / "run/checkpoint-2000").mkdir()  # not yet written
    (folder / "run/checkpoint-100/rng_state_0.pth").unlink()
    done = call("latest", "run")
    assert done.stdout == "run/checkpoint-100\n"
    for told in (
        *("run/checkpoint-2000: not resumable", "run/checkpoint-1000: not resumable", "truncated"),
        *("run/checkpoint-100: resumable with warnings", "the RNG state of this rank is missing"),
    ):
        assert told in done.stderr


def test_deep_passes_over_what_structure_would_take(folder):
    def spoil(tree):
        tree["optimizer_state_dict"]["fp32_flat_groups"][0].detach()[0] = float("nan")

    edit(optim_states(folder / "run/checkpoint-1000"), spoil)
    assert call("latest", "run").stdout == "run/checkpoint-1000\n"
    assert call("latest", "run", "--deep").stdout == "run/checkpoint-100\n"


def test_none_at_all(folder):
    for step in (90, 100, 1000):
        (folder / f"run/checkpoint-{step}/latest").unlink()
    done = call("latest", "run", code=7)
    assert done.stdout == ""
    assert "none of the 3 checkpoints is resumable" in done.stderr
    content = json.loads(call("latest", "run", "--json", code=7).stdout)
    assert (content["path"], content["verdict"]) == (None, None)
    assert [verdict["global_step"] for verdict in content["passed_over"]] == [1000, 100, 90]


def deflate(path):
    """Write a torch file compressed, which stock reads and llmtailor doesn't."""
    with zipfile.ZipFile(path) as source:
        content = [(info.filename, source.read(info)) for info in source.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in content:
            target.writestr(name, data)


def test_what_can_not_be_judged_is_neither_called_damaged_nor_passed_over(folder):
    deflate(optim_states(folder / "run/checkpoint-1000"))
    done = call("latest", "run", code=4)
    assert done.stdout == "" and "restart" not in done.stderr and "not resumable" not in done.stderr
    assert "run/checkpoint-1000: can't be judged (1 warning)" in done.stderr
    assert "so no older checkpoint is printed" in done.stderr
    content = json.loads(call("latest", "run", "--json", code=4).stdout)
    assert (content["path"], [one["verdict"] for one in content["passed_over"]]) == (None, ["can't be judged"])
    assert call("latest", "run", "--at", "999").stdout == "run/checkpoint-100\n"
    for words in ([], ["--replace"]):
        assert "so nothing older is salvaged in its place" in call("salvage", "run", *words, code=4).stderr
    assert "damaged-checkpoint-1000" not in [path.name for path in (folder / "run").iterdir()]
    call("report", "run", "--output", "page.html")
    page = (folder / "page.html").read_text()
    assert "? can't be judged" in html.unescape(page) and "not resumable" not in page


def test_newer_partial_checkpoints_are_told_of(folder):
    """The path stays the newest that a stock resume can read; a composite would lose fewer steps."""
    for step in (100, 1000):
        (folder / f"run/partial/step-{step:08}").mkdir(parents=True)
        (folder / f"run/partial/step-{step:08}/manifest.json").touch()
    (folder / "run/partial/step-00002000").mkdir()  # a save that did not finish
    assert call("latest", "run").stderr == ""
    done = call("latest", "run", "--at", "999")
    assert (done.stdout, done.stderr) == ("run/checkpoint-100\n", "")
    shutil.rmtree(folder / "run/checkpoint-1000")
    done = call("latest", "run", "--at", "1500")
    assert done.stdout == "run/checkpoint-100\n"
    assert "run/partial/step-00001000 is newer" in done.stderr
    assert "llmtailor merge --run run --at 1500" in done.stderr
    for step in (90, 100):
        shutil.rmtree(folder / f"run/checkpoint-{step}")
    told = call("latest", "run", code=7).stderr
    assert "fix: compose one: llmtailor merge --run run; or restart" in told
    content = json.loads(call("latest", "run", "--json", code=7).stdout)
    assert content["newer_partial"] == "run/partial/step-00001000"
