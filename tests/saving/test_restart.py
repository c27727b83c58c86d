"""A job that is started again goes on by itself from its newest state, and repeats what a straight run does."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from helpers.cases import mostly_long
from helpers.composing import compose
from llmtailor.background.options import SavingArguments
from llmtailor.errors import SourceError, TargetError, UsageError
from llmtailor.runs.composing import Newest, compose_newest
from llmtailor.saving import PartialSaving, SavingOptions, attach, newest_checkpoint
from llmtailor.saving.arguments import VARIABLES, from_environment
from llmtailor.storage.local import Lock
from saving.loop import Loop, read_states
from saving.processes import JOB_STEPS, KILLED_AT, LIVES
from trainings.alone import Alone, Stops
from trainings.harness import start_ranks

pytestmark = pytest.mark.real
FULL = {"policy": "full", "save_steps": 2}
COMPOSE = {**FULL, "on_restart": "compose"}


@pytest.mark.parametrize(("kind", "ranks"), [pytest.param("plain", 1, marks=pytest.mark.long), ("zero3", 2)])
def test_a_job_that_is_killed_twice_repeats_the_straight_run(tmp_path, kind, ranks):
    (folder := tmp_path / kind).mkdir()
    start_ranks("saving.processes", ["restarts", folder], ranks, folder, 120)
    straight, resumed = (json.loads((folder / f"{name}.json").read_text()) for name in ("straight", "resumed"))
    assert [line["step"] for line in straight] == [*range(1, JOB_STEPS + 1)]
    assert resumed == straight
    assert begun(folder / "run") == [0, *((step - 1) // 2 * 2 for step in KILLED_AT)]


@pytest.mark.parametrize("campaign", ["3-1", pytest.param("200-2", marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
def test_the_newest_published_save_survives_a_kill(tmp_path, campaign):
    (folder := tmp_path / campaign).mkdir()
    start_ranks("saving.processes", ["kills", folder], 1, folder, 1700)
    steps = json.loads((folder / "steps.json").read_text())
    assert len(steps) >= int(campaign.partition("-")[0]) and len(set(steps)) >= LIVES


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that saved steps 2 and 4, and what it logs when nothing stops it."""
    folder = tmp_path_factory.mktemp("stopped")
    run = Alone(folder / "run", FULL, max_steps=6, callbacks=(Stops(5),)).train()
    shutil.rmtree(run.folder / "partial" / "step-00000005")
    return run.folder, Alone(folder / "straight", max_steps=6).train().log


@pytest.fixture
def run(stopped, tmp_path):
    return Path(shutil.copytree(stopped[0], tmp_path / "run"))


def begun(run):
    return [one["resumed_at"] for one in json.loads((run / "partial" / "attempts.json").read_text())["attempts"]]


@pytest.mark.parametrize("resume", mostly_long([None, False, True], None, True))
def test_train_goes_on_from_the_newest_state(run, stopped, resume):
    again = Alone(run, COMPOSE)
    again.trainer.train(resume_from_checkpoint=resume)
    assert again.log == stopped[1]
    assert begun(run) == [0, 4]


class RunsOut(Trainer):
    """Runs out of memory with a batch of 4 rows before step 5, and of 3 before step 3."""

    def training_step(self, *args, **kwargs):
        if {4: 4, 3: 2}.get(self._train_batch_size) == self.state.global_step:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("attached", mostly_long([FULL, COMPOSE], COMPOSE), ids=["refuse", "compose"])
def test_a_trainer_that_begins_again_with_smaller_batches_makes_another_attempt(tmp_path, attached):
    run = Alone(tmp_path / "run", attached, kind=RunsOut, auto_find_batch_size=True, rows=60).train()
    assert run.trainer._train_batch_size == 2 and run.saves == [2, 4, 6]
    assert begun(run.folder) == [0, 0, 0]
    aside = sorted(path.name for path in run.folder.glob("partial/step-*.abandoned*"))
    assert aside == ["step-00000002.abandoned", "step-00000002.abandoned-2", "step-00000004.abandoned"]
    out = tmp_path / "out"
    compose(run.folder, 4, out=out)
    truth = run.truth.at[4]
    assert truth and all(torch.equal(value, truth[name][kind]) for (name, kind), value in read_states(out).items())
    with pytest.raises(TargetError, match="another run has saved here"):
        Alone(run.folder, FULL, auto_find_batch_size=True).train()


def test_such_a_trainer_goes_on_from_what_it_resumed(tmp_path):
    run = Alone(tmp_path / "run", FULL, callbacks=(Stops(2),)).train()
    options = {**COMPOSE, "on_mismatch": "warn"}
    again = Alone(run.folder, options, kind=RunsOut, auto_find_batch_size=True, rows=60).train()
    assert begun(run.folder) == [0, 2, 2] and again.saves == [2, 4, 6]
    # the Trainer loads the optimizer again when it begins again, but not the weights
    assert "states are of another checkpoint: step 4" in (run.folder / "partial" / "saves.jsonl").read_text()
    assert [path.name for path in run.folder.glob("partial/step-*.abandoned*")] == ["step-00000004.abandoned"]


def test_without_a_saved_step_it_starts_from_scratch(tmp_path):
    run = Alone(tmp_path / "run", COMPOSE, max_steps=2).train()
    assert begun(run.folder) == [0]
    assert run.saves == [2]
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_a_checkpoint_that_is_named_is_used_until_the_attempt_from_it_has_saves_of_its_own(run, stopped):
    compose(run, 2)
    Alone(run, COMPOSE, callbacks=(Stops(4),)).train(run / "checkpoint-2")
    assert begun(run) == [0, 2]
    Alone(run, COMPOSE, callbacks=(Stops(5),)).train(run / "checkpoint-2")
    assert begun(run) == [0, 2, 4]
    restarted = Alone(run, COMPOSE).train(run / "checkpoint-2")
    assert begun(run) == [0, 2, 4, 5]
    assert restarted.log == stopped[1][-len(restarted.log) :]


def test_a_folder_that_another_run_saves_into_is_refused(tmp_path):
    (tmp_path / "partial").mkdir()
    lock = Lock(tmp_path / "partial" / ".lock")  # another process would hold one of its own too
    lock.acquire()
    with pytest.raises(TargetError, match=r"another run is saving(.|\n)*fix: "):
        Loop(tmp_path, policy="full").start()
    lock.release()
    assert Loop(tmp_path, policy="full").trained(1).saves == [1]


def test_what_can_not_be_composed_ends_the_job(run):
    for path in run.glob("partial/step-*/rank-*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(SourceError, match="no checkpoint can be used"):
        Alone(run, COMPOSE).train()
    assert begun(run) == [0]


def test_a_merge_that_was_killed_with_other_ranks_is_started_over(run, monkeypatch):
    """What it wrote is of no use to anybody; an unattended job must not stop at it."""
    from llmtailor.compose import write as writing

    def power_cut(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing, "check_written", power_cut)
        compose_newest(run, 2)
    assert (run / ".checkpoint-4.llmtailor-staging").is_dir()
    assert compose_newest(run, 1) == Newest(run / "checkpoint-4", 4, True)
    assert compose_newest(run, 1) == Newest(run / "checkpoint-4", 4, False)


def test_options_come_from_the_environment_unless_they_are_given(monkeypatch):
    for name, text in {
        "POLICY": '{"name": "round_robin", "k": 3}',
        "SAVE_STEPS": "auto",
        "OVERHEAD": "0.1",
        "ON_RESTART": "compose",
        "BACKGROUND": "no",
        "HOST_BUFFER": "2097152",
        "WRITE_TIMEOUT": "7.5",
        "MOMENTS": "",
        "ON_MISMATCH": "",
    }.items():
        monkeypatch.setenv(f"LLMTAILOR_{name}", text)
    found = PartialSaving()
    assert found.policy.settings() == {"name": "round_robin", "k": 3}
    assert (found.save_steps, found.overhead, found.on_restart) == (None, 0.1, "compose")
    assert found.options == SavingOptions(background=False, host_buffer=2 << 20, write_timeout=7.5)
    given = PartialSaving("full", 3, on_restart="refuse", background=True)
    assert (given.policy.name, given.save_steps, given.on_restart) == ("full", 3, "refuse")
    assert given.options == SavingOptions(host_buffer=2 << 20, write_timeout=7.5)


def test_every_variable_that_makes_no_sense_is_named():
    wrong = {"LLMTAILOR_SAVE_STEPS": "often", "LLMTAILOR_BACKGROUND": "maybe", "LLMTAILOR_KEEP_COMPOSABLE": "1.5"}
    with pytest.raises(UsageError) as caught:
        from_environment(wrong)
    assert {problem.where for problem in caught.value.problems} == {*wrong}
    assert from_environment({"LLMTAILOR_POLICY": "", "LLMTAILOR_TIMEOUT": "3"}) == {}
    assert VARIABLES.keys() - SavingArguments.__annotations__ == {
        *("policy", "layout", "save_steps", "overhead", "on_restart")
    }
    assert SavingArguments.__annotations__.keys() == {field.name for field in fields(SavingOptions)}
    with pytest.raises(UsageError, match="on_restart is 'again'"):
        PartialSaving(on_restart="again")


def test_a_callback_finds_its_trainer(tmp_path):
    run = Alone(tmp_path / "run", callbacks=(saving := PartialSaving("full", 4),))
    assert saving.trainer is run.trainer
    run.train()
    assert run.saves == [4, 6]
    with pytest.raises(UsageError, match="already has a saver"):
        attach(run.trainer)
    with pytest.raises(UsageError, match="was not called by a Trainer"):
        PartialSaving().on_init_end(run.trainer.args, run.trainer.state, run.trainer.control)


def test_ranks_with_different_options_are_refused(tmp_path):
    start_ranks("saving.processes", ["disagreeing", tmp_path], 2, tmp_path, 120)
    for rank in range(2):
        found = json.loads((tmp_path / f"told-{rank}").read_text())
        assert found["options"].startswith("rank 1: not the same save_steps as on rank 0\n  fix: ")
        # class, code, path in a checkpoint, and the ranks: no fact is lost on the way from one rank to the other
        assert found["of rank 1"] == ["UnsafePickle", [["state-dtype", "model.safetensors", [1]]]]
        assert found["newest"] == ["SourceError", [["other", None, []], ["manifest", "manifest.json", []]]]
    assert not list(tmp_path.glob("run/partial/step-*"))
