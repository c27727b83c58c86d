"""Turns a full checkpoint into a partial one: lay out, write, read back, publish. The full one is not touched.

The checks compare what was written, or an existing partial checkpoint, with the full one it was made from.
"""

from __future__ import annotations

import filecmp
import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from llmtailor import __version__
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Copy, Plan, Sources
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.checkpoint.placement import Extent, Fragment
from llmtailor.compose.plan import plan_composite
from llmtailor.engine.copy import Context, execute
from llmtailor.engine.pool import Stop, num_workers, run_all
from llmtailor.engine.staging import check_space
from llmtailor.errors import PathIn, Problem, SourceError, VerificationError
from llmtailor.formats.partial.manifest import MANIFEST, BundleFact, manifest_json
from llmtailor.formats.partial.write import PartialLayout, describe_partial, lay_out_partial, trained_states
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.model.parts import ModelStructure
from llmtailor.model.states import WEIGHT, State
from llmtailor.runs.folder import Kind, link_or_copy, staged
from llmtailor.storage.local import FileFact, Files, added_since, fsync_folder, write_durably
from llmtailor.timing import Stopwatch
from llmtailor.verify.read import crc_of_range

OnProgress = Callable[[int], None]
_BUG = "the disk loses data, or this is a bug in llmtailor: please report it; nothing was removed"
_ALIKE = (
    *("stage", "world_size", "global_step", "skipped_steps", "precision", "optimizer", "params", "tied", "groups"),
    *("sub_groups", "settings", "variant", "part_steps"),
)
"""The index fields that a partial checkpoint shares with the full one it was made from"""


def check_crcs(root: Path, wanted: Mapping[str, int], stop: Stop, on_progress: OnProgress) -> None:
    """Compare the CRC-32 of files on the disk with those wanted.

    Raises VerificationError with every file that differs, OSError, or Interrupted.
    """
    with Files(root) as reader:
        jobs = [partial(_crc_of_file, reader, path, _watched(stop, on_progress)) for path in wanted]
        found = dict(zip(wanted, run_all(jobs, num_workers(), stop), strict=True))
    if wrong := [path for path, crc in wanted.items() if found[path] != crc]:
        raise VerificationError(
            Problem(str(root / path), "it does not read back as it was written", _BUG) for path in wrong
        )


def check_places(plan: Plan, made: CheckpointIndex, source: CheckpointIndex, params: Iterable[str]) -> None:
    """Compare the index of what was written with the plan and with the checkpoint it was made from.

    Together with the checksums of all files, this shows that every state is there, bit for bit. Raises
    VerificationError.
    """
    wrong = [f"its {what} differs from that of {source.name}" for what in _ALIKE if not _alike(what, made, source)]
    kept = set(params)
    trained = {param for group in source.group_params for param in group}
    for state, held in source.held.items():
        if state.kind == WEIGHT:
            continue
        there = made.held.get(state)
        if there is None or (there.dtype, there.shape) != (held.dtype, held.shape):
            wrong.append(f"it does not describe {state.kind} of {state.param}")
        elif there.is_here != (state.param in kept or state.param not in trained):
            wrong.append(f"{state.kind} of {state.param} should {'not ' if there.is_here else ''}be there")
    for file in plan.files:
        for start, piece in file.placed():
            if isinstance(piece, Copy) and piece.state is not None and made.held[piece.state].is_here:
                end = piece.begin + _numel(made, piece.state, piece.num_bytes)
                planned = Fragment(piece.begin, end, Extent(file.path, start, start + piece.num_bytes))
                if list(made.held[piece.state].place.cover(piece.begin, end)) != [planned]:
                    wrong.append(f"{piece.state.kind} of {piece.state.param} is not where it was written")
    if wrong:
        raise VerificationError(Problem(made.name, what, _BUG) for what in wrong)


def compared(one: CheckpointIndex) -> list[State]:
    """Return the states that `check_same` compares."""
    return [state for state, held in one.held.items() if held.is_here and state.kind != WEIGHT]


def check_same(one: CheckpointIndex, other: CheckpointIndex, stop: Stop, on_progress: OnProgress) -> None:
    """Compare every state of a partial checkpoint with the full one of its step, by CRC-32.

    Raises VerificationError for those that differ, OSError, or Interrupted.
    """
    states = compared(one)
    pairs = [state for state in states if state in other.held]
    crcs = []
    for index in (one, other):
        with Files(index.root) as reader:
            jobs = [partial(_crc_of_state, reader, index, state, _watched(stop, on_progress)) for state in pairs]
            crcs.append(run_all(jobs, num_workers(), stop))
    lacking = [state for state in states if state not in other.held]
    wrong = lacking + [state for state, mine, theirs in zip(pairs, *crcs, strict=True) if mine != theirs]
    if wrong:
        names = ", ".join(f"{state.kind} of {state.param}" for state in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        fix = "they belong to different attempts: remove the unwanted one by hand"
        raise VerificationError.at(one.name, f"its values differ from those of {other.name}: {names}{more}", fix)


def check_unchanged(index: CheckpointIndex) -> None:
    """Raise SourceError with every file that has changed or appeared since the checkpoint was indexed."""
    folders = {f"{folder}/": None for path in index.files for folder in Path(path).parents if folder.name}
    changed = [
        Problem(f"{index.name}/{path}", "it appeared in the meantime, so nothing here is removed", "run this again")
        for path in added_since(index.root, {**index.files, **folders})
        if path not in index.files
    ]
    for path, fact in index.files.items():
        try:
            same = FileFact.of((index.root / path).stat()).is_like(fact)
        except OSError:
            same = False
        if not same:
            changed.append(Problem(PathIn(index.name, path), "the file changed while it was read", "run this again"))
    if changed:
        raise SourceError(changed)


def _alike(what: str, made: CheckpointIndex, source: CheckpointIndex) -> bool:
    mine, theirs = getattr(made, what), getattr(source, what)
    return bool(dict(mine) == dict(theirs) if isinstance(mine, Mapping) else mine == theirs)


def _numel(index: CheckpointIndex, state: State, num_bytes: int) -> int:
    held = index.held[state]
    return num_bytes * held.numel // held.num_bytes


def _watched(stop: Stop, on_progress: OnProgress) -> OnProgress:
    def watch(num_bytes: int) -> None:
        stop.check()
        on_progress(num_bytes)

    return watch


def _crc_of_file(reader: Files, path: str, on_progress: OnProgress) -> int:
    reader.forget(path)
    return crc_of_range(reader, path, 0, (reader.root / path).stat().st_size, on_progress)


def _crc_of_state(reader: Files, index: CheckpointIndex, state: State, on_progress: OnProgress) -> int:
    held, crc = index.held[state], 0
    for fragment in held.place.cover(0, held.numel):
        extent = fragment.extent
        crc = crc_of_range(reader, extent.path, extent.start, extent.stop, on_progress, crc)
    return crc


logger = logging.getLogger(__name__)
SPARE_BYTES = 16 << 20
"""Space for folders and file system overhead beyond the bytes of the plan"""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a partial checkpoint."""

    parts: Mapping[str, str]
    """Part -> reason"""
    ledger: Ledger
    """The ledger after this save"""
    policy: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The layout of a partial checkpoint before it is written."""

    source: CheckpointIndex
    target: Path
    structure: ModelStructure
    contents: Contents
    save_id: str
    layout: PartialLayout
    plan: Plan
    links: Mapping[str, Path]
    """Files of frozen params that an older partial checkpoint has in the same size, so likely with the same content"""

    @property
    def params_of(self) -> dict[str, list[str]]:
        """The trained params by part"""
        return _params_of(self.source, self.structure, self.contents)

    @property
    def num_bytes_to_move(self) -> int:
        """The bytes written and then read back"""
        return 2 * self.plan.num_bytes

    @property
    def num_bytes(self) -> int:
        """The size on disk"""
        files = sum(file.num_bytes for file in self.plan.files if file.path not in self.links)
        return files + len(_manifest(self, {}))


def plan_conversion(
    source: CheckpointIndex,
    structure: ModelStructure,
    target: Path,
    contents: Contents,
    older: Mapping[str, tuple[Path, int]],
) -> Conversion:
    """Lay out a full checkpoint as a partial one; no tensor is read.

    ``older`` gives the files of frozen params in partial checkpoints: name -> folder and size of the newest.
    Raises SourceError or UnsupportedCheckpoint.
    """
    save_id = uuid.uuid4().hex
    params = {name for names in _params_of(source, structure, contents).values() for name in names}
    layout = lay_out_partial(source, params, save_id)
    names = {*source.params, *source.tied, *(state.param for state in source.held)}
    plan = plan_composite(layout.files, [source], Sources(dict.fromkeys(names, 0)), 0)
    links = {
        file.path: older[file.path][0]
        for file in layout.frozen
        if file.path in older and older[file.path][1] == file.num_bytes
    }
    return Conversion(source, target, structure, contents, save_id, layout, plan, links)


def write_conversion(
    conversion: Conversion, stop: Stop, on_progress: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Write a partial checkpoint, read it back, and publish it with one rename, complete and durable.

    ``on_progress`` gets the bytes written and read back, `Conversion.num_bytes_to_move` in all, from several threads.

    Raises StorageError if there is not enough space, SourceError (also if the full checkpoint changes in the meantime),
    VerificationError if it does not read back as planned, Interrupted, or OSError. In all these cases it is absent.
    """
    target, source, watch = conversion.target, conversion.source, Stopwatch()
    check_space(target, sum(file.num_bytes for file in conversion.plan.files) + SPARE_BYTES)
    staging = staged(target, Kind.THINNING)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        results = execute(conversion.plan, staging, Context(facts=[source.files], on_progress=on_progress, stop=stop))
        crcs = {result.path: result.crc for result in results}
        logger.info("wrote %s, %s bytes, in %s", display_name(target), f"{conversion.plan.num_bytes:,}", watch.lap())
        for name, folder in conversion.links.items():
            if filecmp.cmp(folder / name, staging / name, shallow=False):
                (staging / name).unlink()
                link_or_copy(folder / name, staging / name)
        write_durably(staging / MANIFEST, _manifest(conversion, crcs))
        fsync_folder(staging)
        check_crcs(staging, crcs, stop, on_progress)
        params = {name for names in conversion.params_of.values() for name in names}
        check_places(conversion.plan, index_checkpoint(staging, display_name(target)), source, params)
        check_unchanged(source)
        logger.info("read it back in %s", watch.lap())
        stop.check()
        staging.rename(target)
        fsync_folder(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def part_bytes(index: CheckpointIndex, structure: ModelStructure) -> dict[str, int]:
    """Return the bytes of each part's trained states; parts without trained params are left out."""
    found: dict[str, int] = {}
    for param, states in trained_states(index).items():
        part = structure.part_of[param]
        found[part] = found.get(part, 0) + sum(index.held[state].num_bytes for state in states)
    return {part: found[part] for part in structure.parts if part in found}


def _params_of(source: CheckpointIndex, structure: ModelStructure, contents: Contents) -> dict[str, list[str]]:
    trained = {name for group in source.group_params for name in group}
    return {part: [name for name in structure.names(part) if name in trained] for part in contents.parts}


def _manifest(conversion: Conversion, crcs: Mapping[str, int]) -> bytes:
    """Return the manifest; its size does not depend on the checksums."""
    source, contents = conversion.source, conversion.contents
    facts = tuple(
        BundleFact(file.path, file.num_bytes, crcs.get(file.path, 0))
        for file in (*conversion.layout.bundles, *conversion.layout.frozen)
    )
    return manifest_json(
        describe_partial(
            source, conversion.save_id, contents.parts, conversion.params_of, facts, contents.ledger.to_json()
        ),
        policy=contents.policy,
        num_bytes=part_bytes(source, conversion.structure),
        tool_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
