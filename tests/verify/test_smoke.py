"""Real resumes for a try, on CPU ranks: what stock DeepSpeed and the stock Trainer hold is what the files say."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.real

from llmtailor.errors import UsageError  # noqa: E402
from llmtailor.findings import ERROR  # noqa: E402
from llmtailor.formats.registry import index_checkpoint  # noqa: E402
from llmtailor.verify import smoke, smoke_worker  # noqa: E402
from llmtailor.verify.verify import NOT_RESUMABLE, RESUMABLE, verify_checkpoint  # noqa: E402
from trainings.alone import train  # noqa: E402
from trainings.harness import start_ranks  # noqa: E402
from verify.damaging import Optimizer, optim  # noqa: E402


class Forked:
    """What `Popen` makes of the workers: forks of processes that have imported the libraries, which takes seconds."""

    def __init__(self, command: list[str], cwd: Path, stdout: Any, **_: object) -> None:
        *launcher, flag, module, task_file, folder = command[1:]
        assert (flag, module) == ("-m", smoke_worker.__name__)
        self.arguments = Path(task_file), Path(folder)
        if launcher:
            assert launcher[:-1] == ["-m", "torch.distributed.run", "--standalone"]
            ranks = int(launcher[-1].removeprefix("--nproc-per-node="))
            start_ranks(module, self.arguments, ranks, cwd)
            self.returncode = 0
        else:
            self.returncode = self.fork(cwd, stdout)

    def fork(self, cwd: Path, stdout: Any) -> int:
        pid = os.fork()
        if pid == 0:
            for number in (1, 2):
                os.dup2(stdout.fileno(), number)
            os.chdir(cwd)
            try:
                smoke_worker.main(*self.arguments)
            finally:
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def wait(self, timeout: float | None = None) -> None:
        assert timeout

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def forks(monkeypatch):
    monkeypatch.setattr(smoke, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))


def test_a_missing_state_id_and_another_master_are_caught(runs, tmp_path, forks, monkeypatch):
    """Stock loads both without a word. What it then holds is compared with what the files said before."""
    before = index_checkpoint(runs["zero2"].checkpoint(4))
    root = tmp_path / "checkpoint-4"
    shutil.copytree(before.root, root)

    def lose(it: Optimizer) -> None:
        it.state.pop(1)
        it.masters[0].detach()[5] += 1

    optim(lose, 1)(root, root)
    task = smoke.make_task(before, str(tmp_path))
    monkeypatch.setattr(smoke, "make_task", lambda *_: {**task, "root": str(root)})
    findings = smoke.resume_smoke(before)
    assert {finding.severity for finding in findings} == {ERROR}
    what = "\n".join(finding.what for finding in findings)
    for told in ("another master of", "another exp_avg of", "another exp_avg_sq of"):
        assert told in what
    assert "Adam's steps on rank 1 are [4.0, None], but [4.0, 4.0] in the files" in what
    assert "rank 0" not in what and "weight in training" not in what


@pytest.mark.long
def test_what_deepspeed_saved_it_resumes_to(runs):
    verdict = smoke.try_resume(verify_checkpoint(runs["llama-sub-w3"].checkpoint(4)))
    assert verdict.level == RESUMABLE and not verdict.findings


def test_what_the_trainer_saved_it_resumes_to(tmp_path, forks):
    run = train(tmp_path / "run", arch="qwen2", tied=True, steps=2)
    verdict = smoke.try_resume(verify_checkpoint(run.checkpoint(2)))
    assert verdict.level == RESUMABLE and not verdict.findings


def test_what_is_not_resumable_is_not_tried(runs, tmp_path):
    root = tmp_path / "checkpoint-4"
    shutil.copytree(runs["llama"].checkpoint(4), root)
    (root / "latest").unlink()
    verdict = smoke.try_resume(verify_checkpoint(root))
    assert verdict.level == NOT_RESUMABLE
    assert verdict.findings[-1].what == "no resume was tried, because the checkpoint is not resumable"


def test_what_it_needs_is_said(runs, monkeypatch):
    index = index_checkpoint(runs["llama"].checkpoint(4))
    files = {path: fact for path, fact in index.files.items() if path != "config.json"}
    with pytest.raises(UsageError, match=r"config\.json, which describes the model, is missing"):
        smoke.check_possible(replace(index, files=files))
    with pytest.raises(UsageError, match=r"for 9 ranks, but at most 8 .*\n.*--num-gpu 8"):
        smoke.check_possible(replace(index, world_size=9))
    huge = {name: replace(param, shape=(10**6, 10**6)) for name, param in index.params.items()}
    with pytest.raises(UsageError, match="GB of memory"):
        smoke.check_possible(replace(index, params=huge))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else object())
    with pytest.raises(
        UsageError, match=r"it needs deepspeed, which is not installed\n.*pip install 'llmtailor\[train\]'"
    ):
        smoke.check_possible(index)


def test_a_model_of_ones_own_is_refused(runs):
    task = smoke.make_task(index_checkpoint(runs["llama-extras-layer"].checkpoint(4)), "")
    with pytest.raises(smoke_worker.Refusal, match=r"different params than the checkpoint: model.layers.0.mlp.gate"):
        smoke_worker.build_optimizer(smoke_worker.build_model(task), task)
