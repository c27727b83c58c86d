"""Runs to thin out, and what is left of them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import llmtailor
from helpers.checkpoints import SMALL, made_folder, make
from helpers.composing import convert
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.cli.main import cli
from llmtailor.copying.pool import Stop
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.choose import choose_for_run
from llmtailor.runs.conversion import Conversion
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.thin import write_conversion
from trainings.harness import Runs

SHORT = replace(SMALL, num_layers=2)
"""As much takes half as long, for tests that do it again and again."""


def call(*words: object) -> dict[str, Any]:
    """Run a command with --json; return what it printed."""
    result = CliRunner().invoke(cli, [*map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def make_run(folder: Path, steps: Iterable[int], form: str | None = None, **shape: Any) -> Path:
    """Make a run of synthetic full checkpoints, of ZeRO-3 or in another format."""
    for step in steps:
        if form is None:
            make(folder, step, **shape)
        else:
            shutil.copytree(_converted(form, step, tuple(shape.items())), folder / f"checkpoint-{step}")
    return folder


@cache
def _converted(form: str, step: int, shape: tuple[tuple[str, Any], ...]) -> Path:
    """Return a checkpoint to copy, as most tests want the same few."""
    folder = Path(tempfile.mkdtemp(dir=made_folder().name))
    source = make(folder / "source", step, **dict(shape))
    convert(source, folder / source.name, to=form)
    return folder / source.name


def save_partial(run: Path, full: Path, parts: Iterable[str], ledger: Ledger) -> Ledger:
    """Do what the training-side saver would have done at the step of a full checkpoint; return its ledger after it."""
    index = index_checkpoint(full)
    structure = find_structure(index)
    after = ledger.after(index.global_step, list(parts), structure.parts)
    target = RunFolder(run).at(index.global_step)
    target.parent.mkdir(parents=True, exist_ok=True)
    plan = Conversion(index, structure, target, dict.fromkeys(parts, "test"), after, {"name": "test"}, {})
    write_conversion(plan, Stop())
    return after


def compose(run: Path, step: int, out: Path) -> Path:
    """Do what ``llmtailor merge --run RUN --at STEP OUT`` does."""
    llmtailor.merge(choose_for_run(run, step, StrategyOptions("latest"))[0], out)
    return out


def sources(composite: Path) -> dict[str, int]:
    """Return the step that each part of a composite is said to come from."""
    return {row["part"]: row["step"] for row in json.loads((composite / "llmtailor.json").read_text())["parts"]}


def taken(run: Path) -> int:
    """Return the bytes that a run takes on the disk, each file once however many links it has."""
    stats = [path.lstat() for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def thinned(run: Path, *options: object) -> dict[str, Any]:
    """Thin out a run; return what is told. As much is free afterwards as it says."""
    before = taken(run)
    told = call("thin", run, *options, "--yes")
    assert taken(run) == before - told["freed_bytes"]
    return told


def folders(run: Path) -> list[str]:
    """Return the folders of a run, those of its partial checkpoints too, hidden ones as well."""
    found = [path for parent in (run, run / "partial") if parent.is_dir() for path in parent.iterdir()]
    return sorted(str(path.relative_to(run)) for path in found if path.is_dir() and path.name != "partial")


def copy_of_trained(runs: Runs, name: str, run: Path) -> Path:
    for step in (2, 4):
        original = runs.checkpoint(name, step)
        shutil.copytree(original, run / original.name)
    return run
