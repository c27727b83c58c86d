"""Reads what was written, or is about to be relied on, and compares it with what it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from llmtailor.core.extents import Extent, Fragment
from llmtailor.core.index import CheckpointIndex, FileFact
from llmtailor.core.plan import Copy, Plan
from llmtailor.core.states import WEIGHT, State
from llmtailor.errors import PathIn, Problem, SourceError, VerificationError
from llmtailor.execute.runner import num_workers
from llmtailor.execute.stopping import Stop, run_all
from llmtailor.io.listing import added_since
from llmtailor.verify.reading import Reader, crc_of_range

Observe = Callable[[int], None]
_BUG = "this is a bug in llmtailor, or the disk does not keep what is written: please report it; nothing was removed"
_ALIKE = (
    *("stage", "world_size", "global_step", "skipped_steps", "precision", "optimizer", "params", "tied", "groups"),
    *("flat_ids", "group_params", "settings", "variant", "part_steps"),
)
"""What the index of a partial checkpoint says just like that of the full one it was made of."""


def check_crcs(root: Path, wanted: Mapping[str, int], stop: Stop, observe: Observe) -> None:
    """Read files from the disk and compare their CRC-32.

    Raises VerificationError with every file that differs, OSError, or Interrupted.
    """
    with closing(Reader(root)) as reader:
        jobs = [partial(_crc_of_file, reader, path, _watched(stop, observe)) for path in wanted]
        found = dict(zip(wanted, run_all(jobs, num_workers(), stop), strict=True))
    if wrong := [path for path, crc in wanted.items() if found[path] != crc]:
        raise VerificationError(
            Problem(str(root / path), "it does not read back as it was written", _BUG) for path in wrong
        )


def check_places(plan: Plan, made: CheckpointIndex, source: CheckpointIndex, params: Iterable[str]) -> None:
    """Compare the index of what was written with what was planned, and with the checkpoint it was made of.

    With the checksums of all files this says that every state is there, bit for bit. Raises VerificationError.
    """
    wrong = [f"its {what} is not that of {source.name}" for what in _ALIKE if not _alike(what, made, source)]
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
        for piece in file.pieces:
            if isinstance(piece, Copy) and piece.state is not None and made.held[piece.state].is_here:
                end = piece.begin + _numel(made, piece.state, piece.stop - piece.start)
                planned = Fragment(piece.begin, end, Extent(file.path, piece.start, piece.stop))
                if list(made.held[piece.state].place.cover(piece.begin, end)) != [planned]:
                    wrong.append(f"{piece.state.kind} of {piece.state.param} is not where it was written")
    if wrong:
        raise VerificationError(Problem(made.name, what, _BUG) for what in wrong)


def compared(one: CheckpointIndex) -> list[State]:
    """Return the states of a partial checkpoint that `check_same` compares."""
    return [state for state, held in one.held.items() if held.is_here and state.kind != WEIGHT]


def check_same(one: CheckpointIndex, other: CheckpointIndex, stop: Stop, observe: Observe) -> None:
    """Compare every state that a partial checkpoint holds with the full one of its step, by CRC-32.

    Raises VerificationError for those that differ, OSError, or Interrupted.
    """
    states = compared(one)
    pairs = [state for state in states if state in other.held]
    crcs = []
    for index in (one, other):
        with closing(Reader(index.root)) as reader:
            jobs = [partial(_crc_of_state, reader, index, state, _watched(stop, observe)) for state in pairs]
            crcs.append(run_all(jobs, num_workers(), stop))
    lacking = [state for state in states if state not in other.held]
    wrong = lacking + [state for state, mine, theirs in zip(pairs, *crcs, strict=True) if mine != theirs]
    if wrong:
        names = ", ".join(f"{state.kind} of {state.param}" for state in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        fix = "they are of different attempts: remove the one that you don't want by hand"
        raise VerificationError.at(one.name, f"it holds other values than {other.name}: {names}{more}", fix)


def check_unchanged(index: CheckpointIndex) -> None:
    """Raise SourceError for every file that is no longer as it was when it was indexed, or was not there then."""
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


def _watched(stop: Stop, observe: Observe) -> Observe:
    def watch(num_bytes: int) -> None:
        stop.check()
        observe(num_bytes)

    return watch


def _crc_of_file(reader: Reader, path: str, observe: Observe) -> int:
    reader.forget(path)
    return crc_of_range(reader, path, 0, (reader.root / path).stat().st_size, observe)


def _crc_of_state(reader: Reader, index: CheckpointIndex, state: State, observe: Observe) -> int:
    held, crc = index.held[state], 0
    for fragment in held.place.cover(0, held.numel):
        extent = fragment.extent
        crc = crc_of_range(reader, extent.path, extent.start, extent.stop, observe, crc)
    return crc
