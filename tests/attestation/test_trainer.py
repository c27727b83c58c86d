"""What a Trainer has resumed, with faults in its own loading: what the log, the record and the exit say."""

from __future__ import annotations

import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

from transformers import Trainer, TrainerCallback  # noqa: E402

import llmtailor  # noqa: E402
from attestation.resuming import ATTACHED, STEP, NoOptimizer, NoRandom  # noqa: E402
from helpers.cases import diagonal, mostly_long  # noqa: E402
from llmtailor.errors import VerificationError  # noqa: E402
from llmtailor.saving import AttestResume  # noqa: E402
from saving.loop import log_of  # noqa: E402
from trainings.alone import Stops, train  # noqa: E402


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train(tmp_path_factory.mktemp("straight"), steps=6).folder


@pytest.fixture
def run(straight, tmp_path):
    return shutil.copytree(straight, tmp_path / "run")


def resume(run, kind=Trainer, **options):
    train(run, kind=kind, attached={**ATTACHED, **options}, resume_from=run / f"checkpoint-{STEP}", steps=6)
    lines = log_of(run)
    return [line["attested"] for line in lines if "attested" in line], lines


def test_a_clean_resume_says_so_and_its_losses_prove_it(run, caplog):
    (attested,), lines = resume(run)
    assert attested["is_same"] and attested["num_same"] == attested["num_states"] > 60
    assert attested["step"] == lines[0]["step"] == STEP
    assert f"checkpoint-{STEP}: {attested['num_states']} of {attested['num_states']} states are" in caplog.text
    assert "the losses of steps 3 and 4 equal those of the abandoned attempt" in caplog.text
    assert [line["step"] for line in lines if "losses" in line] == [4]


class Constant(Trainer):
    """At the checkpoint's step, the rate is that of its linear schedule."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 2 / 3)
        return self.lr_scheduler


AT_ITS_STEP = "the learning rate of param group 0 at its step is"
SCHEDULES = {
    "cosine": ({"lr_scheduler_type": "cosine"}, [AT_ITS_STEP, "lr_scheduler_type is cosine, linear"]),
    "longer": ({"steps": 60}, [AT_ITS_STEP, "max_steps is 60, 6"]),
    "warm-up": ({"warmup_steps": 4}, [AT_ITS_STEP, "warmup_steps is 4, 0"]),
    "own": ({"kind": Constant}, ["the learning rate of step 1 is 0.00333333, 0.005"]),
}


def notes_on_schedules(run, caplog, **options):
    given = {"attached": ATTACHED, "resume_from": run / f"checkpoint-{STEP}", "steps": 6, **options}
    train(run, callbacks=(Stops(4),), **given)
    (attested,) = [line["attested"] for line in log_of(run) if "attested" in line]
    assert attested["is_same"] and "strong evidence" not in caplog.text
    return [line.partition("note: schedule: ")[2] for line in caplog.text.splitlines() if "note: schedule: " in line]


@pytest.mark.parametrize("name", mostly_long(SCHEDULES, "longer", "own"))
def test_another_schedule_is_a_note_and_never_evidence(run, caplog, name):
    """The first rate is the checkpoint's, whatever rule computes the next ones."""
    options, starts = SCHEDULES[name]
    notes = notes_on_schedules(run, caplog, **options)
    assert len(notes) == len(starts) and all(map(str.startswith, notes, starts)), notes


def test_another_schedule_within_the_same_warm_up(tmp_path, caplog):
    """All rates so far are equal."""
    train(tmp_path, steps=6, warmup_steps=4)
    notes = notes_on_schedules(tmp_path, caplog, warmup_steps=4, lr_scheduler_type="cosine")
    assert notes == ["lr_scheduler_type is cosine, linear in the checkpoint"]


class NoWeights(Trainer):
    def _load_from_checkpoint(self, *args, **kwargs):
        """As after renaming keys: the Trainer only warns of keys that are missing."""


class OtherOrder(Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        states, params = self.optimizer.state, [*self.optimizer.state]
        by_shape: dict = {}
        for param in params:
            by_shape.setdefault(param.shape, []).append(param)
        before = dict(states)
        for alike in by_shape.values():
            for param, other in zip(alike, reversed(alike), strict=True):
                states[param] = before[other]


@pytest.mark.parametrize(
    ("kind", "cause", "kinds"),
    [
        (NoWeights, "the weights are not the checkpoint's", {"master"}),
        (NoOptimizer, "optimizer.pt and scheduler.pt were not loaded", {"exp_avg", "exp_avg_sq"}),
        (NoRandom, "the random states were not restored on 1 of 1 ranks", set()),
        (OtherOrder, "states were given to other params", {"exp_avg", "exp_avg_sq"}),
    ],
)
def test_a_loader_that_leaves_something_out(run, capfd, kind, cause, kinds):
    found, _ = resume(run, kind)
    (wrong,) = [one for one in found if not one["is_same"]]
    assert wrong["cause"].startswith(cause)
    assert {row["state"] for row in wrong["states"]} == kinds
    assert f"cause: {cause}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("file", "cause"),
    [
        ("scheduler.pt", "the checkpoint has no scheduler.pt, and without it the Trainer loads no optimizer"),
        ("optimizer.pt", "the checkpoint lacks optimizer.pt"),
    ],
)
def test_a_file_that_the_trainer_does_without(run, file, cause):
    (run / f"checkpoint-{STEP}" / file).unlink()
    (wrong,), _ = resume(run)
    assert not wrong["is_same"] and wrong["cause"].startswith(cause)


def test_stop_ends_the_training_before_its_first_step(run):
    with pytest.raises(VerificationError, match="NOT THE TRAINING THAT WAS SAVED") as caught:
        resume(run, NoOptimizer, on_mismatch="stop")
    assert caught.value.exit_code == 7
    assert not [*(run / "partial").glob("step-*")]
    assert resume(run)[0][-1]["is_same"], "nothing was moved aside, and the folder is not locked"


class Spoiling(TrainerCallback):
    """Changes a weight in an event of the training."""

    def __init__(self, event):
        self.is_due = True
        setattr(self, event, self.spoil)

    def spoil(self, args, state, control, model=None, **_):
        if self.is_due:
            self.is_due = False
            with torch.no_grad():
                next(model.parameters()).mul_(1.5)


@pytest.mark.parametrize(
    ("has_saver", "event"),
    diagonal([True, False], ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step"]),
)
def test_what_callbacks_change_before_the_first_step_is_seen(run, event, has_saver, capfd):
    spoiling = Spoiling(event)
    callbacks = (spoiling,) if has_saver else (AttestResume(), spoiling)
    attached = ATTACHED if has_saver else None
    train(run, callbacks=callbacks, attached=attached, resume_from=run / f"checkpoint-{STEP}", steps=6)
    assert "master of 1 param: other values" in capfd.readouterr().err


def test_the_first_forward_pass_may_change_buffers(tmp_path, caplog):
    def counting(model):
        model.register_buffer("num_passes", torch.zeros(1))

        def count(*_):
            model.num_passes.add_(1)

        model.register_forward_pre_hook(count)

    train(tmp_path, prepare=counting)
    train(tmp_path, prepare=counting, callbacks=(AttestResume(),), resume_from=tmp_path / "checkpoint-2")
    assert "NOT THE TRAINING" not in caplog.text and "states are the checkpoint's" in caplog.text


def test_off_compares_nothing(run):
    assert resume(run, NoOptimizer, attest="off")[0] == []


def test_without_the_saver(run, caplog):
    train(run, callbacks=(AttestResume("full"),), resume_from=run / f"checkpoint-{STEP}", steps=4)
    assert "states are the checkpoint's (every byte)" in caplog.text
    assert not (run / "partial").exists()


def test_weights_without_the_rest_are_seen_once_the_checkpoint_is_named(run):
    """``train()`` on loaded weights: the Trainer knows of no checkpoint."""
    found = []

    class Naming(TrainerCallback):
        trainer: Trainer

        def on_train_begin(self, *args, **kwargs):
            found.append(llmtailor.attest(run / f"checkpoint-{STEP}", trainer=self.trainer))

    class Weights(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._load_from_checkpoint(str(run / f"checkpoint-{STEP}"))
            naming = Naming()
            naming.trainer = self
            self.add_callback(naming)

    train(run.with_name("other"), kind=Weights, steps=1)
    (wrong,) = found
    assert not wrong.is_same
    assert "global_step is 0, 2 in the checkpoint" in map(str, wrong.mismatches)
    assert {row.state_kind for row in wrong.rows} == {"exp_avg", "exp_avg_sq"}
