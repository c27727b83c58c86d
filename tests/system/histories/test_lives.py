"""Nothing that a checkpoint in DCP folders needs is ever lost, or overwritten unseen, whatever happens around it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from helpers.cases import examples
from lives.campaign import (
    EVERYTHING,
    Actions,
    compose,
    compose_run,
    convert,
    copy,
    overwrite,
    play,
    rotate,
    save_linked,
    save_stock,
    thin_reference,
)
from lives.world import Training, World, holding_of, load
from llmtailor.saving import DcpSaver
from llmtailor.verify.verify import NOT_RESUMABLE, verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

OVERWRITTEN = "another save has overwritten it: it is a hard link, and its other names were saved to"
THINNING: Actions = {save_stock: 5, compose: 1, compose_run: 1, thin_reference: 3, rotate: 1, copy: 1}
OVERWRITING: Actions = {save_stock: 2, save_linked: 3, compose: 3, convert: 1, copy: 1, overwrite: 3}


def test_a_stock_save_over_linked_files_is_seen(tmp_path: Path) -> None:
    """By `verify` of the folder that links to them, and of its copies, and by the next save, which builds on it."""
    training, saver = Training(), DcpSaver("round_robin:3")

    def save(step: int) -> Path:
        training.be(step, step)
        path = tmp_path / f"step-{step}"
        state = training.state()
        dcp.save(state, storage_writer=saver.writer(FileSystemWriter(path), step, state), no_dist=True)
        return path

    first, second = save(1), save(2)
    assert verify_checkpoint(second).level != NOT_RESUMABLE
    training.be(9, 9)
    dcp.save(training.state(), checkpoint_id=first, no_dist=True)
    assert 9 in holding_of(load(second)).values(), "torch reads that without a word"
    copied = shutil.copytree(second, tmp_path / "copy")
    for folder in (second, copied):
        assert [one.what for one in verify_checkpoint(folder).of_severity("error")] == [OVERWRITTEN]
    assert verify_checkpoint(first).level != NOT_RESUMABLE
    assert {*holding_of(load(save(3))).values()} == {3}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("actions", "first", "lives", "needed"),  # the first lives have what is needed
    [
        (EVERYTHING, 4, examples(1, 200), ("compose", "save_linked", "gc", "rotate", "kill")),
        (OVERWRITING, 0, examples(1, 50), ("compose", "overwrite", "damaged")),
        (THINNING, 0, examples(1, 100), ("linked", "kill", "rotate")),
    ],
    ids=["everything", "overwriting", "thinning"],
)
def test_random_lives(
    tmp_path: Path,
    actions: Actions,
    first: int,
    lives: int,
    needed: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + lives):
        world = World(tmp_path / f"{seed}", seed)
        play(world, 25, actions)
        total.update(world.counts)
    assert all(total[one] for one in needed), total
    with capsys.disabled():
        print(f"\n{lives} lives: {dict(total.most_common())}")
