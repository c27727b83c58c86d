"""What a run has measured of its own saves: speeds, stalls, the time of a step, and how parts change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from llmtailor.containers.json import read_json
from llmtailor.errors import SourceError, TailorError
from llmtailor.formats.partial.manifest import MANIFEST
from llmtailor.formats.registry import display_name
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.save_log import LOG, LoggedSave, read_log
from llmtailor.simulation.model import FIX

_NEWEST = 32
"""Partial checkpoints whose times of creation are read"""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's own figures; None for what its log does not show."""

    write_speed: float | None
    """Bytes per second of all ranks together, from the start of a save until it was published"""
    stall_per_byte: float | None
    """Seconds for which background saves stopped training, per byte"""
    step_s: float | None
    """Seconds between two steps, with what saves added"""
    drift: dict[str, float] | None
    """Part -> mean relative change from one save to the next"""
    expected_loss: dict[str, float] | None
    """Part -> mean of what its change from one save to the next means for the loss"""


def measure(run: Path) -> Measured:
    """Return what the log and the partial checkpoints of a run say. Raises SourceError if the log has no save."""
    folder = RunFolder(run)
    saves = read_log(folder.partial / LOG).saves
    if not saves:
        where = f"{display_name(run)}/{folder.partial.name}/{LOG}"
        raise SourceError.at(where, "no save is logged", FIX)
    publish_s = sum(save.publish_s for save in saves)
    behind = [save for save in saves if save.copy_s > 0]
    return Measured(
        sum(save.num_bytes for save in saves) / publish_s if publish_s else None,
        sum(save.stall_s for save in behind) / (sum(save.num_bytes for save in behind) or 1) if behind else None,
        _step_s(folder),
        _per_save(saves, [save.drift for save in saves]),
        _per_save(saves, [save.expected_loss for save in saves]),
    )


def _step_s(folder: RunFolder) -> float | None:
    """Return the median time of a step between the saves that are there; manifests state when they were written."""
    times = []
    for step, path in [*folder.complete().items()][-_NEWEST:]:
        with suppress(TailorError, ValueError, TypeError):
            created = datetime.fromisoformat(read_json(path / MANIFEST, display_name(path))["created"])
            times.append((step, created.timestamp()))
    speeds = [(after - before) / (late - early) for (early, before), (late, after) in pairwise(times)]
    found = median(speeds) if speeds else 0.0
    return found if found > 0 else None


def _per_save(saves: tuple[LoggedSave, ...], measured: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return the mean change of each part per save. What a save reports is since the part's own last save."""
    rates: dict[str, list[float]] = {}
    last: dict[str, int] = {}
    for number, save in enumerate(saves):
        for part, change in measured[number].items():
            if math.isfinite(change) and part in last:
                rates.setdefault(part, []).append(change / (number - last[part]))
        last |= dict.fromkeys(save.parts, number)
    return {part: fmean(found) for part, found in rates.items()} or None
