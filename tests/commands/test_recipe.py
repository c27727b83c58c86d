"""From a run's folder to a recipe and to a composite, in one command or two."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from subprocess import CompletedProcess

import pytest

import llmtailor
from helpers.checkpoints import SMALL, make, make_run, optim_states
from helpers.commands import call
from helpers.places import ROOT

STEPS = (100, 110, 120, 130, 140)
PARTS = ["embed_tokens", "layer 0", "layer 1", "layer 2", "layer 3", "norm", "lm_head"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = make_run(tmp_path / "run", STEPS)
    (root / "checkpoint-best").mkdir()  # no checkpoint-N
    (root / "logs").mkdir()
    return root


def steps_of(*arguments: str) -> list[int]:
    """Write a recipe, plan with it, and return the step of each part; `merge --run` must plan the same."""
    call("recipe", *arguments, "-o", "recipe.yaml", "--force")
    plan, at_once = (
        [(row["part"], row["step"], row["staleness"]) for row in json.loads(call("merge", *words).stdout)["parts"]]
        for words in (("recipe.yaml", "--dry-run", "--json"), ("--run", *arguments, "--dry-run", "--json"))
    )
    assert plan == at_once and [part for part, _, _ in plan] == PARTS
    return [step for _, step, _ in plan]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--strategy", "latest", "--at", "125"], [120] * 7),
        (["--strategy", "parity", "--flip", "--at", "130"], [130, 120, 130, 120, 130, 130, 130]),
        (["--strategy", "filter", "--first", "1", "--last", "1", "--every", "3"], [140, 140, 120, 120, 140, 140, 140]),
    ],
)
def test_strategies(run, arguments, steps):
    assert steps_of("run", *arguments) == steps


def test_the_update_log(run):
    """LLMTailor's numbering for four layers, untied: 0 norm, 1..4 layers, 5 lm_head, 6 embed_tokens."""
    lines = [(110, [1, 2, 6]), (120, [0, 3, 4]), (130, [2, 5]), (140, [0, 1, 2, 3, 4, 5, 6])]
    text = "".join(json.dumps({"step": step, "flag": ids}) + "\n" for step, ids in lines)
    (run.parent / "flags.jsonl").write_text(text)
    arguments = ["run", "--from-flags", "flags.jsonl", "--base", "run/checkpoint-100"]
    at_130 = [110, 110, 130, 120, 120, 120, 130]
    assert steps_of(*arguments, "--at", "130", "--total-layers", "4") == at_130
    assert steps_of(*arguments, "--at", "115") == [110, 110, 110, 100, 100, 100, 100]
    assert steps_of(*arguments, "--at", "200") == [140] * 7
    assert "lm_head" in (run.parent / "recipe.yaml").read_text()
    base_outside = run.parent / "elsewhere"
    (run / "checkpoint-100").rename(base_outside)
    outside = ["run", "--from-flags", "flags.jsonl", "--base", "elsewhere", "--at", "115"]
    assert steps_of(*outside) == [110, 110, 110, 100, 100, 100, 100]


def test_unusable_checkpoints_are_skipped_and_named(run):
    optim_states(run / "checkpoint-140").unlink()
    shutil.rmtree(run / "checkpoint-120")
    make(run, 120, shape=replace(SMALL, num_layers=3))
    (run / "checkpoint-110" / "latest").write_text("nowhere")
    (run / "checkpoint-90").mkdir()
    (run / "checkpoint-95").symlink_to(run / "checkpoint-100")
    text = call("recipe", "run", "--strategy", "parity").stdout
    skipped = [line for line in text.splitlines() if "skipped" in line]
    for told in ("checkpoint-140", "checkpoint-120", "checkpoint-110", "checkpoint-90", "checkpoint-95"):
        assert any(told in line for line in skipped), told
    assert "shard 0 of 2 is missing" in " ".join(text.replace("#", " ").split())  # the head is wrapped
    assert any("its name says step 95, but its content is of step 100" in line for line in skipped)
    assert steps_of("run", "--strategy", "parity") == [130, 130, 100, 130, 100, 130, 130]


def test_a_save_that_did_not_finish_is_named(run):
    for step in STEPS:
        shutil.rmtree(run / f"checkpoint-{step}")
    (run / "partial" / "step-00000100").mkdir(parents=True)
    told = call("merge", "--run", "run", code=4).stderr
    assert "run/partial/step-00000100: there is no manifest.json: the save did not finish" in told


def test_merge_run_writes_the_composite(run):
    told = call("merge", "--run", "run", "--strategy", "parity", "--at", "130", "out").stderr
    assert "no rule names" not in told  # of a recipe that the user has not seen
    manifest = json.loads((run.parent / "out" / "llmtailor.json").read_text())
    assert [row["step"] for row in manifest["parts"]] == [130, 130, 120, 130, 120, 130, 130]
    assert "parity" in manifest["recipe"]["text"]
    call("merge", "--run", "run", "--strategy", "parity")
    assert (run / "checkpoint-140-merged" / "latest").exists()


def test_merge_run_writes_nothing_where_the_newest_has_it_all(run):
    before = sorted(run.iterdir())
    for how in ([], ["--dry-run"], ["--json"]):
        result = call("merge", "--run", "run", *how)
        told = "run/checkpoint-140 is complete and has the newest state of every part: nothing to merge"
        assert told in (result.stderr if how else result.stdout)
    plan = json.loads(result.stdout)
    assert (run.parent / plan["out"], plan["is_there_already"]) == (run / "checkpoint-140", True)
    assert sorted(run.iterdir()) == before
    plan = json.loads(call("merge", "--run", "run", "--num-gpu", "3", "--json").stdout)
    assert (run.parent / plan["out"] / "latest").exists() and not plan["is_there_already"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["recipe"], 2, "RUN_DIR or --explain"),
        (["recipe", "run", "--explain", "x.yaml"], 2, "RUN_DIR or --explain"),
        (["recipe", "run", "--strategy", "prity"], 2, "prity"),
        (["recipe", "run", "--total-layers", "4"], 2, "--from-flags"),
        (["recipe", "run", "--from-flags", "f", "--strategy", "parity"], 2, "can't be combined"),
        (["recipe", "run", "--from-flags", "missing.jsonl", "--at", "130"], 3, "missing.jsonl"),
        (["recipe", "nowhere"], 4, "the folder does not exist"),
        (["recipe", "run/logs"], 4, "the folder has no checkpoint"),
        (["recipe", "run", "--at", "50"], 4, "the first is 100"),
        (["recipe", "run", "--strategy", "filter", "--every", "9"], 3, "--every"),
        (["recipe", "run", "-o", "list.json"], 6, "--force"),
        (["merge", "recipe.yaml", "--strategy", "parity"], 2, "--run"),
        (["merge", "recipe.yaml", "out", "--run", "run"], 2, "CONFIG"),
    ],
)
def test_bad_arguments(run, arguments, code, told):
    (run.parent / "list.json").write_text("[1]")
    result = call(*arguments, code=code)
    assert told in result.stderr
    assert result.stdout == ""


def test_a_bad_log_is_told_with_its_lines(run):
    for lines, told in ((["[99]", "nonsense"], ["flags.jsonl:2"]), (["[99]", "[1]"], ["99", "flags.jsonl:2", "115"])):
        text = "".join(f'{{"step": {110 + 5 * at}, "flag": {line}}}\n' for at, line in enumerate(lines))
        (run.parent / "flags.jsonl").write_text(text)
        stderr = call("recipe", "run", "--from-flags", "flags.jsonl", "--at", "130", code=3).stderr
        assert all(words in stderr for words in told), stderr


def test_explain_writes_the_normal_form_of_the_originals_yaml(run, monkeypatch):
    """It plans the same, and is a recipe of its own."""
    monkeypatch.setenv("RUN", str(run))
    config = ROOT / "configs" / "llmtailor-original.yaml"
    text = (
        config.read_text().replace("checkpoint-10\n", "checkpoint-100\n").replace("checkpoint-20\n", "checkpoint-120\n")
    )
    (run.parent / "original.yaml").write_text(text)
    normal = call("recipe", "--explain", "original.yaml", "-o", "normal.yaml")
    assert "wrote normal.yaml" in normal.stderr
    explained = (run.parent / "normal.yaml").read_text()
    assert "parts:" in explained
    assert "slices" not in explained.replace("# ", "#").split("merge_method")[1]
    plans = [llmtailor.plan_merge(run.parent / name, run.parent / "out") for name in ("original.yaml", "normal.yaml")]
    assert plans[0].report.parts == plans[1].report.parts
    assert plans[0].report.base == plans[1].report.base
    assert call("recipe", "--explain", "original.yaml").stdout.count("merge_method: passthrough") == 1


def test_explain_of_a_bad_recipe(run):
    (run.parent / "bad.yaml").write_text(
        "base_model: run/checkpoint-100\nparts: [{from: run/checkpoint-7, select: 77}]\n"
    )
    assert "checkpoint-7" in call("recipe", "--explain", "bad.yaml", code=4).stderr


SPLIT = """
base_model: run/checkpoint-140
slices:
  - sources: [{model: run/checkpoint-100, layer_range: [0, 0]}]
post_weights:
  - {name: model.norm.weight, model: run/checkpoint-120}
"""


def test_weights_and_optimizer_from_different_checkpoints(run):
    (run.parent / "split.yaml").write_text(SPLIT)
    assert "--allow-split" in call("merge", "split.yaml", "out", code=3).stderr
    assert "norm" in call("merge", "split.yaml", "out", "--allow-split").stderr
    composition = llmtailor.plan_merge(run.parent / "split.yaml", run.parent / "x", llmtailor.Options(allow_split=True))
    rows = {(row.part, row.step): row for row in composition.report.parts if row.part == "norm"}
    assert set(rows) == {("norm", 100), ("norm", 120)}
    numel = SMALL.hidden_size
    assert rows["norm", 100].num_bytes == 3 * 4 * numel
    assert rows["norm", 120].num_bytes == 2 * numel


def test_tokenizer_files(run):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (run / "checkpoint-140" / name).write_text(f"base's {name}")
    (run / "checkpoint-100" / "tokenizer.json").write_text("another")

    def merged(more: str, *options: str, code: int = 0) -> CompletedProcess[str]:
        (run.parent / "recipe.yaml").write_text(f"base_model: run/checkpoint-140\n{more}")
        shutil.rmtree(run.parent / "out", ignore_errors=True)
        return call("merge", "recipe.yaml", "out", *options, code=code)

    def files(*words: str):
        merged(*words)
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        return [path.read_text() if (path := run.parent / "out" / name).exists() else None for name in names]

    assert files("") == ["base's tokenizer.json", "base's tokenizer_config.json", "base's chat_template.jinja"]
    assert files("", "--no-copy-tokenizer") == [None, None, None]
    other = "tokenizer_source: run/checkpoint-100\nchat_template: '{{ messages }}'\n"
    assert files(other) == ["another", None, "{{ messages }}"]
    assert "im_start" in files("chat_template: chatml\n")[2]
    assert "no tokenizer files" in merged("tokenizer_source: run/checkpoint-110\n", code=4).stderr
