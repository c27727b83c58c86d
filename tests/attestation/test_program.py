"""``llmtailor attest`` and ``run --attest``: programs that know nothing of it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
LONG = pytest.mark.long
pytestmark = pytest.mark.real

import transformers.trainer  # noqa: E402

from attestation.resuming import ATTACHED, STEP, NoOptimizer, NoRandom  # noqa: E402
from helpers.cases import mostly_long  # noqa: E402
from helpers.commands import call  # noqa: E402
from llmtailor.attestation.hooks import PROCESS_HOOKS  # noqa: E402
from llmtailor.integrations import attested  # noqa: E402
from llmtailor.integrations.attested import ATTESTING, Task  # noqa: E402
from llmtailor.integrations.launched import LaunchedAttest, LaunchedSaving  # noqa: E402
from trainings.alone import train  # noqa: E402
from trainings.harness import environment  # noqa: E402

LOOP = """
import sys, torch

def loop(client, checkpoint, how):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    data = [torch.randn(4, 8) for _ in range(3)]
    if client in ("accelerate", "fsdp"):
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP",
                                                  state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True)
        accelerator = Accelerator(cpu=True, fsdp_plugin=sharding if client == "fsdp" else None)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        load, save, backward = accelerator.load_state, accelerator.save_state, accelerator.backward
    else:
        import deepspeed
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
        config["zero_allow_untested_optimizer"] = True
        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
        load, save, backward, optimizer = model.load_checkpoint, model.save_checkpoint, model.backward, model
    if how != "save":
        load(checkpoint, **({"load_optimizer_states": False} if how == "bad" and client == "deepspeed" else {}))
    if how == "bad" and client != "deepspeed":
        optimizer.optimizer.state.clear()
    if how == "own":
        import llmtailor
        llmtailor.attest(checkpoint, accelerator=accelerator, on_mismatch="stop")
    for batch in data:
        backward(model(batch).pow(2).mean())
        optimizer.step()
        if client != "deepspeed":
            scheduler.step()
            optimizer.zero_grad()
    if how == "save":
        save(checkpoint)
    print("it trained on")
    if client == "fsdp":  # else gloo may abort while the process ends
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    loop(*sys.argv[1:])
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path / "loop.py"


def llmtailor(*words):
    command = [sys.executable, "-m", "llmtailor", *map(str, words)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


def alone(program, *words):
    return ["--", sys.executable, program, *words]


def ranks(program, *words):
    return ["--", sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, program, *words]


@pytest.mark.parametrize("launch", mostly_long([alone, ranks], alone))
def test_a_loop_is_ended_before_its_first_step(tmp_path, program, launch):
    space: dict = {}
    exec(LOOP.replace("__main__", "-"), space)
    space["loop"]("accelerate", str(tmp_path / "saved"), "save")
    done = llmtailor("attest", tmp_path / "saved", "--json", *launch(program, "accelerate", tmp_path / "saved", "bad"))
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout)["cause"] == "only the weights were loaded, not the optimizer's states"
    assert "Traceback" not in done.stderr and "it trained on" not in done.stderr


@pytest.mark.long
def test_a_loop_may_attest_itself(tmp_path, program):
    """Its own report is taken, whatever it would do about it."""
    saved = tmp_path / "saved"
    assert llmtailor("run", *ranks(program, "accelerate", saved, "save")).returncode == 0
    assert llmtailor("attest", saved, *ranks(program, "accelerate", saved, "own")).returncode == 0
    changed = "        import llmtailor; scheduler.scheduler.last_epoch = 0\n"
    program.write_text(program.read_text().replace("        import llmtailor\n", changed))
    done = llmtailor("attest", saved, *ranks(program, "accelerate", saved, "own"))
    assert done.returncode == 7 and "it trained on" not in done.stderr, done.stderr


@LONG
@pytest.mark.parametrize("client", ["accelerate", "fsdp", "deepspeed"])
def test_loops_of_all_clients(tmp_path, program, client):
    saved = tmp_path / "saved"
    assert llmtailor("run", *ranks(program, client, saved, "save")).returncode == 0
    for how, code in [("good", 0), ("bad", 7)]:
        done = llmtailor("attest", saved, *ranks(program, client, saved, how))
        assert done.returncode == code, done.stderr
        assert ("NOT THE TRAINING" in done.stdout) == bool(code) and "Traceback" not in done.stderr
        assert "it trained on" not in done.stderr
    done = llmtailor("attest", saved, *ranks(program, client, saved, "save"))
    assert (done.returncode, "reached its first optimizer step without resuming" in done.stderr) == (2, True)
    done = llmtailor("run", "--attest=full", *ranks(program, client, saved, "good"))
    assert done.returncode == 0 and "it trained on" in done.stdout
    assert done.stderr.count("states are the checkpoint's (every byte)") == 1


class Ended(BaseException):
    """In place of the end of the process"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train(tmp_path_factory.mktemp("straight")).folder


@pytest.fixture
def run(straight, tmp_path, monkeypatch):
    """A run; in each Trainer of this process are the callbacks of a launched program."""
    callbacks = [*transformers.trainer.DEFAULT_CALLBACKS, LaunchedAttest]
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", callbacks)
    return shutil.copytree(straight, tmp_path / "run")


def ended(monkeypatch, checkpoint, program):
    """Call a program as ``llmtailor attest`` would start it; return what it has written when it was ended."""

    def leave(code):
        assert code == 0
        raise Ended

    result = checkpoint.parent / "result.json"
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", leave)
        patch.setattr(attested, "_task", None)  # each case is a process of its own
        patch.setenv(ATTESTING, Task(str(checkpoint), str(result)).to_text())
        with pytest.raises(Ended):
            program()
    return json.loads(result.read_text())


def proof(run, monkeypatch, kind, resume_from, attached=None):
    given = {"kind": kind, "attached": attached, "resume_from": resume_from}
    return ended(monkeypatch, run / f"checkpoint-{STEP}", lambda: train(run, steps=6, **given))


class NoSchedule(transformers.Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        self.lr_scheduler.last_epoch = 0


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (transformers.Trainer, None),
        (NoRandom, "the random states were not restored on 1 of 1 ranks"),
        (NoSchedule, "the schedule was restarted"),
    ],
)
def test_a_trainer_is_ended_before_its_first_step(run, monkeypatch, kind, cause):
    made = proof(run, monkeypatch, kind, run / f"checkpoint-{STEP}", attached=ATTACHED)
    assert (made["is_same"], made["attested"]["cause"]) == (cause is None, cause)
    assert not (run / "partial").exists(), "a saver of the program's saves nothing"


@pytest.mark.parametrize(
    ("resume_from", "what"),
    [
        (None, "PROGRAM reached its first optimizer step without resuming"),
        ("checkpoint-4", "PROGRAM has resumed from"),
    ],
)
def test_what_resumes_from_elsewhere_is_refused(run, monkeypatch, resume_from, what):
    made = proof(run, monkeypatch, transformers.Trainer, resume_from and run / resume_from)
    assert made["exit_code"] == 2 and made["problems"][0]["what"].startswith(what)


@pytest.mark.parametrize("launched", [LaunchedAttest, LaunchedSaving])
def test_stop_ends_a_launched_training_with_one_error(run, monkeypatch, capfd, launched):
    callbacks = [one for one in transformers.trainer.DEFAULT_CALLBACKS if one is not LaunchedAttest]
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*callbacks, launched])
    monkeypatch.setenv("LLMTAILOR_ON_MISMATCH", "stop")

    with pytest.raises(SystemExit) as end:
        train(run, kind=NoOptimizer, resume_from=run / f"checkpoint-{STEP}", steps=6)
    assert end.value.code == 7
    assert capfd.readouterr().err.count("error: ") == 1


def test_stop_does_not_end_what_cant_be_attested(run, monkeypatch, caplog):
    """A file in torch's form of before 1.6, which torch still loads, can't be read; the training may be right."""
    monkeypatch.setenv("LLMTAILOR_ON_MISMATCH", "stop")
    checkpoint = run / "old" / f"checkpoint-{STEP}"
    train(run / "old")
    for name in ("optimizer.pt", "scheduler.pt"):
        states = torch.load(checkpoint / name, weights_only=False)
        torch.save(states, checkpoint / name, _use_new_zipfile_serialization=False)
    train(run / "old", resume_from=checkpoint, steps=6)
    assert f"checkpoint-{STEP}: not attested: " in caplog.text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["attest", "missing", "--", "true"], 4, "it does not exist"),
        (["attest", ".", "--", "no-such-program"], 2, "there is no such program"),
        (["attest", ".", "--", "false"], 2, "PROGRAM ended with exit code 1 before its first optimizer step"),
        (["run", "--attest", "--policy", "full", "--", "true"], 2, "nothing is saved with it, so --policy"),
        (["run", "--on-mismatch", "shrug", "--", "true"], 2, "'warn', 'stop'"),
    ],
)
def test_what_is_refused(tmp_path, words, code, said):
    assert said in call(*words, code=code, cwd=tmp_path).stderr


LIGHTNING = """
import sys, torch, lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, number):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))]

class Restarting(pl.Callback):
    def on_load_checkpoint(self, trainer, module, checkpoint):
        for state in checkpoint["optimizer_states"][0]["state"].values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])

class Late(pl.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

def main(folder, how, *callbacks):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=2 if how == "save" else 3, **quiet,
                         callbacks=[*callbacks, *{"bad": [Restarting()], "late": [Late()]}.get(how, [])])
    loader = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
    trainer.fit(Module(), loader, ckpt_path=None if how in ("save", "begin") else folder + "/checkpoint.ckpt")
    if how == "save":
        trainer.save_checkpoint(folder + "/checkpoint.ckpt")
    print("it trained on")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def lightning(tmp_path):
    """The function that runs the program in this process, after it has saved a checkpoint."""
    pytest.importorskip("lightning")
    space: dict = {}
    exec(LIGHTNING.replace("__main__", "-"), space)
    (tmp_path / "saved").mkdir()
    space["main"](str(tmp_path / "saved"), "save")
    return space["main"]


@pytest.mark.parametrize("has_saver", [True, False])
def test_what_the_last_callback_of_lightning_changes_is_seen(tmp_path, lightning, has_saver, capfd):
    from llmtailor.integrations.lightning import LightningAttestResume, LightningPartialSaving

    saver = (
        LightningPartialSaving("full", 1, output_dir=tmp_path / "run", on_mismatch="warn")
        if has_saver
        else LightningAttestResume()
    )
    lightning(str(tmp_path / "saved"), "late", saver)
    told = capfd.readouterr()
    assert "moments were reset to zero" in told.err and "it trained on" in told.out
    assert bool([*(tmp_path / "run" / "partial").glob("step-*3")]) == has_saver, "it saves the first step"


def test_lightning_is_ended_before_its_first_step(tmp_path, lightning, monkeypatch, capfd):
    """In this process, with what llmtailor adds to a launched one; it is launched in the test that follows."""
    from llmtailor.integrations.lightning import LaunchedLightningAttest

    of_optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(of_optimizers, "_global_optimizer_pre_hooks", OrderedDict())
    for name in ("take", "before_saving"):
        monkeypatch.setattr(PROCESS_HOOKS, name, None)

    def fit(how):
        attested.HOOKS[of_optimizers.__name__](of_optimizers)
        lightning(str(tmp_path / "saved"), how, LaunchedLightningAttest())

    capfd.readouterr()  # of when it saved
    made = ended(monkeypatch, tmp_path / "saved", lambda: fit("late"))
    assert not made["is_same"] and made["attested"]["cause"].startswith("moments were reset to zero")
    assert "it trained on" not in capfd.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("late", 7), ("bad", 7), ("good", 0), ("begin", 2)])
def test_a_launched_lightning(tmp_path, lightning, how, code):
    saved, file = tmp_path / "saved", tmp_path / "program.py"
    file.write_text(LIGHTNING)
    done = llmtailor("attest", saved, "--", sys.executable, file, saved, how)
    assert done.returncode == code, done.stderr
    assert ("moments were reset to zero" in done.stdout) == (code == 7) and "it trained on" not in done.stderr
    assert ("without resuming" in done.stderr) == (how == "begin")


@pytest.mark.long
def test_the_hooks_are_added_to_what_the_program_imports(tmp_path):
    """Without a launcher: a program that takes a step without resuming is ended."""
    step = "import torch; p = torch.nn.Parameter(torch.ones(2)); torch.optim.SGD([p]).step(); print('it trained on')"
    (Path(tmp_path) / "program.py").write_text(step)
    done = call("attest", tmp_path, "--", sys.executable, tmp_path / "program.py", code=2)
    assert "reached its first optimizer step without resuming" in done.stderr
