"""The run attempt that a checkpoint belongs to, and how far Adam is behind it, as ``trainer_state.json`` states it.

The saver puts a mark into the ``stateful_callbacks`` of the Trainer's state, where the Trainer keeps the states of
callbacks. So the Trainer's own full checkpoints, partial ones, composites and copies all carry it, and a training that
resumes restores it. Its name is not that of a callback, so the Trainer never uses it (checked in
``Trainer._load_callback_state`` of transformers 5.23; with ``restore_callback_states_from_checkpoint`` it logs that
there is no such callback).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import DEEPSPEED, UNIVERSAL, CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.checkpoint.lineage import THINNED, Past, continued, is_one_attempt, read_past
from llmtailor.codes import Code
from llmtailor.containers.json import read_json
from llmtailor.errors import Problem, SourceError
from llmtailor.formats.clients import TRAINER_STATE
from llmtailor.formats.lightning.stated import read_lightning
from llmtailor.formats.partial.manifest import is_partial, read_manifest
from llmtailor.formats.trainer_checks import CALLBACKS, MARK, read_lags, with_lags


def make_mark(past: Past) -> dict[str, Any]:
    """Return the mark as a callback's state."""
    attributes = {"lineage": past.lineage, "history": dict(past.history), "step": past.step}
    return {"args": {}, "attributes": attributes}


def read_mark(trainer_state: Mapping[str, Any], step: Any) -> Past | None:
    """Return the attempt stated by the content of a ``trainer_state.json``; None if it is missing or invalid.

    ``step`` is its ``global_step``. The saver keeps the mark's step up to date. Without the saver it stays behind,
    and the checkpoint belongs to an unrecorded training (see `checkpoint.lineage.continued`).
    """
    callbacks = trainer_state.get(CALLBACKS)
    mark = callbacks.get(MARK) if isinstance(callbacks, Mapping) else None
    values = mark.get("attributes") if isinstance(mark, Mapping) else None
    if not isinstance(values, Mapping) or type(step) is not int:
        return None
    past = read_past(values.get("step"), values.get("lineage"), values.get("history"))
    return continued(past, step) if past is not None and past.step < step else past


def with_mark(trainer_state: Mapping[str, Any], past: Past) -> dict[str, Any]:
    """Return the content of a ``trainer_state.json`` with an attempt's mark."""
    callbacks = trainer_state.get(CALLBACKS)
    others = dict(callbacks) if isinstance(callbacks, Mapping) else {}
    return {**trainer_state, CALLBACKS: {**others, MARK: make_mark(past)}}


def stated_attempt(root: Path) -> Past | None:
    """Return the attempt that a checkpoint states; None if it states none, or is damaged.

    The attempt of a partial checkpoint without a mark is that of its ledger, unless ``thin`` made it from a full one.
    """
    with suppress(OSError, SourceError):
        content = read_json(root / TRAINER_STATE, TRAINER_STATE)
        if marked := read_mark(content, content.get("global_step")):
            return marked
    with suppress(OSError, SourceError):
        if (tree := read_lightning(root)) is not None:
            return read_mark({CALLBACKS: tree.get("callbacks")}, tree.get("global_step"))
    with suppress(OSError, SourceError):
        if is_partial(root):
            manifest = read_manifest(root, root.name)
            past = read_past(manifest.step, manifest.ledger.get("lineage"), manifest.ledger.get("history"))
            return None if past is None or past.lineage.startswith(THINNED) else past
    return None


def state_attempt(
    layouts: Sequence[FileLayout], indexes: Sequence[CheckpointIndex], base: int
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the files of a composite, with its base's attempt stated, and notices.

    If its sources' attempts do not continue each other, it states a new one: no checkpoint of these attempts may
    be combined with it, and a training that resumes from it starts its own record.
    """
    reference = indexes[base]
    stated = [stated_attempt(index.root) for index in indexes]
    known = [past for past in stated if past is not None]
    attempt, notices = stated[base], []
    if not is_one_attempt(known):
        words = sorted(f"{past.lineage}@{past.step}" for past in known)
        attempt = Past(reference.global_step, f"mixed-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}", {})
        what = "its sources are of different attempts of the run, one of which was abandoned for the other"
        fix = "leave out those of the abandoned attempt, if this is not intended; `llmtailor merge --run` does"
        notices.append(Problem("sources", what, fix, Code.MIXED_ATTEMPTS))
    content = _content(layouts, reference)
    if attempt is None or content is None or TRAINER_STATE not in reference.files:
        return list(layouts), notices
    if read_mark(content, attempt.step) == attempt:
        return list(layouts), notices
    return _with_content(layouts, with_mark(content, attempt), "the base's, with its attempt"), notices


def state_lags(
    layouts: Sequence[FileLayout], reference: CheckpointIndex, steps: Iterable[float], family: str
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the files of a composite, with how far its optimizer's ``steps`` are behind its base, and notices.

    Checkpoints that a training saves after a resume keep this, which tells them from files of several saves.
    """
    expected = reference.global_step - reference.skipped_steps
    found = frozenset(int(expected - step) for step in steps)
    lags = found | {0}
    content = _content(layouts, reference)
    if content is not None:
        if read_lags(content) == lags:
            return list(layouts), []
        return _with_content(layouts, with_lags(content, lags), "the base's, with Adam's steps behind it"), []
    # elsewhere each param has a step of its own, and those without gradients lag behind in any training
    is_usual = lags == {0} or (family not in (DEEPSPEED, UNIVERSAL) and 0 in found and min(found) == 0)
    if is_usual:
        return list(layouts), []
    what = (
        f"Adam's steps differ from the run's, and without {TRAINER_STATE} nothing says so in the checkpoints that the "
        "run saves after a resume: llmtailor will refuse them"
    )
    return list(layouts), [Problem("optimizer", what, "take all optimizer states from the step of base_model")]


def _content(layouts: Sequence[FileLayout], reference: CheckpointIndex) -> dict[str, Any] | None:
    """Return the content of a composite's ``trainer_state.json``; None if it has none."""
    there = next((layout for layout in layouts if layout.path == TRAINER_STATE), None)
    if there is None:
        return None
    first = there.pieces[0] if there.pieces else None
    if isinstance(first, Bytes):  # made for another loader than the base's, or changed already
        return dict(json.loads(first.data))
    return read_json(reference.root / TRAINER_STATE, f"{reference.name}/{TRAINER_STATE}")


def _with_content(layouts: Sequence[FileLayout], content: Mapping[str, Any], why: str) -> list[FileLayout]:
    data = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    made = FileLayout(TRAINER_STATE, (Bytes(data, why),))
    return [made if layout.path == TRAINER_STATE else layout for layout in layouts]
