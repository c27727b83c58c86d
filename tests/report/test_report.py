"""``llmtailor report``: what the page says is what the commands say, whatever the run's folder holds."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

import llmtailor
from attempts.world import PARTS, World
from helpers.cases import examples
from helpers.commands import call, run_here
from helpers.files import edit_json
from llmtailor.report import chart
from llmtailor.report.gather import Attempt, LossCurve, RunFacts
from llmtailor.report.page import page
from llmtailor.runs.composing import compose_newest
from llmtailor.runs.save_log import FailedSave, LoggedSave, SaveLog
from report.parsing import Page

HOSTILE = '</style><script>alert("x")</script>\x1b[31m\x00\u202e&'


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run that was resumed from step 30 after it had reached step 50, with losses."""
    made = World(tmp_path_factory.mktemp("report") / "run", seed=1)
    made.start(None, 0, None)
    for _ in range(4):
        made.train(10)
        made.save()
    made.save_full()
    made.train(10)
    made.save()
    made.resume_from(made.compose(30), 30)
    for _ in range(2):
        made.train(10)
        made.save()
    made.stop()
    for folder in [*made.run.glob("partial/step-*"), *made.run.glob("checkpoint-*")]:
        path, is_old = folder / "trainer_state.json", folder.name.endswith("abandoned")
        if path.exists():
            state = json.loads(path.read_text())
            state["log_history"] = [
                {"step": step, "loss": 3 / step + (step > 30 and is_old)} for step in range(1, state["global_step"] + 1)
            ]
            path.unlink()  # may be a hard link
            path.write_text(json.dumps(state))
        if (manifest := folder / "manifest.json").exists():  # which has the file's checksum
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "carried": []}))
    return made


@pytest.fixture
def run(world, tmp_path):
    """A copy to damage."""
    return shutil.copytree(world.run, tmp_path / "run")


def report(run: Path, *words: object) -> Page:
    out = run.parent / "report.html"
    done = call("report", run, "-o", out, "--force", *words)
    assert not done.stdout
    return Page(out.read_text(encoding="utf-8"))


def as_json(*words: object) -> dict:
    done = run_here(*words, "--json")
    return json.loads(done.stdout)


def log_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "partial" / "saves.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("words", [["report", "--values"], ["merge", "--dry-run", "--run"]])
def test_each_checkpoint_is_indexed_once(run, words):
    more = ["-o", run.parent / "report.html"] if "report" in words else []
    done = run_here("-v", *words, run, *more)
    indexed = re.findall(r"indexed (\S+) in", done.stderr)
    assert done.returncode == 0 and len(indexed) > 1
    assert sorted(indexed) == sorted(set(indexed))


def test_sources_of_the_newest_state_are_indexed_once(run, caplog):
    with caplog.at_level("INFO", "llmtailor"):
        found = compose_newest(run)
    assert found is not None and found.is_new
    indexed = re.findall(r"indexed (\S+) in", caplog.text)
    assert len(indexed) > 2 and sorted(indexed) == sorted(set(indexed))


def test_it_says_what_the_commands_say(world):
    before = {path: path.stat().st_mtime_ns for path in world.run.rglob("*")}
    page = report(world.run)
    assert before == {path: path.stat().st_mtime_ns for path in world.run.rglob("*")}
    plan = as_json("merge", "--run", world.run, "--dry-run")
    sources = page.table("part", "source", "step")
    assert sources.rows == [
        [row["part"], row["source"], str(row["step"]), str(row["staleness"]), f"{row['num_bytes']} B"]
        if row["num_bytes"] < 1000
        else [row["part"], row["source"], str(row["step"]), str(row["staleness"]), f"{row['num_bytes'] / 1000:.1f} kB"]
        for row in plan["parts"]
    ]
    verdicts = page.table("checkpoint", "verdict")
    skipped = {one["name"] for one in as_json("latest", world.run)["passed_over"]}
    for name, level, attempt, count in verdicts.rows:
        assert attempt == ("abandoned" if name in skipped else "of the run")
        found = as_json("verify", name)
        assert level[2:] == found["verdict"]
        assert (level[0] == "✓") == found["intact"]
        assert int(count) == len(found["findings"])
        assert all(finding["what"] in page.text for finding in found["findings"])
    assert {attempt for _, _, attempt, _ in verdicts.rows} == {"abandoned", "of the run"}
    saves = log_of(world.run)
    logged = page.table("step", "parts", "bytes", "stall s")
    assert logged.column("step") == [str(save["step"]) for save in reversed(saves)] == ["50", "40", "30", "20", "10"]
    assert logged.column("published s") == [f"{save['publish_s']:.3g}" for save in reversed(saves)]
    written = sum(save["num_bytes"] for save in saves)
    assert f"{written / 1000:.1f} kB were written" in page.text
    times = 5 * saves[0]["num_bytes"] / written
    assert f": {times:.2f} times as much" in page.text
    ages = page.table("part", "saves", "newest at step")
    assert ages.column("part") == [*saves[0]["steps_behind"]]
    assert set(ages.column("part")) == set(PARTS)
    held = {part: [save["step"] for save in saves if part in save["parts"]] for part in PARTS}
    assert dict(zip(ages.column("part"), ages.column("saves"), strict=True)) == {
        part: str(len(steps)) for part, steps in held.items()
    }
    assert ages.column("steps behind") == [str(saves[-1]["steps_behind"][part]) for part in ages.column("part")]
    attempts = json.loads((world.run / "partial" / "attempts.json").read_text())["attempts"]
    shown = page.table("attempt", "started", "resumed at step")
    assert shown.column("started") == [one["started"] for one in attempts]
    assert shown.column("resumed at step") == ["from the beginning", "30"]
    assert "resumed at 30" in page.text
    assert f"The last logged loss is {3 / 50:.4g}, at step 50." in page.text


def test_values_are_those_of_diff(world):
    page = report(world.run, "--values")
    changes = page.table("part", "steps", "master")
    assert changes.column("part") == [row["part"] for row in as_json("merge", "--run", world.run, "--dry-run")["parts"]]
    for part, steps, *shown in changes.rows:
        newest = [line["step"] for line in log_of(world.run) if part in line["parts"]][-2:]
        assert steps == " → ".join(map(str, newest))
        a, b = (world.run / "partial" / f"step-{step:08}" for step in newest)
        kinds = llmtailor.diff(a, b).by(lambda one: one.part)[part]
        assert shown == [f"{kinds[kind].relative:.1e}" for kind in ("master", "exp_avg", "exp_avg_sq")]


def test_the_output(world, tmp_path):
    out = tmp_path / "page.html"
    call("report", world.run, "-o", out)
    kept = out.read_bytes()
    refused = call("report", world.run, "-o", out, code=6)
    assert "--force" in refused.stderr
    assert out.read_bytes() == kept
    call("report", tmp_path / "absent", "-o", tmp_path / "other.html", code=4)
    call("report", world.run, "-o", tmp_path / "no" / "folder.html", code=6)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_without_jinja2_it_says_what_to_install_before_it_reads(world, tmp_path):
    (tmp_path / "jinja2.py").write_text("raise ImportError('none here')")
    out = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-m", "llmtailor", "report", str(world.run), "-o", str(out)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: report: jinja2 is missing: none here",
        "  fix: pip install 'llmtailor[report]'",
    ]
    assert not out.exists()


def test_an_empty_folder(tmp_path):
    (tmp_path / "run").mkdir()
    page = report(tmp_path / "run", "--values")
    assert "Nothing can be composed now" in page.text
    assert "No save is logged" in page.text
    assert "The folder holds no checkpoint." in page.text


def test_a_damaged_run(run):
    partial = run / "partial"
    (partial / "step-00000050" / "manifest.json").write_bytes(b"{")
    next((partial / "step-00000040").glob("rank-*")).write_bytes(b"torn")
    (partial / "step-00000030" / "trainer_state.json").write_bytes(b"\xff")
    (partial / "attempts.json").write_text('{"attempts": 3}')
    with (partial / "saves.jsonl").open("ab") as file:
        file.write(b'\x00\xff\n[]\n{"step": 1e999}\n{"step": 60, "num_bytes": -1, "parts": {}}\n{"step": 70')
    page = report(run, "--values")
    assert "the attempt record is damaged" in page.text
    assert "Lines of saves.jsonl that are not valid: 5." in page.text
    assert "Nothing can be composed now" in page.text
    verdicts = page.table("checkpoint", "verdict")
    names = [Path(name).name for name in verdicts.column("checkpoint")]
    marks = dict(zip(names, verdicts.column("verdict"), strict=True))
    assert marks["step-00000050"].startswith("✗")
    assert marks["step-00000040"].startswith("✗")


def test_names_and_numbers_of_any_kind(run):
    """Whatever a log says is text, and does not make a page that can't be drawn."""
    saves = log_of(run)
    behind = {HOSTILE: 10, "x" * 5000: 0, "layer 0": (1 << 60) - 1}
    parts = {"layer 0": HOSTILE, HOSTILE: "why"}
    drift = {"layer 0": math.inf, HOSTILE: math.nan, "norm": 1e-300, "lm_head": 1e300}
    hostile = saves[-1] | {"step": 60, "parts": parts, "steps_behind": behind, "drift": drift, "publish_s": 1e17}
    failed = {"step": 70, "failed": HOSTILE}
    text = "".join(json.dumps(line) + "\n" for line in (*saves, hostile, hostile | {"step": (1 << 60) - 1}, failed))
    (run / "partial" / "saves.jsonl").write_text(text)
    state = run / "partial" / "step-00000050" / "trainer_state.json"
    history = [
        {"step": 1, "loss": math.inf},
        {"step": 2, "loss": 1e308},
        {"step": 3, "loss": "3"},
        {"step": 4, "loss": 1},
    ]
    edit_json(state, lambda content: content | {"log_history": history, "global_step": 50})
    page = report(run)
    assert "script" not in page.tags
    assert '</style><script>alert("x")</script>\\x1b[31m\\x00\\u202e&' in page.text
    assert "nan" not in page.text.lower().split()


def test_attested_resumes(run):
    assert "Resumes" not in report(run).text
    one = {"checkpoint": "x/checkpoint-30", "is_same": True, "num_states": 1572, "num_same": 1572, "how": "sample"}
    other = one | {"is_same": False, "num_same": 524, "how": "full", "cause": HOSTILE}
    with (run / "partial" / "saves.jsonl").open("a") as log:
        log.writelines(json.dumps({"step": step, "attested": found}) + "\n" for step, found in [(30, one), (40, other)])
    page = report(run)
    resumes = page.table("step", "checkpoint")
    assert resumes.column("verdict") == ["✓ the training that was saved", "✗ not the training that was saved"]
    assert resumes.column("states of the checkpoint") == ["1,572 of 1,572", "524 of 1,572"]
    assert resumes.column("compared") == ["a sample", "every byte"]
    assert "script" not in page.tags


def test_many_saves(run):
    count = examples(400, 2000)
    parts = ["embed_tokens", *(f"layer {number}" for number in range(126)), "norm", "lm_head"]
    last = dict.fromkeys(parts, 0)
    with (run / "partial" / "saves.jsonl").open("w") as log:
        for number in range(count):
            saved = [part for at, part in enumerate(parts) if number == 0 or (at + number) % 4 == 0]
            last |= dict.fromkeys(saved, number)
            behind = {part: 50 * (number - last[part]) for part in parts}
            drift = {part: 1e-4 * (1 + number - last[part]) for part in parts}
            line = {"step": 50 * number + 50, "parts": dict.fromkeys(saved, "x"), "num_bytes": len(saved) * 10**9}
            line |= {"stall_s": 0.1, "publish_s": number / 100, "drift": drift, "steps_behind": behind}
            log.write(json.dumps(line) + "\n")
    page = report(run)
    assert (run.parent / "report.html").stat().st_size < 2_000_000
    assert page.table("part", "saves", "newest at step").column("part") == parts
    assert f"A bar stands for up to {count // 100} saves" in page.text
    assert f"The newest 200 of {count:,} saves." in page.text
    assert f"at most {(count - 1) / 100:.3g} s" in page.text


@pytest.mark.parametrize("ages", [range(50, 300, 50), [1], [1, 2, 3], [0.5, 7.5, 900], [0]])
def test_the_legend_says_which_ages_a_shade_has(ages):
    shade = chart.shade_of([*ages])
    found = chart.ranges_of(ages, shade)
    assert all(found[shade(age)][0] <= age <= found[shade(age)][1] for age in ages if age > 0)
    bounds = [bound for _, limits in sorted(found.items()) for bound in limits]
    assert bounds == sorted(bounds)


# --- charts as they are drawn, not only written: needs a browser -----------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def facts() -> RunFacts:
    """A run of 12 saves that was resumed at step 50."""
    parts = ("embed_tokens", "layer 0", "layer 1", "norm")
    saves = tuple(
        LoggedSave(
            step=10 * number,
            parts={part: "in turn" for at, part in enumerate(parts) if number == 1 or (at + number) % 2},
            num_bytes=1000 * number,
            stall_s=0.01,
            copy_s=1.0,
            write_s=2.0,
            publish_s=3.0,
            drift={part: 1e-4 * (1 + at) * number for at, part in enumerate(parts)},
            expected_loss={},
            steps_behind={part: 0 if number == 1 or (at + number) % 2 else 10 for at, part in enumerate(parts)},
        )
        for number in range(1, 13)
    )
    losses = LossCurve("step-120", tuple((step, 5 / step) for step in range(1, 121)), ((60, 0.2), (120, 0.1)))
    attempts = (Attempt(0, "2026-01-01T00:00:00+00:00"), Attempt(50, "2026-01-02T00:00:00+00:00"))
    log = SaveLog(saves, (FailedSave(75, "no space"),))
    return RunFacts("runs/x", datetime(2026, 1, 3, tzinfo=timezone.utc), log, attempts=attempts, losses=losses)


def test_the_same_facts_give_the_same_page():
    assert page(facts()) == page(facts())
    assert page(facts()).count("<svg") == 4


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_draws_it(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="reading the screenshot needs Pillow")
    (tmp_path / "page.html").write_text(page(facts()), encoding="utf-8")
    shot = tmp_path / "page.png"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,3000"]
    subprocess.run(
        [*command, f"--screenshot={shot}", (tmp_path / "page.html").as_uri()], check=True, timeout=120, cwd=tmp_path
    )
    colours = {colour for _, colour in image.open(shot).convert("RGB").getcolors(1 << 24)}
    assert {(0, 114, 178), (213, 94, 0), (86, 180, 233)} <= colours  # the bars and lines are there
