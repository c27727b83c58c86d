"""The trainings with the saver, once per session."""

from __future__ import annotations

import pytest

from partial.harness import Done, run_jobs
from partial.runs import jobs_for
from trainings.harness import TrainingFailed, compiler


class Trained:
    """``trained["z3"]`` is a finished job of runs.py. Never write into its folder."""

    def __init__(self, make_folder, everything) -> None:
        self._make_folder = make_folder
        self._everything = everything
        self._done: dict[int, dict[str, Done] | str] = {}

    def __getitem__(self, name: str) -> Done:
        ranks = 2 if name in {job.name for job in jobs_for(2)} else 3
        found = self._of(ranks)
        assert name in found or self._everything, f"{name} is trained with --all only: mark this test long"
        if name not in found:
            pytest.skip("DeepSpeedCPUAdam cannot be built: no C++ compiler or no ninja")
        return found[name]

    def _of(self, ranks: int) -> dict[str, Done]:
        if ranks not in self._done:
            before = self._of(2)["z3"].folder.parent if ranks == 3 else None
            wanted = jobs_for(ranks, before, self._everything)
            jobs = [job for job in wanted if compiler() or job.optimizer != "cpu_adam"]
            try:
                self._done[ranks] = run_jobs(jobs, ranks, self._make_folder(f"{ranks}-ranks"))
            except TrainingFailed as error:
                self._done[ranks] = str(error)
        found = self._done[ranks]
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
        return found


@pytest.fixture(scope="session")
def trained(tmp_path_factory, pytestconfig):
    return Trained(tmp_path_factory.mktemp, pytestconfig.getoption("--all"))
