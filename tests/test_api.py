"""The public API: its names and types."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmtailor
from helpers.checkpoints import make_run
from helpers.commands import call
from helpers.files import contents
from helpers.places import ROOT

MODULES = ("llmtailor", "llmtailor.saving")


def exported(module: str) -> dict[str, object]:
    """Return the public objects of a module, by name."""
    loaded = importlib.import_module(module)
    return {name: getattr(loaded, name) for name in loaded.__all__ if name != "__version__"}


@pytest.mark.parametrize("module", MODULES)
def test_type_checkers_see_the_names_that_exist(module):
    path = ROOT / module.replace(".", "/") / "__init__.py"
    typed = {
        (alias.asname, node.module)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llmtailor")
        for alias in node.names
        if alias.asname  # but for the version
    }
    assert typed == set(importlib.import_module(module)._PUBLIC.items())
    assert exported(module)
    with pytest.raises(AttributeError, match="nonsense"):
        importlib.import_module(module).nonsense  # noqa: B018


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_has_a_docstring(module):
    assert not [name for name, one in exported(module).items() if not inspect.getdoc(one)]


SCRIPT = """
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedTokenizerBase, Trainer

import llmtailor
from llmtailor import saving


class Mine:
    name = "mine"
    needs_drift = False

    def choose(self, situation: saving.Situation) -> dict[str, str]:
        return {situation.parts[0]: "first"}

    def worst_staleness(self, structure: object, parts: object) -> None:
        return None

    def settings(self) -> dict[str, object]:
        return {"name": self.name}


def compose(recipe: Path, out: Path, run: Path) -> None:
    options = llmtailor.Options(world_size=8, stage=3)
    composition = llmtailor.plan_merge(recipe, out, options)
    llmtailor.write(composition)
    report = llmtailor.merge(recipe, out)
    reveal_type(report.parts)
    reveal_type(composition.report.notices)
    inspection = llmtailor.inspect_checkpoint(out)
    reveal_type(inspection["parts"][0]["num_bytes"])
    verdict = llmtailor.verify_checkpoint(out, deep=True)
    reveal_type(verdict.findings)
    latest = llmtailor.find_latest(run)
    reveal_type(latest.path)
    try:
        llmtailor.merge(recipe)
    except llmtailor.TailorError as error:
        reveal_type(error.problems)


def train(
    trainer: Trainer, engine: DeepSpeedEngine, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> None:
    reveal_type(saving.attach(trainer, policy=Mine(), save_steps=50, keep_composable=2))
    reveal_type(saving.saver_for("runs/x", engine=engine, policy={"name": "parity"}, tokenizer=tokenizer))
    optimizer = torch.optim.AdamW(llmtailor.layer_param_groups(model, 0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu")
    saver = saving.saver_for(
        "runs/x", model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, policy=saving.Parity()
    )
    reveal_type(saver.start(0, resumed_from=Path("runs/x/checkpoint-400")))
    reveal_type(saver.save(50))
    try:
        saver.save(100)
    except saving.SaveFailed as failed:
        reveal_type(failed.problems[0].fix)
"""
"""Typical use, all of which must type-check"""
WRONG = {
    "llmtailor.nonsense": "attr-defined",
    'llmtailor.Options(world_size="8")': "arg-type",
    "saving.attach(None)": "arg-type",
    'saving.saver_for("runs/x", modle=None)': "call-arg",
}
"""Mistakes that must not pass, and mypy's codes for them"""
STUBS = {
    "deepspeed": "import torch\n\nclass DeepSpeedEngine(torch.nn.Module): ...\n",
    "accelerate": "class Accelerator: ...\n",
}
"""These have no type hints of their own, so a type checker takes their classes for Any."""


@pytest.mark.long
def test_a_user_of_every_public_name_under_mypy_strict(tmp_path):
    for name, stub in STUBS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.pyi").write_text(stub)
    names = [f"{module.removeprefix('llmtailor.')}.{name}" for module in MODULES for name in exported(module)]
    lines = [*SCRIPT.splitlines(), *(f"reveal_type({name})" for name in names)]
    wrong = {len(lines) + number: code for number, code in enumerate(WRONG.values(), 1)}
    (tmp_path / "user.py").write_text("\n".join([*lines, *WRONG, ""]))
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    revealed = dict(re.findall(r'^user.py:(\d+): note: Revealed type is "(.*)"$', done.stdout, re.MULTILINE))
    errors = {
        int(line): code for line, code in re.findall(r"^user.py:(\d+): error: .* \[([\w-]+)\]$", done.stdout, re.M)
    }
    assert errors == wrong, done.stdout + done.stderr
    assert len(revealed) == "\n".join(lines).count("reveal_type(")
    assert not {lines[int(line) - 1]: text for line, text in revealed.items() if re.search(r"\bAny\b", text)}


def test_help_shows_the_api():
    for name in MODULES:
        module = importlib.import_module(name)
        assert set(module.__all__) <= {*dir(module)}
        for public, one in exported(name).items():
            if inspect.isfunction(one):
                assert "<function" not in str(inspect.signature(one)), public


def test_texts_are_paths_and_a_run_is_composed_as_by_the_command(tmp_path):
    run = make_run(tmp_path / "run", (100, 200))
    (tmp_path / "recipe.yaml").write_text(
        f"base_model: {run}/checkpoint-200\nparts:\n  - {{from: {run}/checkpoint-100, select: [odd]}}\n"
    )
    llmtailor.merge(f"{tmp_path}/recipe.yaml", f"{tmp_path}/out")
    assert llmtailor.verify_checkpoint(tmp_path / "out").is_resumable
    assert llmtailor.merge_run(f"{run}").out == f"{run}/checkpoint-200"  # it has the newest state
    report = llmtailor.merge_run(f"{run}", f"{tmp_path}/parity", strategy="parity")
    assert Path(report.out) == tmp_path / "parity"
    call("merge", "--run", run, tmp_path / "by-command", "--strategy", "parity")
    told = ("README.md", "llmtailor.json")
    assert contents(tmp_path / "parity", *told) == contents(tmp_path / "by-command", *told)
