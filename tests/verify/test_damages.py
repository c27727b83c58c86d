"""Each known damage gives the finding that it must, at the right severity, and nothing worse."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import verify.shard_damages  # noqa: F401  (adds to CASES)
from llmtailor.findings import SEVERITIES
from llmtailor.verify.verify import verify_checkpoint
from verify.damages import CASES, OTHER_STEP, STEP, Case

DOCS = Path(__file__).parents[2] / "docs" / "findings.md"


def short_run(at: int, case: Case) -> str:
    """Return the run on which the short suite tries a damage; the usual two take turns."""
    return case.runs[at % 2 if case.runs == ("llama", "zero2") else 0]


WITH_RUN = [
    pytest.param(case, run, id=f"{case.title}-{run}", marks=() if run == short_run(at, case) else pytest.mark.long)
    for at, case in enumerate(CASES)
    for run in case.runs
]


@pytest.mark.parametrize(("case", "run"), WITH_RUN)
def test_a_damage_is_told(case, run, runs, tmp_path):
    checkpoint = tmp_path / f"checkpoint-{STEP}"
    shutil.copytree(runs[run].checkpoint(STEP), checkpoint)
    before = verify_checkpoint(checkpoint, name="x")
    case.damage(checkpoint, runs[run].checkpoint(OTHER_STEP))
    checkpoint = next(tmp_path.glob("checkpoint-*"))
    verdict = verify_checkpoint(checkpoint, name="x")
    if case.deep:
        assert verdict.findings == before.findings  # nothing that the structure would show
        verdict = verify_checkpoint(checkpoint, deep=True, name="x")
    new = [finding for finding in verdict.findings if finding not in before.findings]
    if case.severity is None:
        assert not new
        return
    told = [finding for finding in verdict.findings if case.told in finding.what]
    assert told, "\n".join(map(str, verdict.findings))
    assert told[0].severity == case.severity
    worst = min((SEVERITIES.index(finding.severity) for finding in verdict.findings), default=None)
    assert worst == SEVERITIES.index(case.severity), "\n".join(map(str, verdict.findings))
    assert told[0].fix
    assert verdict.is_resumable == (case.severity != "error")


def test_the_page_lists_these_damages():
    rows = re.findall(r"^\| (.+?) \| (error|warning|note|-) \|", DOCS.read_text(), re.MULTILINE)
    cases = {(case.title + (" (--deep)" if case.deep else ""), case.severity or "-") for case in CASES}
    assert set(rows) >= cases
