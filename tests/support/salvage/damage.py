"""Ways to damage a run, and what must come out of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from helpers.files import flip
from llmtailor.compose.write import write
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import State
from llmtailor.salvage.plan import Salvage, plan_salvage
from llmtailor.verify.verify import verify_checkpoint
from oracle.any import load
from oracle.zero3 import Snapshot


def salvage(run: Path, **options: Any) -> tuple[Salvage, Path]:
    """Salvage a run; whatever comes out must verify, every byte of it."""
    found = plan_salvage(run, **options)
    assert found.composition is not None
    write(found.composition)
    verdict = verify_checkpoint(found.composition.out, deep=True)
    assert verdict.is_resumable and not verdict.damage.states, verdict.findings
    return found, found.composition.out


def shard(checkpoint: Path, kind: str, rank: int) -> Path:
    (path,) = checkpoint.glob(f"global_step*/*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    return path


def flip_state(checkpoint: Path, state: State, element: int) -> None:
    """Flip the lowest bit of an element: no checksum is mended."""
    (fragment,) = index_checkpoint(checkpoint).held[state].place.cover(element, element + 1)
    flip(checkpoint / fragment.extent.path, fragment.extent.start)


def without_rank(checkpoint: Path, rank: int, scratch: Path) -> Mapping[str, torch.Tensor]:
    """Return, for every trained param, which elements only that rank's optimizer shard holds: those whose sign the
    oracle sees change with the shard's. (Padding is zero, and has to stay so.)"""
    shutil.copytree(checkpoint, scratch)
    path = shard(scratch, "optim", rank)
    tree = torch.load(path, weights_only=False)
    outer = tree["optimizer_state_dict"]
    for tensor in outer.get("fp32_flat_groups") or outer["single_partition_of_fp32_groups"]:
        tensor.detach().neg_()
    torch.save(tree, path)
    before, after = (load(path).kind("master") for path in (checkpoint, scratch))
    return {name: after[name].signbit() != before[name].signbit() for name in before}


def chosen(newer: Snapshot, older: Snapshot, is_old: Callable[[str], bool]) -> dict[State, torch.Tensor]:
    """Return the states of a composite some of whose params are from ``older``."""
    tied = newer.rest["tied"]
    return {
        state: (older if is_old(tied.get(state.param, state.param)) else newer).states[state] for state in newer.states
    }
