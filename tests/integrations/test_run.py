"""``llmtailor run``: a saver in a script that knows nothing of it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import transformers.trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import llmtailor.integrations.report_to
from helpers.commands import call, run_here
from helpers.places import ROOT, SUPPORT
from llmtailor.cli.run import _STARTUP, is_first_launcher, prepare
from llmtailor.integrations.launched import LaunchedSaving
from trainings.alone import Alone
from trainings.harness import environment

pytestmark = pytest.mark.real
SCRIPT = """
import importlib.util
import sys
import hidden

assert importlib.util.find_spec("transformers.trainer") is not None
from trainings.alone import Alone

run = Alone(sys.argv[1], logging_strategy="no", report_to=sys.argv[2:] or "none").train()
sys.exit(7 if run.trainer.args.process_index == 0 else 0)
"""


@pytest.fixture
def script(tmp_path):
    """A script, and the environment of a machine that has a ``sitecustomize`` already."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (site := tmp_path / "site").mkdir()
    (site / "sitecustomize.py").write_text("import sys, types\nsys.modules['hidden'] = types.ModuleType('hidden')\n")
    paths = [str(site), str(SUPPORT), str(ROOT)]
    return tmp_path / "script.py", {**environment(), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(words, environ, *program):
    command = [sys.executable, "-m", "llmtailor", "run", *map(str, words), "--", *map(str, program)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


SAVES = ["--policy", "full", "--save-steps", 4]


def saves(tmp_path):
    return [one.name for one in sorted((tmp_path / "run" / "partial").glob("step-*"))]


@pytest.mark.long  # it imports transformers anew
@pytest.mark.parametrize("report_to", [[], ["llmtailor"]], ids=["launched", "report_to"])
def test_a_script_saves_without_knowing_it(tmp_path, script, report_to):
    path, environ = script
    done = run(SAVES, environ, sys.executable, path, tmp_path / "run", *report_to)
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("llmtailor: saving parts (full, save_steps: 4) in") == 1
    assert saves(tmp_path) == ["step-00000004", "step-00000006"]


def test_the_program_starts_prepared(tmp_path, script):
    """Python has imported what is added to the script's process, and what that hides."""
    _, environ = script
    program = "import os, sys, hidden; print(os.environ['LLMTAILOR_POLICY'], sys.meta_path[0]); sys.exit(7)"
    done = run(SAVES, environ, sys.executable, "-c", program)
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("full <sitecustomize._Finder")
    assert "no Python process on this machine imported transformers' Trainer" in done.stderr


def test_nothing_is_said_where_a_process_of_the_program_looked_for_the_trainer(script):
    """And what watches is no child of the program, which may wait for all that it has."""
    _, environ = script
    looks = "import importlib.util; importlib.util.find_spec('transformers.trainer')"
    waits = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True); os.wait()"
    done = run([], environ, sys.executable, "-c", waits, looks)
    assert (done.returncode, "ChildProcessError" in done.stderr, "note:" in done.stderr) == (1, True, False), (
        done.stderr
    )


class Known(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the Trainer's module as it is, since its import takes seconds."""

    def find_spec(self, fullname, path, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname == "transformers.trainer" else None

    def create_module(self, spec):
        return transformers.trainer

    def exec_module(self, module):
        pass


def test_the_saver_is_added_when_a_script_imports_the_trainer(tmp_path, script, monkeypatch, capfd):
    """The script runs in this process. It looks for the module before it imports it."""
    path, environ = script
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    words = [sys.executable, path, tmp_path / "run"]
    call("run", *SAVES, "--", *words, env=environ)
    [(_, arguments, prepared)] = started
    for name, text in prepared.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(sys, "argv", arguments[1:])
    monkeypatch.setattr(sys, "path", [*prepared["PYTHONPATH"].split(os.pathsep), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [Known(), *sys.meta_path])
    trainer = transformers.trainer
    monkeypatch.setattr(trainer, "__spec__", trainer.__spec__)  # to be put back
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS])
    monkeypatch.delitem(vars(transformers), "Trainer")
    monkeypatch.setitem(sys.modules, "hidden", None)
    for name in ("sitecustomize", "transformers.trainer", "trainings.alone"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("sitecustomize")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 7
    assert capfd.readouterr().err.count("llmtailor: saving parts (full, save_steps: 4) in") == 1
    assert saves(tmp_path) == ["step-00000004", "step-00000006"]


@pytest.mark.long
def test_every_rank_saves_and_a_second_start_goes_on(tmp_path, script):
    path, environ = script
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, path, tmp_path / "run"]
    assert run(["--save-steps", 2], environ, *ranks).returncode
    (tmp_path / "run" / "partial" / "step-00000006" / "manifest.json").unlink()
    done = run(["--save-steps", 2, "--resume", tmp_path / "run"], environ, *ranks)
    assert "composed" in done.stderr and "resuming at step 4" in done.stderr
    attempts = json.loads((tmp_path / "run" / "partial" / "attempts.json").read_text())["attempts"]
    assert [one["resumed_at"] for one in attempts] == [0, 4]
    assert len(list((tmp_path / "run" / "partial" / "step-00000006").glob("rank-*"))) == 2


@pytest.fixture
def launched(monkeypatch):
    """This process as ``llmtailor run`` starts it."""
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS])
    transformers.trainer.DEFAULT_CALLBACKS.append(LaunchedSaving)
    monkeypatch.setenv("LLMTAILOR_SAVE_STEPS", "3")


def test_a_saver_that_the_script_attaches_is_used_instead(tmp_path, launched):
    assert Alone(tmp_path / "own", {"policy": "full", "save_steps": 2}).train().saves == [2, 4, 6]
    assert Alone(tmp_path / "launched").train().saves == [3, 6]


def test_report_to_names_the_saver(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="llmtailor is not supported"):
        monkeypatch.delitem(INTEGRATION_TO_CALLBACK, "llmtailor", raising=False)
        Alone(tmp_path / "unknown", report_to="llmtailor")
    importlib.reload(llmtailor.integrations.report_to)
    monkeypatch.setenv("LLMTAILOR_SAVE_STEPS", "3")
    assert Alone(tmp_path / "run", report_to="llmtailor").train().saves == [3, 6]


def test_what_only_evaluates_is_left_alone(tmp_path, launched):
    run = Alone(tmp_path / "run", prepare=lambda model: model.requires_grad_(False))
    assert run.trainer.evaluate()["eval_loss"] > 0
    assert not (tmp_path / "run" / "partial").exists()


def test_a_program_whose_python_lacks_llmtailor_does_not_train(monkeypatch):
    """The script may catch an ImportError, and train without a saver; but not this."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("sitecustomize", "transformers.trainer", "llmtailor.integrations.launched"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "llmtailor.integrations", None)
    runpy.run_path(str(_STARTUP / "sitecustomize.py"))
    with pytest.raises(SystemExit, match=r"llmtailor can't be imported .*; install llmtailor\[train\] for"):
        importlib.import_module("transformers.trainer")


def test_the_environment_of_the_program():
    environ = {"PYTHONPATH": f"/x{os.pathsep}{os.pathsep}/y", "LLMTAILOR_POLICY": "full", "LLMTAILOR_MOMENTS": "bf16"}
    prepare(environ, {"policy": "parity"})
    first, *others = environ.pop("PYTHONPATH").split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").is_file()
    assert others == ["/x", "/y"]
    assert environ == {"LLMTAILOR_POLICY": "parity", "LLMTAILOR_MOMENTS": "bf16"}
    prepare(again := {"PYTHONPATH": first}, {})
    assert again["PYTHONPATH"] == first


@pytest.mark.parametrize(
    ("environ", "is_first"),
    [
        ({}, True),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "1"}, False),
        ({"NODE_RANK": "1", "RANK": "0"}, False),
        ({"OMPI_COMM_WORLD_RANK": "3"}, False),
        ({"PMI_RANK": "1"}, False),
        ({"PMI_RANK": "0"}, True),
    ],
)
def test_only_the_first_of_several_launchers_composes(environ, is_first):
    assert is_first_launcher(environ) == is_first


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--", "no-such-program"], 2, "there is no such program"),
        (["--save-steps", "often", "--", "true"], 2, "LLMTAILOR_SAVE_STEPS"),
        (["--policy", "partiy", "--", "true"], 2, "did you mean 'parity'"),
        (["--policy", "full"], 2, "PROGRAM"),
        (["--resume", "damaged", "--", "true"], 4, "no checkpoint can be used"),
    ],
)
def test_what_is_refused_before_the_program_starts(tmp_path, monkeypatch, words, code, told):
    monkeypatch.delattr(os, "execve")  # would end the tests
    (broken := tmp_path / "damaged" / "partial" / "step-00000002").mkdir(parents=True)
    (broken / "manifest.json").write_text("{}")
    done = run_here("run", *words, cwd=tmp_path)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr
