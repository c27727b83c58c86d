"""Partial saves through the writer of nvidia-resiliency-ext, which another process carries out."""

from __future__ import annotations

import pytest

from saving.dcp_checks import check, oracle, read
from saving.dcp_loop import complete, step_of
from trainings.harness import start_ranks

pytest.importorskip("nvidia_resiliency_ext", reason="NVRx is not installed")


def test_what_is_due_is_written_and_the_rest_linked(tmp_path):
    start_ranks("saving.nvrx_loop", [tmp_path, 6], 2, tmp_path)
    assert [step_of(folder) for folder in complete(tmp_path)] == [*range(1, 7)]
    for step in range(1, 7):
        check(read(tmp_path / f"step-{step}"), oracle(tmp_path, step))
    assert [path for path in (tmp_path / "step-6").glob("*.distcp") if path.stat().st_nlink > 1]
