"""What problems and findings hold, and which errors of an output are known from its sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.checkpoints import edit, make, optim_states
from llmtailor.codes import Code
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import write
from llmtailor.errors import PathIn, Problem, SourceError, VerificationError
from llmtailor.findings import ERROR, NOTE, Finding
from llmtailor.recipe import Recipe


def test_a_finding_keeps_the_code_and_the_path_of_its_problem():
    error = SourceError.at(PathIn("run/checkpoint-4", "latest"), "the file is missing", "copy it", Code.FILE_MISSING)
    finding = Finding.of(error.problems[0], ERROR)
    assert (finding.code, finding.path, finding.severity) == (Code.FILE_MISSING, "latest", ERROR)
    assert finding.problem == error.problems[0]
    assert finding.to_json() == {
        "severity": "error",
        "code": "file-missing",
        "where": "run/checkpoint-4/latest",
        "path": "latest",
        "what": "the file is missing",
        "fix": "copy it",
    }


def test_what_concerns_the_whole_checkpoint_has_no_path():
    assert Problem("run/checkpoint-4", "it is odd").path is None
    assert Finding("run/checkpoint-4", "it is odd", "", Code.OTHER, NOTE).to_json()["path"] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_an_output_is_known_only_if_the_same_file_of_a_source_has_it(tmp_path, rank):
    """Also among the shards: that another rank's file has it says nothing about this one."""
    base = make(tmp_path, 100)
    for one in (0, 1):
        edit(optim_states(base, one), lambda tree: tree["optimizer_state_dict"].update(dynamic_loss_scale="yes"))
    composition = plan_merge(Recipe(name="recipe", base=base), tmp_path / "out", Options(allow_errors=True))
    report = composition.report
    errors = [one for one in report.notices if isinstance(one, Finding) and one.severity == ERROR]
    paths = [optim_states(base, one).relative_to(base).as_posix() for one in (0, 1)]
    assert [one.path for one in errors] == paths
    notice = errors[0]
    moved = replace(notice, where=PathIn("checkpoint-100", paths[rank]))
    notices = tuple(moved if one is notice else one for one in report.notices)
    known = replace(composition, report=replace(report, notices=notices))
    if rank == 0:
        write(known)
        return
    with pytest.raises(VerificationError) as caught:
        write(known)
    assert [(one.path, one.code) for one in caught.value.problems] == [(paths[0], notice.code)]
