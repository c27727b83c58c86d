"""Each damage gives the finding that docs/findings.md names, and nothing worse; `merge` does what the page says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import llmtailor
from helpers.composing import convert
from helpers.places import ROOT
from llmtailor.errors import TailorError, UnsupportedCheckpoint
from llmtailor.findings import SEVERITIES, Finding
from llmtailor.recipe import Recipe
from llmtailor.verify.verify import verify_checkpoint
from trainings.alone import finished
from verify.damages import (
    DCP,
    DEEPSPEED,
    OTHER_STEP,
    STEP,
    TRAINER,
    UNIVERSAL,
    UNJUDGED,
    Change,
    Table,
    load_all,
)

pytestmark = pytest.mark.real

TABLES = {"": DEEPSPEED, "plain: ": TRAINER, "DCP: ": DCP, "universal: ": UNIVERSAL}
PAGE = {
    title: (severity, set(re.findall("[a-z-]+", codes)), merge, stock)
    for title, severity, codes, merge, stock in re.findall(
        r"^\| (.+?) \| (error|warning|note|-)((?:,? `[a-z-]+`)*) \| (refuses|-) \| (.+) \|$",
        (ROOT / "docs" / "findings.md").read_text(),
        re.MULTILINE,
    )
}
STAGES = {"ZeRO-3": ("llama",), "ZeRO-1/2": ("zero2",)}


def rows(prefix: str, *usual: str) -> Iterator[Any]:
    """Yield title, change, what is said, and the run of each row. The short suite tries one run, and the usual take
    turns."""
    for at, (title, (change, *more)) in enumerate(TABLES[prefix].items()):
        told, runs = (*more, "", None)[:2] if len(more) < 2 else more
        runs = runs or STAGES.get(title.removesuffix(" (--deep)").rpartition(", ")[2], usual)
        for number, run in enumerate(runs):
            is_long = number != (at % len(usual) if runs == usual else 0)
            marks = pytest.mark.long if is_long else ()
            yield pytest.param(prefix + title, change, told, run, id=f"{title}-{run}", marks=marks)


def each(prefix: str, *usual: str) -> Any:
    return pytest.mark.parametrize(("title", "change", "told", "run"), [*rows(prefix, *usual)])


def plan(checkpoint: Path) -> None:
    llmtailor.plan_merge(Recipe(name="x", base=checkpoint), checkpoint.parent / "out")


@cache
def found_in(checkpoint: Path) -> tuple[Finding, ...]:
    return verify_checkpoint(checkpoint, name="x").findings


def check(title: str, change: Change, told: str, checkpoint: Path, other: Path, folder: Path) -> None:
    severity, codes, merge, _ = PAGE[title]
    shutil.copytree(checkpoint, folder / checkpoint.name)
    before = found_in(checkpoint)
    change(folder / checkpoint.name, other)
    (damaged,) = folder.glob("checkpoint-*")  # one damage is another name
    verdict = verify_checkpoint(damaged, name="x")
    if title.endswith(" (--deep)"):
        assert verdict.findings == before  # nothing that the structure would show
        verdict = verify_checkpoint(damaged, deep=True, name="x")
    if merge == "-":
        plan(damaged)
    else:
        with pytest.raises(TailorError):
            plan(damaged)
            convert(damaged, folder / "out")
    if severity == "-":
        assert not {*verdict.findings} - {*before}
        return
    found = [
        one for one in verdict.findings if told in one.what and one.severity == severity and one.code.value in codes
    ]
    assert found, "\n".join(f"{one.code.value} {one}" for one in verdict.findings)
    assert all(one.fix for one in found)
    assert severity == min((one.severity for one in verdict.findings), key=SEVERITIES.index), verdict.findings
    assert verdict.is_resumable == (severity != "error")


@each("", "llama", "zero2")
def test_deepspeed(title, change, told, run, runs, tmp_path):
    check(title, change, told, runs[run].checkpoint(STEP), runs[run].checkpoint(OTHER_STEP), tmp_path)


@pytest.fixture
def plain():
    return finished().checkpoint(STEP)


@each("plain: ", "plain")
def test_the_trainer_without_deepspeed(title, change, told, run, plain, tmp_path):
    check(title, change, told, plain, plain, tmp_path)


@pytest.mark.parametrize(("change", "told"), UNJUDGED.values(), ids=UNJUDGED)
def test_what_can_not_be_judged_is_not_called_unresumable(change, told, plain, tmp_path):
    root = Path(shutil.copytree(plain, tmp_path / "checkpoint-4"))
    change(root, root)
    for read in (verify_checkpoint, plan):
        with pytest.raises(UnsupportedCheckpoint) as refused:
            read(root)
        assert told in str(refused.value) and all(problem.fix for problem in refused.value.problems)


def of_another_save(runs, run: str) -> Path:
    return runs.checkpoint(run, 4) if run == "trainer" else runs.checkpoint("loop-w3")


@each("DCP: ", "loop")
def test_dcp(title, change, told, run, runs, tmp_path):
    check(title, change, told, runs.checkpoint(run), of_another_save(runs, run), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("title", "change", "run"),
    [(*one.values[:2], one.values[3]) for one in rows("DCP: ", "loop") if one.values[3] in ("loop", "columns")],
)
def test_what_torch_does_with_it(title, change, run, runs, tmp_path):
    """What the Trainer does takes a training to observe; it was read in its code."""
    root = Path(shutil.copytree(runs.checkpoint(run), tmp_path / "checkpoint-2"))
    change(root, of_another_save(runs, run))
    stock = PAGE[title][3]

    def load(**options: bool) -> None:
        state = load_all(runs.checkpoint(run))
        dcp.load(state, checkpoint_id=root, no_dist=True, planner=dcp.DefaultLoadPlanner(**options))

    try:
        load()
    except (Exception, CheckpointException):  # the latter is no Exception
        assert stock.startswith("fails")
    else:
        assert not stock.startswith("fails")
    if "allow_partial_load" in stock:
        load(allow_partial_load=True)


def test_weights_alone_are_no_checkpoint(tmp_path):
    dcp.save({"model": {"a.weight": torch.zeros(3)}}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(TailorError, match="no optimizer states"):
        verify_checkpoint(tmp_path / "x")


@pytest.fixture(scope="module")
def universal(runs, tmp_path_factory):
    root = tmp_path_factory.mktemp("universal") / f"checkpoint-{STEP}"
    convert(runs["llama"].checkpoint(STEP), root, to="universal")
    (root / "llmtailor.json").unlink()  # its checksums would show every damage
    return root


@each("universal: ", "llama")
def test_universal(title, change, told, run, universal, tmp_path):
    check(title, change, told, universal, universal, tmp_path)


def test_the_page_lists_all_damages_and_no_others():
    made: Table = {prefix + title: row for prefix, table in TABLES.items() for title, row in table.items()}
    assert PAGE.keys() == made.keys()
