"""Reads what `fates` decides by: no tensor, only headers and small files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from llmtailor.core.anatomy import Anatomy
from llmtailor.core.index import CheckpointIndex
from llmtailor.core.run import THINNED, RunCheckpoint
from llmtailor.core.states import WEIGHT
from llmtailor.core.words import some
from llmtailor.errors import PathIn, UnsupportedCheckpoint
from llmtailor.formats.json_files import read_json
from llmtailor.formats.known_files import survey_contents
from llmtailor.formats.partial.container import is_partial
from llmtailor.formats.partial.layout import check_can_be_partial, trained_states
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.trainer import ADAPTER, MANIFEST, TRAINER_STATE
from llmtailor.history.ledger import Ledger
from llmtailor.history.thinned import Thinned, read_losses
from llmtailor.retain.fates import FullFacts


def read_facts(
    index: CheckpointIndex, anatomy: Anatomy, target: Path, usable: Collection[Path], *, weights_only: bool
) -> FullFacts:
    """Read the facts of a full checkpoint; ``target`` is where it would be as a partial one."""
    obstacle = _obstacle(index)
    if not obstacle:
        obstacle = _no_weights(index) if weights_only else _not_partial(index, target, usable)
    return FullFacts(obstacle, _losses(index.root), part_bytes(index, anatomy))


def read_thinned(partial: Iterable[RunCheckpoint]) -> list[Thinned]:
    """Return those partial checkpoints that were made of full ones."""
    ledgers = {one: Ledger.from_json(read_manifest(one.path, one.name).ledger, one.name) for one in partial}
    return [
        Thinned(one.step, ledger, _losses(one.path))
        for one, ledger in ledgers.items()
        if ledger.lineage.startswith(THINNED)
    ]


def part_bytes(index: CheckpointIndex, anatomy: Anatomy) -> dict[str, int]:
    """Return the bytes of each part's trained states; parts of which nothing is trained are left out."""
    found: dict[str, int] = {}
    for param, states in trained_states(index).items():
        part = anatomy.part_of[param]
        found[part] = found.get(part, 0) + sum(index.held[state].num_bytes for state in states)
    return {part: found[part] for part in anatomy.parts if part in found}


def _losses(root: Path) -> dict[int, float]:
    path = root / TRAINER_STATE
    return read_losses(read_json(path, PathIn(root.name, TRAINER_STATE))) if path.is_file() else {}


def _obstacle(index: CheckpointIndex) -> str:
    if index.root.is_symlink():
        return "it is a link to another place"
    contents = survey_contents(index.root)
    lost = [path for path in contents.known if not path.endswith("/") and path not in index.files]
    if contents.unknown:
        return f"it holds files of unknown making: {some(contents.unknown)}"
    return f"it holds files that would be lost: {some(lost)}" if lost else ""


def _no_weights(index: CheckpointIndex) -> str:
    has_weights = any(state.kind == WEIGHT for state in index.held) or ADAPTER in index.files
    return "" if has_weights else "it has no weights in safetensors form, so nothing would be left of it"


def _not_partial(index: CheckpointIndex, target: Path, usable: Collection[Path]) -> str:
    if TRAINER_STATE not in index.files:
        return f"{TRAINER_STATE} is missing, so nothing can resume from it"
    if target.exists() and target not in usable:
        what = "is of another model or damaged" if is_partial(target) else "did not finish; llmtailor gc removes it"
        return f"{target.parent.name}/{target.name} is in the way, which {what}"
    if MANIFEST in index.files and _is_split(index):
        return "parts of this composite are split over sources, so its weights need not be its rounded masters"
    try:
        check_can_be_partial(index)
    except UnsupportedCheckpoint as error:
        return error.problems[0].what
    return ""


def _is_split(index: CheckpointIndex) -> bool:
    rows = read_json(index.root / MANIFEST, PathIn(index.name, MANIFEST)).get("parts") or []
    return any(isinstance(row, dict) and row.get("is_whole") is False for row in rows)
