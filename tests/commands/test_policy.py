"""``llmtailor policy``: its page in the documentation, its table and its JSON document, its refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from helpers.checkpoints import SMALL, make
from helpers.commands import call
from helpers.places import ROOT
from synthetic import lay_out, make_checkpoint

LLAMA = ROOT / "configs" / "models" / "Llama-3.1-8B.json"


def policy(*words: object) -> str:
    return call("policy", *words).stdout


def test_the_page_shows_what_the_command_prints():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- llmtailor policy (.*?) -->\n\n```\n(.*?)```\n\n<!-- end -->", page, re.DOTALL)
    assert len(found) == 2
    for words, shown in found:
        assert shown == call("policy", *words.split(), cwd=ROOT).stdout
        assert max(map(len, shown.splitlines())) <= 100


def test_json_says_the_same():
    told = json.loads(policy(LLAMA, "--policy", "parity", "--step-seconds", 3, "--json"))
    text = policy(LLAMA, "--policy", "parity", "--step-seconds", 3)
    assert [row["policy"] for row in told["policies"]] == ["Trainer, full", "full", "parity"]
    parity = told["policies"][2]
    assert told["num_params"] * 6 == parity["bytes_mean"]
    assert re.search(
        rf"^parity +{parity['bytes_mean'] / 1e9:.1f} GB +{parity['bytes_largest'] / 1e9:.1f} GB", text, re.M
    )
    for cost, word in zip(parity["costs"], ("blocking", "background"), strict=True):
        assert re.search(rf"^parity +{word} .* {cost['save_steps']:,} .* {cost['time_lost']:.2%}$", text, re.M)
    back = {row["policy"]: row["setback_saves"] for row in told["policies"]}
    assert back == {"Trainer, full": 0, "full": 0, "parity": pytest.approx(0.5)}
    assert told["machine"] == {"write_bytes_per_s": 2e9, "step_s": 3, "mtbf_s": 24 * 3600, "slowdown": 0.1}
    assert "2.0 GB/s" in text and "3 s per step" in text


def test_the_next_save_waits_for_the_largest():
    """In the background: intervals below the time of the largest save are impossible."""
    slow = ("--write-gbps", 0.05, "--mtbf-hours", 2)
    told = json.loads(policy(LLAMA, "--policy", "filter", "--policy", "parity", *slow, "--json"))
    for row in told["policies"][1:]:
        assert row["costs"][-1]["save_steps"] * 5 >= row["bytes_largest"] / 5e7


def test_a_folder_with_a_config(tmp_path):
    (tmp_path / "config.json").write_bytes(LLAMA.read_bytes())
    told = policy(tmp_path, "--policy", "parity", "--policy", "filter:every=3")
    assert told.startswith(f"{tmp_path.name}: 8,030,261,248 params")
    assert re.findall(r"^(\S+) +background", told, re.M) == ["full", "parity", "filter:every=3"]


def test_a_mesh():
    """Every element is saved once, whatever the mesh; replicas save none."""
    alone, mesh = (
        json.loads(policy(LLAMA, "--policy", "parity", *words, "--json"))
        for words in ((), ("--mesh", "tp=4,dp=8,dp_replicate=2"))
    )
    assert (alone["mesh"], mesh["mesh"]) == (None, {"tp": 4, "dp": 8, "dp_replicate": 2})
    assert mesh["ranks_writing"] == 32
    for one, other in zip(alone["policies"], mesh["policies"], strict=True):
        assert one["bytes_mean"] == other["bytes_mean"] and one["bytes_on_rank_0"] is None
    full = mesh["policies"][1]
    norms = 65 * 4096  # on the first of four tensor-parallel ranks, cut over 8
    assert full["bytes_on_rank_0"] == 12 * ((alone["num_params"] - norms) / 32 + norms / 8)


def test_the_mesh_of_a_checkpoint(tmp_path):
    root = make(tmp_path, 100, world_size=3)
    assert json.loads(policy(root, "--json"))["mesh"] == {"dp": 3}
    assert json.loads(policy(root, "--mesh", "dp=8", "--json"))["mesh"] == {"dp": 8}
    (root / "latest").write_text("nowhere")
    told = call("policy", root)
    assert "so give --mesh: " in told.stderr and "rank 0" not in told.stdout


def test_a_mesh_of_a_checkpoint_that_the_models_plan_does_not_have(tmp_path):
    """DeepSpeed may cut what transformers' plan can't."""
    shape = replace(SMALL, num_kv_heads=3, num_heads=6, head_dim=4)
    root = tmp_path / "checkpoint-100"
    make_checkpoint(root, shape, lay_out(shape, 2, tp=2), 100, sparse=True)
    told = call("policy", root)
    assert "what its ranks have is not known: tp=2 does not divide the 3 heads" in told.stderr
    assert "parity" in told.stdout and "rank 0" not in told.stdout
    assert call("policy", root, "--mesh", "tp=2", code=2)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([LLAMA, "--mesh", "tp=3,dp=8"], 2, "tp=3 does not divide the 8 heads of keys and values"),
        ([LLAMA, "--mesh", "tp=8192"], 2, "leaves ranks without any of"),
        ([LLAMA, "--mesh", "dp_replicate=4"], 2, "use dp=4"),
        ([LLAMA, "--mesh", "pp=4"], 2, "is not of the form tp=2,dp=3,dp_replicate=4"),
        ([LLAMA, "--mesh", "dp=4", "--experts"], 2, "omit one of them"),
        (["absent.json"], 4, "config.json"),
        ([LLAMA, "--policy", "partiy"], 2, "did you mean 'parity'?"),
        ([LLAMA, "--policy", "filter", "--max-staleness", 3], 2, "max_staleness is 3"),
        *(([LLAMA, "--write-gbps", value], 2, "--write-gbps") for value in ("0", "nan", "inf", "-1", "x")),
    ],
)
def test_refusals(words, code, told):
    assert told in call("policy", *words, code=code).stderr


def test_no_config(tmp_path):
    assert "name a config.json, or a folder with one" in call("policy", tmp_path, code=4).stderr
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in call("policy", tmp_path, code=4).stderr
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    assert "transformers can't build the model" in call("policy", tmp_path, code=4).stderr
