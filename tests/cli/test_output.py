"""What merge and inspect print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import logging
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import llmtailor
from helpers.checkpoints import SMALL, make_run
from helpers.commands import as_it_was, call, on_terminal
from helpers.files import cut, edit_json
from helpers.states import read
from llmtailor.cli.main import cli
from llmtailor.copying.staging import Staging
from llmtailor.errors import Interrupted
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import State

RECIPE = "base_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: [odd]}\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    make_run(tmp_path, (100, 200))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_shows_everything_and_writes_nothing(run):
    before = sorted(run.rglob("*"))
    command = ("merge", "recipe.yaml", "--dry-run")
    result = call(*command)
    assert sorted(run.rglob("*")) == before
    lines = result.stdout.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["layer 1"][2:5] == ["checkpoint-100", "100", "100"]
    assert rows["layer 2"][2:5] == ["checkpoint-200", "200", "0"]
    assert any("optim_states.pt" in line for line in lines)
    assert "free space needed" in lines[-1]
    assert "no rule names" not in result.stderr
    assert "no rule names embed_tokens, layers 0, 2, norm, lm_head" in call("-v", *command).stderr
    assert "checkpoint-200-merged" in lines[0]


@pytest.mark.parametrize(("first", "last", "is_noted"), [(100, 200, True), (200, 100, True), (200, 200, False)])
def test_a_merge_says_where_mergekit_takes_embeddings_and_head_from_other_slices(run, first, last, is_noted):
    slices = f"""base_model: checkpoint-200
slices:
  - sources: [{{model: checkpoint-{first}, layer_range: [0, 2]}}]
  - sources: [{{model: checkpoint-{last}, layer_range: [2, 4]}}]
"""
    note = "mergekit takes the embeddings from the first slice, norm and head from the last"
    for parts, noted in (("", is_noted), ("parts: [{from: checkpoint-100, select: '!layers'}]", False)):
        (run / "recipe.yaml").write_text(slices + parts)
        assert (note in " ".join(call("merge", "recipe.yaml", "--dry-run").stderr.split())) is noted


def test_the_default_output_is_beside_the_base(run):
    call("merge", "recipe.yaml")
    assert (run / "checkpoint-200-merged" / "latest").exists()
    (run / "recipe.yaml").write_text(RECIPE + "output: elsewhere/out\n")
    call("merge", "recipe.yaml")
    assert (run / "elsewhere" / "out" / "latest").exists()
    call("merge", "recipe.yaml", "told")
    assert (run / "told" / "latest").exists()


def test_the_json_of_a_plan(run):
    plan = json.loads(call("merge", "recipe.yaml", "--dry-run", "--json").stdout)
    assert [row["part"] for row in plan["parts"]] == [
        "embed_tokens", "layer 0", "layer 1", "layer 2", "layer 3", "norm", "lm_head",
    ]  # fmt: skip
    assert plan["num_bytes"] == sum(file["num_bytes"] for file in plan["files"])
    merged = call("merge", "recipe.yaml", "out", "--json")
    assert json.loads(merged.stdout)["out"] == "out"
    assert "wrote out" in merged.stderr and "\r" not in merged.stderr  # no bar: it is no terminal


def test_the_manifest_and_the_card_say_what_it_is_made_of(run):
    assert call("merge", "recipe.yaml", "out", "--quiet").stdout == "wrote out\n"
    manifest = json.loads((run / "out" / "llmtailor.json").read_text())
    assert manifest["recipe"]["text"] == RECIPE
    assert manifest["llmtailor_version"] == llmtailor.__version__
    assert len({row["digest"] for row in manifest["parts"]}) == 7
    card = (run / "out" / "README.md").read_text()
    assert "| layer 1 | `checkpoint-100` | 100 | 100 |" in card
    assert "Composite training checkpoint at step 200" in card


@pytest.mark.parametrize(("stage", "told"), [("1", "and DeepSpeed:"), ("none", "without DeepSpeed:")])
def test_the_card_says_what_resumes_it(run, stage, told):
    call("convert", "checkpoint-100", "out", "--stage", stage, "--quiet", "--num-gpu", "1")
    card = (run / "out" / "README.md").read_text()
    assert told in card
    assert ("master weights" in card) == (stage != "none")
    assert "from 1 checkpoint of" in card and "on 1 rank with" in card


def test_what_adams_step_does_is_said_in_one_line_below_the_table(run):
    done = CliRunner().invoke(cli, ["merge", "recipe.yaml", "out"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    [at] = [number for number, line in enumerate(lines) if "optimizer step" in line]
    assert lines[at].endswith("--step rebase corrects that")
    assert max(number for number, line in enumerate(lines) if line.startswith("lm_head")) < at
    assert "optimizer step" not in call("merge", "recipe.yaml", "rebased", "--step", "rebase").stderr


def test_of_a_run_the_first_update_is_made_right(run):
    """Nobody has chosen whose step counts, so nobody is told to choose again."""
    parity = ("merge", "--run", ".", "--strategy", "parity")
    told = call(*parity, "chosen").stderr
    assert "optimizer step" not in told and "no rule names" not in told
    call(*parity, "rebased", "--step", "rebase")
    call(*parity, "unchanged", "--step", "base")
    chosen, rebased, unchanged = (index_checkpoint(run / name) for name in ("chosen", "rebased", "unchanged"))
    state = State("model.layers.1.mlp.up_proj.weight", "exp_avg")
    assert torch.equal(read(chosen.root, chosen.held[state]), read(rebased.root, rebased.held[state]))
    assert not torch.equal(read(chosen.root, chosen.held[state]), read(unchanged.root, unchanged.held[state]))


def test_inspect(run):
    text = call("inspect", "checkpoint-100").stdout
    assert text.splitlines()[0] == "checkpoint-100: deepspeed-zero3 (ZeRO stage 3), step 100, saved by 2 ranks"
    assert "torch AdamW at step 100" in text
    assert "nothing is missing or unusual" in text
    content = json.loads(call("inspect", "checkpoint-100", "--json").stdout)
    params = SMALL.params()
    numel = sum(a * (b[0] if b else 1) for a, *b in params.values())
    assert content["num_params"] == numel
    assert content["num_layers"] == 4
    assert sum(part["num_bytes"] for part in content["parts"]) == numel * (2 + 4 + 4 + 4)
    assert [group["weight_decay"] for group in content["param_groups"]] == [0.1, 0.0]


def test_inspect_says_what_is_odd(run):
    checkpoint = run / "checkpoint-100"
    for path in [checkpoint / "scheduler.pt", checkpoint / "model.safetensors", *checkpoint.glob("rng_state_*")]:
        path.unlink()
    edit_json(checkpoint / "trainer_state.json", lambda state: {**state, "global_step": 90})
    text = call("inspect", "checkpoint-100").stdout
    assert "weights not saved" in text
    odd = [line for line in text.splitlines() if line.startswith("note: ")]
    assert len(odd) == 5
    step = "global_step is 90, but DeepSpeed's is 100"
    for told in ("no scheduler state", "no weights", "no RNG states", step, "log_history continues to step 100"):
        assert any(told in line for line in odd)


def test_a_composite_in_inspect_shows_the_age_of_its_parts(run):
    call("merge", "recipe.yaml", "out")
    parts = json.loads(call("inspect", "out", "--json").stdout)["parts"]
    assert [part["step"] for part in parts] == [200, 200, 100, 200, 100, 200, 200]


# --- ``-v``: what it tells, where it may stand, and that nothing else changes by it ----------------------------------

LINE = re.compile(r"\d\d:\d\d:\d\d (.*)")
STAGES = [
    "indexed checkpoint-200 in", "indexed checkpoint-100 in", "the base is checkpoint-200, as the recipe says",
    "planned 13 files", "writing in", "wrote 13 files", "checked that the sources are unchanged", "verified out in",
    "verified what was written in", "published",
]  # fmt: skip


def told(stderr: str) -> list[str]:
    return [match[1] for line in stderr.splitlines() if (match := LINE.fullmatch(line))]


def begins(lines: list[str], beginnings: list[str]) -> bool:
    """Whether there are lines that begin so, in that order."""
    rest = iter(lines)
    return all(any(line.startswith(beginning) for line in rest) for beginning in beginnings)


@pytest.mark.parametrize("verbose", [["-v", "merge"], ["merge", "-v"], ["merge", "--verbose"], ["-v", "merge", "-v"]])
def test_it_names_the_stages_wherever_it_stands(run, verbose):
    command, *after = verbose[verbose.index("merge") :]
    lines = told(call(*verbose[: verbose.index("merge")], command, "recipe.yaml", "out", *after).stderr)
    assert begins(lines, STAGES), lines
    assert any(line.startswith("model.safetensors: 6,476 bytes, CRC-32 ") for line in lines)


def test_nothing_else_changes(run):
    plain, verbose = (call("merge", "recipe.yaml", "out", "--force", *words) for words in ([], ["-vv"]))
    assert told(plain.stderr) == []
    assert verbose.stdout == plain.stdout
    assert [line for line in verbose.stderr.splitlines() if not LINE.fullmatch(line)] == plain.stderr.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ["merge", "recipe.yaml", "out"], ["convert", "checkpoint-100"], ["inspect", "checkpoint-100"],
        ["verify", "checkpoint-100"], ["latest", "."], ["salvage", "."], ["thin", ".", "--strategy", "parity"],
        ["gc", "."],
    ],
)  # fmt: skip
def test_json_stays_json(run, arguments):
    result = call(*arguments, "--json", "-vv")
    assert json.loads(result.stdout)
    assert told(result.stderr)


def test_why_a_part_comes_from_where(run):
    (run / "checkpoint-100" / "latest").write_text("nowhere")
    lines = told(call("recipe", ".", "-v").stderr)
    assert "embed_tokens, layers 0-3, norm, lm_head from checkpoint-200: newest" in lines
    lines = told(call("recipe", ".", "-v", "--strategy", "filter", "--every", "1").stderr)
    assert any(line.startswith("skipped checkpoint-100/latest: it points to") for line in lines), lines


def test_what_a_journal_is_worth(run, monkeypatch):
    """A merge that was interrupted behind a mark; the file it marked is damaged since."""

    def end(staging):
        raise Interrupted.at("", "killed", "")

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Staging, "publish", end)
        llmtailor.merge(Path("recipe.yaml"), Path("out"))
    weights = run / ".out.llmtailor-staging" / "out" / "model.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    lines = told(call("merge", "recipe.yaml", "out", "-v").stderr)
    assert "model.safetensors: the content up to byte 6476 does not match the journal" in lines
    assert "scheduler.pt: 1465 of 1465 bytes are there and match the journal" in lines


def test_thin_and_gc_say_what_goes_and_why(run):
    lines = told(call("thin", ".", "--strategy", "parity", "--yes", "-v").stderr)
    assert begins(lines, ["wrote partial/step-00000100", "read it back in", "removing checkpoint-100: step 100 can be"])
    assert "checkpoint-200 stays: it is one of the newest" in lines
    (run / "partial" / "step-00000050.abandoned").mkdir()
    lines = told(call("gc", ".", "--keep", "1", "--yes", "-v").stderr)
    assert "step-00000100: needed" in lines
    gone = "step-00000050.abandoned: abandoned attempt"
    assert any(line.endswith(gone) and line.startswith("removed") for line in lines)


def test_the_log_stands_above_the_bar(run):
    """On a terminal each line is whole, whatever the bar does."""
    shown = on_terminal("-v", "merge", "recipe.yaml", "out")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
    assert "writing" in shown and "/s" in shown
    lines = told(shown)
    assert begins(lines, STAGES), shown
    assert [line for line in lines if line.startswith("latest: 14 bytes, CRC-32 5f46f5fe, in ")]


@pytest.mark.parametrize("verbose", [["-vv", "verify"], ["-v", "verify", "-v"]])
def test_twice_says_more(run, verbose):
    shards = sorted((run / "checkpoint-100").glob("*/*optim_states.pt"))
    cut(shards[1], 100)
    for arguments, wanted in ((["verify", "-v"], False), (verbose, True)):
        lines = told(call(*arguments, "checkpoint-100", code=7).stderr)
        assert any(line.startswith("damaged file: global_step100/") for line in lines)
        assert any(line.startswith("damaged state: ") for line in lines) is wanted


def test_names_in_hostile_files_can_not_play_with_the_terminal(run):
    with redirect_stderr(StringIO()) as stderr, as_it_was():
        cli.main(["-v", "latest", "."], standalone_mode=False)
        logging.getLogger("llmtailor.any").info("skipped %s", "\x1b[2J\nerror: x")
    assert told(stderr.getvalue())[-1] == r"skipped \x1b[2J\nerror: x"


def test_a_library_user_sees_it_by_own_logging_and_gets_no_handler(run, caplog, monkeypatch, capfd):
    monkeypatch.setattr(logging.getLogger("llmtailor"), "handlers", [])
    with caplog.at_level(logging.INFO, logger="llmtailor"):
        llmtailor.merge(Path("recipe.yaml"), Path("out"))
    assert begins([record.getMessage() for record in caplog.records], STAGES)
    assert logging.getLogger("llmtailor").handlers == []
    assert capfd.readouterr().err == ""


def test_a_folder_of_another_kind_is_answered_with_the_command_for_it(tmp_path, monkeypatch):
    """Names are quoted for the shell."""
    run = make_run(tmp_path / "my run", (100, 200))
    call("thin", run, "--strategy", "full", "--yes")
    monkeypatch.chdir(tmp_path)
    for inside in ("partial", "partial/step-00000100", "checkpoint-200", "checkpoint-200/global_step200"):
        told = call("merge", "--run", f"my run/{inside}", code=4).stderr
        assert "name the folder of the run: 'my run'" in told
    told = call("merge", "my run/checkpoint-200", code=3).stderr
    assert "use llmtailor convert 'my run/checkpoint-200', or for a run llmtailor merge --run RUN_DIR" in told
    told = call("verify", "my run/checkpoint-100", code=4).stderr
    assert "llmtailor thin may have replaced it" in told and "my run/partial/step-00000100" in told
    (run / "checkpoint-200" / "latest").unlink()
    assert "llmtailor merge --run 'my run'" in call("latest", "my run", code=7).stderr
    told = call("merge", "--run", "my run", "--at", 100, "--dry-run", "-q")
    assert told.stdout == ""
