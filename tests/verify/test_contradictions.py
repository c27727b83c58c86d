"""Two places that say different things are told, each with the severity and code of its row."""

from __future__ import annotations

import shutil

import pytest

from llmtailor.findings import ERROR
from llmtailor.formats.zero.contradictions import CONTRADICTIONS
from llmtailor.verify.verify import verify_checkpoint
from verify.contradictions import DAMAGES
from verify.damages import OTHER_STEP, STEP

CASES = [
    pytest.param(row, damage, run, id=f"{row.title}-{number}-{run}", marks=pytest.mark.long if at else ())
    for row in CONTRADICTIONS
    for number, (runs, damage) in enumerate(DAMAGES[row.title])
    for at, run in enumerate(runs)
]


@pytest.mark.parametrize(("row", "damage", "run"), CASES)
def test_a_contradiction_is_told(row, damage, run, runs, tmp_path):
    checkpoint = tmp_path / f"checkpoint-{STEP}"
    shutil.copytree(runs[run].checkpoint(STEP), checkpoint)
    damage(checkpoint, runs[run].checkpoint(OTHER_STEP))
    verdict = verify_checkpoint(checkpoint, name="x")
    told = [finding for finding in verdict.findings if (finding.code, finding.severity) == (row.code, row.severity)]
    assert any(row.stock in finding.fix for finding in told), "\n".join(map(str, verdict.findings))
    assert verdict.is_resumable == (row.severity != ERROR)
