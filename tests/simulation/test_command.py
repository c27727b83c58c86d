"""``llmtailor policy``: its page in the documentation, its options, and what a run has measured."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from helpers.commands import run_here
from saving.loop import Loop

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "configs" / "models" / "Llama-3.1-8B.json"


def call(*words: object, code: int = 0) -> str:
    done = run_here("policy", *words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_the_page_shows_what_the_command_prints(tmp_path):
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    ((words, shown),) = re.findall(r"<!-- llmtailor policy (.*?) -->\n\n```\n(.*?)```\n\n<!-- end -->", page, re.DOTALL)
    picture = tmp_path / "policies.svg"
    assert shown == run_here("policy", *words.split(), "--svg", picture, cwd=ROOT).stdout
    assert picture.read_bytes() == (ROOT / "docs" / "pictures" / picture.name).read_bytes()
    assert max(map(len, shown.splitlines())) <= 80


def test_json_says_the_same():
    told = json.loads(call(LLAMA, "--policy", "parity", "--gpus", 64, "--json"))
    text = call(LLAMA, "--policy", "parity", "--gpus", 64)
    assert [row["policy"] for row in told["policies"]] == ["Trainer, full", "full", "parity"]
    parity = told["policies"][2]
    assert told["num_params"] * 6 == parity["bytes_mean"]
    assert re.search(rf"^parity +{parity['bytes_mean'] / 1e9:.1f} +{parity['bytes_largest'] / 1e9:.1f}", text, re.M)
    for cost, word in zip(parity["costs"], ("stops", "goes on"), strict=True):
        assert re.search(rf"^parity +{word} .* {cost['save_steps']:,} .* {cost['time_lost']:.2%} ", text, re.M)
    back = {row["policy"]: row["setback_saves"] for row in told["policies"]}
    assert back == {"Trainer, full": 0, "full": 0, "parity": pytest.approx(0.5)}
    lost = {row["policy"]: row["costs"][-1]["lost_s_per_failure_at_equal_bytes"] for row in told["policies"][1:]}
    ranked = re.findall(r"(full|parity)\s+\([\d.]+\s+min\)", text)
    assert ranked == sorted(lost, key=lost.__getitem__)
    assert "all params are taken to be alike" in re.sub(r"\s+", " ", text)
    assert told["machine"]["gpus"] == 64
    assert told["origin"] | {"gpus": "given", "step_seconds": "assumed"} == told["origin"]


def test_equal_bytes_on_a_slow_disk():
    """In the background, the next save waits until the largest is written: intervals below that are impossible."""
    slow = ("--write-gbps", 0.05, "--mtbf-hours", 2)
    told = json.loads(call(LLAMA, "--policy", "filter", "--policy", "parity", *slow, "--json"))
    equal = {}
    for row in told["policies"][1:]:
        cost = row["costs"][-1]
        waiting = row["bytes_largest"] / told["machine"]["write_bytes_per_s"]
        fixed = cost["publish_s"] - cost["stall_s"]
        period_s = (cost["lost_s_per_failure_at_equal_bytes"] - fixed) / (0.5 + 0.5 * row["setback_saves"])
        equal[row["policy"]] = period_s / waiting
        assert period_s >= waiting * (1 - 1e-9)
    assert equal["filter"] == pytest.approx(1)  # its saves are of different sizes
    assert equal["parity"] > 1


def test_a_folder_with_a_config_and_a_picture(tmp_path):
    (tmp_path / "config.json").write_bytes(LLAMA.read_bytes())
    picture = tmp_path / "policies.svg"
    specs = ["parity", "filter:every=3"]
    call(tmp_path, *(word for spec in specs for word in ("--policy", spec)), "--svg", picture)
    drawn = ET.parse(picture).getroot()
    texts = {one.text for one in drawn.iter() if one.tag.endswith("text")}
    assert {"Trainer, full", "full", *specs} <= texts
    assert not [name for one in drawn.iter() for name in one.attrib if name.endswith("href")]
    before = picture.read_bytes()
    assert "--force" in call(tmp_path, "--policy", "parity", "--svg", picture, code=6)
    assert picture.read_bytes() == before
    call(tmp_path, "--policy", "parity", "--svg", picture, "--force")
    assert picture.read_bytes() != before


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["absent.json"], 4, "config.json"),
        ([LLAMA, "--policy", "partiy"], 2, "did you mean 'parity'?"),
        ([LLAMA, "--policy", "update:threshold=0.1"], 2, "--drift"),
        ([LLAMA, "--policy", "filter", "--max-staleness", 3], 2, "max_staleness is 3"),
        *(([LLAMA, "--write-gbps", value], 2, "--write-gbps") for value in ("0", "nan", "inf", "-1", "x")),
        ([LLAMA, "--drift", "nan"], 2, "--drift"),
    ],
)
def test_refusals(words, code, told):
    assert told in call(*words, code=code)


def test_no_config(tmp_path):
    assert "does not exist" in call(tmp_path, code=4)
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in call(tmp_path, code=4)
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    assert "transformers can't build the model" in call(tmp_path, code=4)
    (tmp_path / "partial").mkdir()
    assert "no complete partial checkpoint" in call(tmp_path, code=4)


def test_figures_of_a_run(tmp_path):
    """The log and the manifests of a real run, with other times."""
    run = tmp_path / "run"
    loop = Loop(run, policy="update:threshold=0.0001", max_staleness=4).start()
    for _ in range(4):
        loop.train(10)
        loop.save().wait()  # type: ignore[union-attr]
    loop.saver.close()
    began = datetime(2026, 1, 1, tzinfo=timezone.utc)
    for path in run.glob("partial/step-*/manifest.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"created": (began + timedelta(seconds=7 * content["step"])).isoformat()}))
    log = run / "partial" / "saves.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    times = {"stall_s": 0.5, "copy_s": 1.0, "write_s": 2.0, "publish_s": 4.0}
    log.write_text("".join(json.dumps(line | times) + "\n" for line in lines))

    found = json.loads(call(run, "--policy", "update:threshold=0.0001", "--max-staleness", 4, "--json"))
    total = sum(line["num_bytes"] for line in lines)
    assert found["machine"]["write_bytes_per_s"] == pytest.approx(total / 16)
    assert found["machine"]["stall_s_per_byte"] == pytest.approx(2 / total)
    assert found["machine"]["step_s"] == pytest.approx(7)
    assert found["machine"]["gpus"] == 1
    assert {key for key, origin in found["origin"].items() if origin == "assumed"} == {"mtbf_hours", "slowdown"}
    assert found["num_params"] == sum(param.numel() for param in loop.model.parameters())
    assert found["policies"][-1]["bytes_largest"] > 0  # update, which decides by what the run has measured
    own = json.loads(call(run, "--policy", "parity", "--step-seconds", 3, "--copy-gbps", 1, "--json"))
    assert (own["machine"]["step_s"], own["machine"]["stall_s_per_byte"]) == (3, None)
