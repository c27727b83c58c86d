"""``--checksum`` compares what it reads with what the sources state: a bit that a disk has flipped is not copied on."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmtailor
from helpers.checkpoints import make
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.errors import SourceError
from llmtailor.model.parts import Part
from llmtailor.model.roles import EXP_AVG, MASTER, State
from llmtailor.recipe import Recipe
from salvage.damage import flip
from thin.scene import save_partial

PARAM = State("model.layers.1.mlp.up_proj.weight", EXP_AVG)
PARTS = tuple(map(Part, ("embed_tokens", "layer 0", "layer 1", "layer 2", "layer 3", "norm", "lm_head")))


def merge(source: Path, out: Path, **options: object) -> None:
    llmtailor.merge(Recipe("x", "", source, (), None, None), out, llmtailor.Options(**options))  # type: ignore[arg-type]


def stock(root: Path) -> Path:
    return make(root, 100)


def without_deepspeed(root: Path) -> Path:
    """A composite; weights and masters are one file that only its llmtailor.json has a checksum of."""
    merge(stock(root), root / "checkpoint-plain", stage=0)
    return root / "checkpoint-plain"


def partial(root: Path) -> Path:
    save_partial(root / "run", stock(root), PARTS, Ledger("saver"))
    return root / "run" / "partial" / "step-00000100"


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        (stock, PARAM, r"optim_states\.pt: .*data/\d+ does not match its checksum"),
        (without_deepspeed, PARAM, r"optimizer\.pt: .*data/\d+ does not match its checksum"),
        (without_deepspeed, State(PARAM.param, MASTER), r"model\.safetensors: the file does not match its checksum"),
        (partial, PARAM, r"rank-0000\d-of-00002\.safetensors: the file does not match its checksum"),
    ],
)
def test_a_flipped_bit_is_refused(tmp_path, kind, state, told):
    source = kind(tmp_path)
    merge(source, tmp_path / "sound", checksum=True)
    flip(source, state, 5)
    with pytest.raises(SourceError, match=told) as caught:
        merge(source, tmp_path / "out", checksum=True)
    assert "verify --deep" in caught.value.problems[0].fix
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.llmtailor-staging").exists()


def test_a_composites_small_files_may_be_changed_on_purpose(tmp_path):
    source = without_deepspeed(tmp_path)
    path = source / "trainer_state.json"
    path.write_text(path.read_text().replace('"epoch"', '"epoch" '))
    merge(source, tmp_path / "out", checksum=True)
    assert (tmp_path / "out" / "trainer_state.json").read_text() == path.read_text()
