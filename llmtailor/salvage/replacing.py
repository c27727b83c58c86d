"""Puts a salvaged composite where the Trainer's auto-resume looks, and what it must not find aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtailor.errors import TargetError
from llmtailor.execute.placing import put_in_place
from llmtailor.formats.run_folder import list_checkpoints
from llmtailor.salvage.service import Salvage


@dataclass(frozen=True, slots=True)
class Replacement:
    """Renames to be made, all in the run's folder. Nothing is deleted."""

    target: Path
    """``checkpoint-STEP``, to be resumed from."""
    aside: Mapping[Path, Path]
    """Folder -> its new name. It does not begin with ``checkpoint-``: the Trainer's rotation deletes what does."""


def plan_replacement(salvage: Salvage) -> Replacement:
    """Say which folders change places. Raises TargetError if a name is taken."""
    run, base = salvage.scan.run, salvage.base
    target = run / f"checkpoint-{base.step}"
    aside = {}
    for step, path in list_checkpoints(run).items():
        if step > base.step or (step == base.step and salvage.composition is not None):
            whole = any(holder.is_whole and holder.checkpoint.path == path for holder in salvage.scan.holders)
            aside[path] = path.with_name(f"{'replaced' if whole else 'damaged'}-{path.name}")
    for name in aside.values():
        if name.exists():
            fix = "move it away, or leave --replace out and name the output when you resume"
            raise TargetError.at(name, "the name is taken by what was put aside before", fix)
    return Replacement(target, aside)


def put_salvaged_in_place(salvage: Salvage, replacement: Replacement) -> None:
    """Make the renames; a crash between two of them leaves every folder whole, under one name or the other."""
    new = replacement.target if salvage.composition is None else salvage.composition.out
    put_in_place(new, replacement.target, replacement.aside)
