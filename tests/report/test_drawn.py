"""Charts as they are drawn, not only written: needs a browser."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime, timezone

import pytest

from llmtailor.report.gather import Attempt, Losses, RunFacts
from llmtailor.report.page import page
from llmtailor.runs.save_log import FailedSave, LoggedSave, SaveLog

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
    losses = Losses("step-120", tuple((step, 5 / step) for step in range(1, 121)), ((60, 0.2), (120, 0.1)))
    attempts = (Attempt(0, "2026-01-01T00:00:00+00:00"), Attempt(50, "2026-01-02T00:00:00+00:00"))
    log = SaveLog(saves, (FailedSave(75, "no space"),))
    return RunFacts("runs/x", datetime(2026, 1, 3, tzinfo=timezone.utc), log, attempts=attempts, losses=losses)


def test_the_same_facts_give_the_same_page():
    assert page(facts()) == page(facts())
    assert page(facts()).count("<svg") == 6


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
