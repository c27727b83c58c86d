"""Turns a full checkpoint into a partial one: lay out, write, read back, publish. The full one is not touched.

The checks compare what was written, or an existing partial checkpoint, with the full one it was made from.
"""

from __future__ import annotations

import filecmp
import logging
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from llmtailor import __version__
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Copy, Plan
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.checkpoint.placement import Extent, Fragment
from llmtailor.checkpoint.sources import Sources
from llmtailor.compose.fill import plan_composite
from llmtailor.engine.copy import Context, Moved, execute
from llmtailor.engine.moving import Clone
from llmtailor.engine.pool import Stop, num_workers, run_all
from llmtailor.engine.space import check_space, space_for
from llmtailor.errors import PathIn, Problem, SourceError, VerificationError, some
from llmtailor.formats.partial.manifest import MANIFEST, BundleFact, manifest_json
from llmtailor.formats.partial.write import PartialLayout, describe_partial, lay_out_partial, trained_states
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.model.parts import ModelStructure
from llmtailor.model.states import ITEMSIZE, WEIGHT, State, is_moment
from llmtailor.runs.folder import Kind, link_or_copy, staged
from llmtailor.storage.checksums import crc_of_zeros
from llmtailor.storage.listing import FileFact, added_since
from llmtailor.storage.local import Files, fsync_folder, write_durably
from llmtailor.timing import Stopwatch
from llmtailor.verify.values import crc_of_range

OnProgress = Callable[[int], None]
BUG = "the disk loses data, or this is a bug in llmtailor: please report it; nothing was removed"
_ALIKE = (
    *("stage", "world_size", "global_step", "skipped_steps", "precision", "optimizer", "params", "tied", "groups"),
    *("sub_groups", "settings", "variant", "part_steps", "master_steps"),
)
"""The index fields that a partial checkpoint shares with the full one it was made from"""


def write_files(plan: Plan, staging: Path, context: Context) -> tuple[dict[str, int], Moved]:
    """Write the files of a plan into a new folder, each fsynced; return their CRC-32 by path, and how their bytes got
    there. Raises what `execute` raises."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    results = execute(plan, staging, context)
    return {result.path: result.crc for result in results}, sum((result.moved for result in results), Moved())


def check_crcs(root: Path, wanted: Mapping[str, int], stop: Stop, on_progress: OnProgress) -> None:
    """Compare the CRC-32 of files on the disk with those wanted.

    Raises VerificationError with every file that differs, OSError, or Interrupted.
    """
    with Files(root) as files:
        for path in wanted:
            files.forget(path)
    whole = [[Extent(path, 0, (root / path).stat().st_size)] for path in wanted]
    found = zip(wanted.items(), _crcs(root, whole, stop, on_progress), strict=True)
    if wrong := [path for (path, crc), have in found if have != crc]:
        raise VerificationError(
            Problem(str(root / path), "it does not read back as it was written", BUG) for path in wrong
        )


def check_places(
    plan: Plan, made: CheckpointIndex, source: CheckpointIndex, params: Collection[str], masters: Collection[str]
) -> None:
    """Compare the index of what was written with the plan and with the checkpoint it was made from.

    It holds every state of ``params``, and the masters of ``masters``.

    Together with the checksums of all files, this shows that every state is there, bit for bit. Raises
    VerificationError.
    """
    differing = [what for what in _ALIKE if _plain(getattr(made, what)) != _plain(getattr(source, what))]
    wrong = [f"its {what} differs from that of {source.name}" for what in differing]
    trained = {param for group in source.group_params for param in group}
    for state, held in source.held.items():
        if state.kind == WEIGHT:
            continue
        there = made.held.get(state)
        if there is None or (there.dtype, there.shape) != (held.dtype, held.shape):
            wrong.append(f"it does not describe {state.kind} of {state.param}")
        elif there.is_here != (
            state.param in params
            or state.param not in trained
            or (state.param in masters and not is_moment(state.kind))
        ):
            wrong.append(f"{state.kind} of {state.param} should {'not ' if there.is_here else ''}be there")
    for file in plan.files:
        for start, piece in file.placed():
            if isinstance(piece, Copy) and piece.state is not None and (held := made.held[piece.state]).is_here:
                end = piece.begin + piece.num_bytes // ITEMSIZE[held.dtype]
                planned = Fragment(piece.begin, end, Extent(file.path, start, start + piece.num_bytes))
                if list(held.place.cover(piece.begin, end)) != [planned]:
                    wrong.append(f"{piece.state.kind} of {piece.state.param} is not where it was written")
    if wrong:
        raise VerificationError(Problem(made.name, what, BUG) for what in wrong)


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
        covers = ([index.held[state].place.cover(*run) for run in one.held[state].runs] for state in pairs)
        extents = ([fragment.extent for cover in of_state for fragment in cover] for of_state in covers)
        crcs.append(_crcs(index.root, extents, stop, on_progress))
    zeroed = {state: crc_of_zeros(one.held[state].num_bytes) for state in pairs if other.held[state].is_all_zero}
    differing = [state for state, here, there in zip(pairs, *crcs, strict=True) if here != zeroed.get(state, there)]
    differing += [state for state in states if state not in other.held]
    if differing:
        names = some(f"{state.kind} of {state.param}" for state in differing)
        fix = "they belong to different attempts: move one of them out of the run's folder"
        raise VerificationError.at(one.name, f"its values differ from those of {other.name}: {names}", fix)


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


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _crcs(root: Path, wanted: Iterable[Sequence[Extent]], stop: Stop, on_progress: OnProgress) -> list[int]:
    """Return the CRC-32 of each sequence of byte ranges."""

    def watch(num_bytes: int) -> None:
        stop.check()
        on_progress(num_bytes)

    def crc_of(extents: Sequence[Extent]) -> int:
        crc = 0
        for extent in extents:
            crc = crc_of_range(files, extent.path, extent.start, extent.stop, watch, crc)
        return crc

    with Files(root) as files:
        return run_all((partial(crc_of, extents) for extents in wanted), num_workers(), stop)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The layout of a partial checkpoint before it is written."""

    source: CheckpointIndex
    target: Path
    structure: ModelStructure
    parts: Mapping[str, str]
    """The parts it holds -> reason"""
    ledger: Ledger
    """The ledger after this save"""
    policy: Mapping[str, Any]
    params_of: Mapping[str, list[str]]
    """The trained params by part, also of those in ``masters``"""
    masters: tuple[str, ...]
    """Further parts, of which only the masters are kept"""
    save_id: str
    layout: PartialLayout
    plan: Plan
    links: Mapping[str, Path]
    """Files of frozen params that an older partial checkpoint has in the same size, so likely with the same content"""

    @property
    def num_bytes(self) -> int:
        """The size on disk"""
        files = sum(file.num_bytes for file in self.plan.files if file.path not in self.links)
        return files + len(_manifest(self, {}))


def plan_conversion(
    source: CheckpointIndex,
    structure: ModelStructure,
    target: Path,
    parts: Mapping[str, str],
    ledger: Ledger,
    policy: Mapping[str, Any],
    older: Mapping[str, tuple[Path, int]],
    save_id: str | None = None,
    masters: tuple[str, ...] = (),
) -> Conversion:
    """Lay out a full checkpoint as a partial one; no tensor is read.

    ``older`` gives the files of frozen params in partial checkpoints: name -> folder and size of the newest.
    ``save_id`` is a random id, None for a new one. Of the parts in ``masters`` only the masters are kept.
    Raises SourceError or UnsupportedCheckpoint.
    """
    save_id = save_id or uuid.uuid4().hex
    trained = {name for group in source.group_params for name in group}
    params_of = {part: [name for name in structure.names(part) if name in trained] for part in (*parts, *masters)}
    layout = lay_out_partial(source, *_kept_params(params_of, masters), save_id)
    names = {*source.params, *source.tied, *(state.param for state in source.held)}
    plan = plan_composite(layout.files, [source], Sources(dict.fromkeys(names, 0)), 0)
    links = {
        file.path: older[file.path][0]
        for file in layout.frozen
        if file.path in older and older[file.path][1] == file.num_bytes
    }
    found = (parts, ledger, policy, params_of, masters, save_id, layout, plan, links)
    return Conversion(source, target, structure, *found)


def _kept_params(params_of: Mapping[str, Iterable[str]], masters: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the params that are kept whole, and those of which only the masters are."""
    whole = {name for part, names in params_of.items() if part not in masters for name in names}
    return whole, {name for part in masters for name in params_of[part]}


def write_conversion(
    conversion: Conversion,
    stop: Stop,
    on_progress: OnProgress = lambda num_bytes: None,
    clone: Clone = "never",
) -> Moved:
    """Write a partial checkpoint, read it back, and publish it with one rename, complete and durable.

    Return how its bytes got there. ``on_progress`` gets the bytes written and read back, twice the bytes of the plan in
    all, from several threads.

    Raises StorageError if there is not enough space, SourceError (also if the full checkpoint changes in the meantime),
    VerificationError if it does not read back as planned, Interrupted, or OSError. In all these cases it is absent.
    """
    target, source, watch = conversion.target, conversion.source, Stopwatch()
    plan = conversion.plan
    check_space(target, space_for(plan, clone))
    staging = staged(target, Kind.THINNING)

    try:
        context = Context(facts=[source.files], on_progress=on_progress, stop=stop, clone=clone)
        crcs, moved = write_files(plan, staging, context)
        num_bytes = f"{plan.num_bytes:,}"
        logger.info("wrote %s, %s bytes, in %s", display_name(target), num_bytes, watch.lap())
        for name, folder in conversion.links.items():
            if filecmp.cmp(folder / name, staging / name, shallow=False):
                (staging / name).unlink()
                link_or_copy(folder / name, staging / name)
        write_durably(staging / MANIFEST, _manifest(conversion, crcs))
        fsync_folder(staging)
        check_crcs(staging, crcs, stop, on_progress)
        made = index_checkpoint(staging, display_name(target))
        check_places(plan, made, source, *_kept_params(conversion.params_of, conversion.masters))
        check_unchanged(source)
        logger.info("read it back in %s", watch.lap())
        stop.check()
        staging.rename(target)
        fsync_folder(target.parent)
        return moved
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def part_bytes(index: CheckpointIndex, structure: ModelStructure) -> dict[str, int]:
    """Return the bytes of each part's trained states; parts without trained params are left out."""
    found: dict[str, int] = {}
    for param, states in trained_states(index).items():
        part = structure.part_of[param]
        found[part] = found.get(part, 0) + sum(index.held[state].num_bytes for state in states)
    return {part: found[part] for part in structure.parts if part in found}


def _manifest(conversion: Conversion, crcs: Mapping[str, int]) -> bytes:
    """Return the manifest; its size does not depend on the checksums."""
    source, layout = conversion.source, conversion.layout
    own = {file.path for file in (*layout.bundles, *layout.frozen)}
    facts = tuple(
        BundleFact(file.path, file.num_bytes, crcs.get(file.path, 0))
        for file in conversion.plan.files
        if file.path in own
    )
    ledger = conversion.ledger.to_json()
    return manifest_json(
        describe_partial(
            source, conversion.save_id, conversion.parts, conversion.params_of, facts, ledger, conversion.masters
        ),
        policy=conversion.policy,
        num_bytes=part_bytes(source, conversion.structure),
        tool_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
