"""A run under DeepSpeed with full and partial checkpoints: partial ones give what the damaged full one has lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make
from helpers.composing import convert
from helpers.files import cut
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.salvage.plan import rows
from oracle.any import load
from oracle.zero3 import differ
from salvage.damage import salvage
from synthetic import pickled_as_deepspeed
from thin.scene import save_partial

ODD = ("layer 1", "layer 3", "lm_head")
EVEN = ("embed_tokens", "layer 0", "layer 2", "norm")


@pytest.fixture(params=[3, 2], ids=["zero3", "zero2"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Partial checkpoints of steps 100 (all parts) and 200 (odd layers), and a full one of step 300."""
    run, full = tmp_path / "run", {}
    run.mkdir()
    for step in (100, 200, 300):
        made = make(tmp_path / "made", step)
        full[step] = tmp_path / "all" / made.name
        convert(made, full[step], stage=request.param)
    ledger = save_partial(run, full[100], (*EVEN, *ODD), Ledger("saver"))
    save_partial(run, full[200], ODD, ledger)
    shutil.copytree(full[300], run / "checkpoint-300")
    return run


def states(checkpoint: Path) -> dict[Any, Any]:
    with pickled_as_deepspeed():
        return load(checkpoint).states


def test_every_part_from_the_newest_that_holds_it(run: Path, tmp_path: Path) -> None:
    for path in (run / "checkpoint-300").glob("*/*optim_states.pt"):
        cut(path)
    found, out = salvage(run)
    assert found.composition is not None
    assert {row.part: row.step for row in rows(found)} == dict.fromkeys(ODD, 200) | dict.fromkeys(EVEN, 100)
    part_of = found.composition.structure.part_of
    own = {part: states(tmp_path / "all" / f"checkpoint-{200 if part in ODD else 100}") for part in (*ODD, *EVEN)}
    made = states(out)
    assert made.keys() == own["norm"].keys()
    assert not [state for state in made if differ(made[state], own[part_of[state.param]][state])]
