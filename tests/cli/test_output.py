"""What merge and inspect print: tables for people, JSON for programs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import llmtailor
from helpers.checkpoints import SMALL, make
from helpers.commands import call
from llmtailor.cli.main import cli

RECIPE = "base_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: [odd]}\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    for step in (100, 200):
        make(tmp_path, step, shape=SMALL)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_shows_everything_and_writes_nothing(run):
    before = sorted(run.rglob("*"))
    result = call("merge", "recipe.yaml", "--dry-run")
    assert sorted(run.rglob("*")) == before
    lines = result.stdout.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["layer 1"][2:5] == ["checkpoint-100", "100", "100"]
    assert rows["layer 2"][2:5] == ["checkpoint-200", "200", "0"]
    assert any("optim_states.pt" in line for line in lines)
    assert "free space needed" in lines[-1]
    assert "no rule names embed_tokens, layers 0, 2, norm, lm_head" in result.stderr
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
    assert lines[at].endswith("unless you use --step rebase")
    assert max(number for number, line in enumerate(lines) if line.startswith("lm_head")) < at
    assert "optimizer step" not in call("merge", "recipe.yaml", "rebased", "--step", "rebase").stderr


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
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "global_step": 90}))
    text = call("inspect", "checkpoint-100").stdout
    assert "weights not saved" in text
    odd = [line for line in text.splitlines() if line.startswith("note: ")]
    assert len(odd) == 5
    step = "global_step is 90, but DeepSpeed's is 100"
    for told in ("no scheduler state", "no weights", "no RNG states", step, "log_history continues to step 100"):
        assert any(told in line for line in odd)


def test_a_checkpoint_that_cannot_be_read_has_its_own_exit_code(run):
    told = call("inspect", "nowhere", code=4).stderr
    assert "nowhere: there is no such checkpoint folder" in told and "checkpoint-100" in told


def test_a_composite_in_inspect_shows_the_age_of_its_parts(run):
    call("merge", "recipe.yaml", "out")
    parts = json.loads(call("inspect", "out", "--json").stdout)["parts"]
    assert [part["step"] for part in parts] == [200, 200, 100, 200, 100, 200, 200]
