"""What a full checkpoint becomes when it is thinned out: a partial one, or weights only. Nothing is written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

from llmtailor._version import __version__
from llmtailor.checkpoint.index import ACCELERATE, CheckpointIndex
from llmtailor.checkpoint.layout import FileLayout, Plan
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.fill import plan_composite
from llmtailor.copying.copy import FileResult
from llmtailor.formats.partial.manifest import BundleFact, manifest_json, ranges_of
from llmtailor.formats.partial.write import PartialLayout, describe_partial, lay_out_partial, trained_states
from llmtailor.formats.registry import own_writer
from llmtailor.frameworks.files import (
    LATEST,
    LATEST_UNIVERSAL,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    is_of_states,
    is_rng_file,
    owner_of,
)
from llmtailor.frameworks.read import adapters_of
from llmtailor.model.parts import ModelStructure, Part
from llmtailor.model.precision import EXACT, Precision
from llmtailor.model.roles import WEIGHT, State

_SCRIPT = re.compile(r"zero_to_\w+\.py")
_OF_A_RESUME = (LATEST, LATEST_UNIVERSAL, OPTIMIZER, SCHEDULER, SCALER)


def compared(save: CheckpointIndex) -> list[State]:
    """Return the states that are compared before a partial checkpoint that exists replaces a full one."""
    return [state for state, entry in save.held.items() if entry.is_here and state.kind != WEIGHT]


@dataclass(frozen=True)
class Conversion:
    """A full checkpoint laid out as a partial one; no tensor is read. Raises SourceError or UnsupportedCheckpoint."""

    source: CheckpointIndex
    structure: ModelStructure
    target: Path
    parts: Mapping[Part, str]
    """The parts it holds -> reason"""
    ledger: Ledger
    """The ledger after this save"""
    policy: Mapping[str, Any]
    older: Mapping[str, tuple[Path, int]]
    """The files of frozen params in partial checkpoints: name -> folder and size of the newest"""
    masters: tuple[Part, ...] = ()
    """Further parts, of which only the masters are kept"""
    precision: Precision = EXACT
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @cached_property
    def params_of(self) -> dict[Part, list[str]]:
        """The trained params by part, also of those in ``masters``"""
        trained = {name for group in self.source.group_params for name in group}
        parts = (*self.parts, *self.masters)
        return {part: [name for name in self.structure.names(part) if name in trained] for part in parts}

    @cached_property
    def layout(self) -> PartialLayout:
        return lay_out_partial(self.source, *self.kept_params(), self.save_id, self.precision)

    @cached_property
    def plan(self) -> Plan:
        return _copied_from(self.source, self.layout.files)

    @property
    def links(self) -> dict[str, Path]:
        """Files of frozen params that an older partial checkpoint has in the same size, so likely the same content"""
        there = ((file, self.older[file.path]) for file in self.layout.frozen if file.path in self.older)
        return {file.path: folder for file, (folder, num_bytes) in there if num_bytes == file.num_bytes}

    def kept_params(self) -> tuple[set[str], set[str]]:
        """Return the params kept with all states, and those kept as master weights only."""
        whole = {name for part in self.parts for name in self.params_of[part]}
        return whole, {name for part in self.masters for name in self.params_of[part]}

    @property
    def num_bytes(self) -> int:
        files = sum(file.num_bytes for file in self.plan.files if file.path not in self.links)
        return files + len(self.manifest(()))

    def manifest(self, results: Iterable[FileResult]) -> bytes:
        """Return the manifest with the checksums of the files; its size does not depend on them."""
        of = {result.path: result for result in results}
        own = {file.path for file in (*self.layout.bundles, *self.layout.frozen)}
        facts, carried = [], {}
        for file in self.plan.files:
            crc = of[file.path].crc if of else 0
            if file.path in own:
                checked = of[file.path].checked if of else zip(file.each(), repeat(0))
                facts.append(BundleFact(file.path, file.num_bytes, crc, ranges_of(checked)))
            else:
                carried[file.path] = file.num_bytes, crc
        description = describe_partial(
            self.source,
            save_id=self.save_id,
            parts=self.parts,
            params_of=self.params_of,
            bundles=tuple(facts),
            ledger=self.ledger.to_json(),
            masters=self.masters,
        )
        return manifest_json(
            replace(description, carried=carried),
            policy=self.policy,
            num_bytes=part_bytes(self.source, self.structure),
            tool_version=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def _copied_from(index: CheckpointIndex, files: Iterable[FileLayout]) -> Plan:
    """Return the plan of files that one checkpoint fills."""
    names = dict.fromkeys([*index.params, *index.tied, *(state.param for state in index.held)], 0)
    return plan_composite(files, [index], Sources(names), 0)


def part_bytes(index: CheckpointIndex, structure: ModelStructure) -> dict[str, int]:
    """Return the bytes of each part's trained states; parts without trained params are left out."""
    num_bytes: dict[str, int] = {}
    for param, states in trained_states(index).items():
        part = structure.part_of[param]
        num_bytes[part] = num_bytes.get(part, 0) + sum(index.held[state].num_bytes for state in states)
    return {part: num_bytes[part] for part in structure.parts if part in num_bytes}


def kept_files(index: CheckpointIndex) -> list[str]:
    """Return the files that stay as they are: all but the states that only a resume needs."""
    return [path for path in index.files if _is_kept(path, index)]


def _is_kept(path: str, index: CheckpointIndex) -> bool:
    writer = own_writer(index)
    if "/" in path:
        folders = [writer.weights_folder] if writer.weights_folder else [*filter(None, adapters_of(index).values())]
        return path.startswith(tuple(folders))
    if writer.lay_out_weights is not None and is_of_states(path):
        return False  # its weights are written to other files
    is_of_accelerate = owner_of(path) == ACCELERATE
    return path not in _OF_A_RESUME and not (is_rng_file(path) or is_of_accelerate or _SCRIPT.fullmatch(path))


def plan_weights(index: CheckpointIndex) -> Plan:
    """Return the plan of the files to be written: none, unless weights and states are in the same files."""
    lay_out = own_writer(index).lay_out_weights
    return Plan((), ()) if lay_out is None else _copied_from(index, lay_out(index))
