"""``trainer_state.json`` (the step, the attempt of the run, how far Adam is behind it), and the loss scale.

The saver puts a stamp into the ``stateful_callbacks`` of the Trainer's state, where the Trainer keeps the states of
callbacks. So the Trainer's own full checkpoints, partial ones, composites and copies all carry it, and a training that
resumes restores it. Its name is not that of a callback, so the Trainer never uses it (checked in
``Trainer._load_callback_state`` of transformers 5.23; with ``restore_callback_states_from_checkpoint`` it logs that
there is no such callback).

``training_args.bin`` says whether there is a loss scale. It pickles a class of transformers, which is never created
here: its attributes are read as data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import DEEPSPEED, UNIVERSAL, CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.checkpoint.lineage import Past, continued, is_one_attempt, read_past
from llmtailor.codes import Code
from llmtailor.containers.json import is_count, read_json
from llmtailor.containers.torch_file import read_attributes
from llmtailor.errors import COPY_FILE, Problem, SourceError, damaged
from llmtailor.findings import ERROR, Finding
from llmtailor.frameworks.files import TRAINER_STATE, TRAINING_ARGS
from llmtailor.frameworks.stock_fields import (
    DICT,
    POSITIVE,
    Field,
    FieldType,
    Table,
    check_fields,
    check_file,
    count,
    number,
)


def read_scales_loss(root: Path, where: str) -> bool | None:
    """Return whether a run trains in fp16: with a loss scale, and maybe with skipped steps.

    None if unknown: no resume needs ``training_args.bin``, so it may be missing or damaged.
    """
    try:
        fp16 = read_attributes(root, TRAINING_ARGS, where).get("fp16")
    except SourceError:
        return None
    return fp16 if isinstance(fp16, bool) else None


SCALER_TABLE: Table = (
    Field("scale", POSITIVE),
    Field("growth_factor", number("number > 1", lambda value: value > 1)),
    Field("backoff_factor", number("number between 0 and 1", lambda value: 0 < value < 1)),
    Field("growth_interval", count("count from 1 up", 1)),
    Field("_growth_tracker", count()),
)


def check_scaler(tree: Any, scales_loss: bool | None, where: str) -> Iterator[Finding]:
    """Yield findings on a loss scale that a resume rejects, or that makes it skip every step.

    ``scales_loss`` says whether the run has one; None if unknown.
    """
    yield from check_file(tree, SCALER_TABLE, "a loss scale", where)
    if scales_loss is False:
        what = "the run trained without a loss scale, and can't load one"
        yield Finding(where, what, "a resume fails; move the file out of the folder", Code.FIELD_UNKNOWN, ERROR)


_LOG = FieldType(
    "list of entries",
    lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
)
TRAINER_STATE_TABLE: Table = (
    Field("train_batch_size", number("number", lambda value: True)),
    Field("log_history", _LOG, if_missing=None),
    Field("stateful_callbacks", DICT),
)
"""``global_step`` is checked by `read_global_step`."""
CALLBACKS, MARK = "stateful_callbacks", "llmtailor"
"""Where the saver records the attempt"""
LAGS = "llmtailor-optimizer"
"""The callback whose ``step_lags`` a composite states, see `read_lags`"""


def read_global_step(content: Mapping[str, Any], where: str) -> int:
    """Return the step of a state. Raises SourceError if it has none."""
    if "global_step" not in content:
        raise damaged(where, "it has no global_step, so a resume would start at step 0", Code.FIELD_MISSING)
    step = content["global_step"]
    if not is_count(step):
        code = Code.FIELD_RANGE if type(step) is int else Code.FIELD_TYPE
        raise damaged(where, f"global_step is {step!r:.40}, not a number of steps", code)
    return int(step)


def _callbacks(content: Mapping[str, Any]) -> Mapping[str, Any]:
    found = content.get(CALLBACKS)
    return found if isinstance(found, Mapping) else {}


def _attributes(content: Mapping[str, Any], callback: str) -> Mapping[str, Any]:
    stated = _callbacks(content).get(callback)
    found = stated.get("attributes") if isinstance(stated, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def read_lags(content: Mapping[str, Any]) -> frozenset[int]:
    """Return the numbers of steps that Adam may be behind the run; 0 is one of them.

    A composite whose moments were reset, or come from another step than its base, records the difference. A training
    that resumes from it keeps this record, like all states of callbacks, and the difference stays the same.
    """
    lags = _attributes(content, LAGS).get("step_lags")
    return frozenset((0, *(lag for lag in lags if type(lag) is int))) if isinstance(lags, list) else frozenset((0,))


def is_of_trainer(content: Mapping[str, Any]) -> bool:
    """Return whether the Trainer wrote this. In other loops the saver writes only the step and its own marks, and no
    Trainer resumes from it."""
    callbacks = content.get(CALLBACKS, {})
    if content.keys() - {CALLBACKS} != {"global_step"} or not isinstance(callbacks, dict):
        return True
    return callbacks.keys() - {MARK, LAGS} != set()


def check_trainer_state(content: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield findings on fields that a resume rejects, and on a log that continues beyond the step."""
    if not is_of_trainer(content):
        return
    yield from check_fields(content, TRAINER_STATE_TABLE, where)
    step, log = content.get("global_step"), content.get("log_history")
    entries = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    steps = [entry["step"] for entry in entries if type(entry.get("step")) is int]
    if type(step) is int and steps and max(steps) > step:
        what = f"global_step is {step}, but log_history continues to step {max(steps)}"
        yield Finding(where, what, f"a resume follows the former; {COPY_FILE}", Code.FIELD_CONFLICT, ERROR)


def make_mark(past: Past) -> dict[str, Any]:
    """Return the mark as a callback's state."""
    attributes: dict[str, Any] = {"lineage": past.lineage, "history": dict(past.history), "step": past.step}
    if past.missed:
        attributes["missed"] = dict(past.missed)
    return {"args": {}, "attributes": attributes}


def read_mark(trainer_state: Mapping[str, Any], step: Any) -> Past | None:
    """Return the attempt stated by the content of a ``trainer_state.json``; None if it is missing or invalid.

    ``step`` is its ``global_step``. The saver keeps the mark's step up to date. If the mark's step is older, the
    checkpoint belongs to a training without the saver (see `checkpoint.lineage.continued`).
    """
    values = _attributes(trainer_state, MARK)
    stated = (values.get(key) for key in ("step", "lineage", "history", "missed"))
    past = read_past(*stated) if type(step) is int else None
    return continued(past, step) if past is not None and past.step < step else past


def is_marked(trainer_state: Mapping[str, Any], past: Past) -> bool:
    """Return whether the content of a ``trainer_state.json`` states just this."""
    stated = read_mark(trainer_state, past.step)
    return stated is not None and stated == past and stated.missed == past.missed


def with_mark(trainer_state: Mapping[str, Any], past: Past) -> dict[str, Any]:
    """Return the content of a ``trainer_state.json`` with an attempt's mark."""
    return {**trainer_state, CALLBACKS: {**_callbacks(trainer_state), MARK: make_mark(past)}}


def attempt_of(stated: Sequence[Past | None], base: int, step: int) -> tuple[Past | None, list[Problem]]:
    """Return the attempt that a composite of a step belongs to, and notices.

    ``stated`` are the attempts of the sources, the base's at ``base``. If they don't continue each other, the composite
    gets a new attempt: no checkpoint of the old ones may be combined with it, and a training that resumes from it
    starts a new record.
    """
    known = [past for past in stated if past is not None]
    attempt, notices = stated[base], []
    if not is_one_attempt(known):
        words = sorted(f"{past.lineage}@{past.step}" for past in known)
        attempt = Past(step, f"mixed-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}", {})
        what = "its sources are of different attempts of the run; one was abandoned for the other"
        fix = "leave out those of the abandoned attempt, if this is not intended; `llmtailor merge --run` does"
        notices.append(Problem("sources", what, fix, Code.MIXED_ATTEMPTS))
    return attempt, notices


def state_attempt(layouts: Sequence[FileLayout], base: CheckpointIndex, attempt: Past | None) -> list[FileLayout]:
    """Return the files of a composite, with its attempt in its ``trainer_state.json``, if it has one."""
    content = _content(layouts, base) if TRAINER_STATE in base.files else None
    if attempt is None or content is None or is_marked(content, attempt):
        return list(layouts)
    return _with_content(layouts, with_mark(content, attempt), "the base's, with its attempt")


def state_lags(
    layouts: Sequence[FileLayout], base: CheckpointIndex, steps: Iterable[float], to_format: str
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the files of a composite, with a record of how far its optimizer's ``steps`` are behind it, and notices.

    Checkpoints that a training saves after a resume keep this record; without it, they would look like files of
    several saves.
    """
    expected = base.global_step - base.zero.skipped_steps
    found = frozenset(int(expected - step) for step in steps)
    lags = found | {0}
    content = _content(layouts, base)
    if content is not None and read_lags(content) != lags:
        callbacks = {key: value for key, value in _callbacks(content).items() if key != LAGS}
        if lags != {0}:
            callbacks[LAGS] = {"args": {}, "attributes": {"step_lags": sorted(lags - {0})}}
        changed = {**content, CALLBACKS: callbacks}
        return _with_content(layouts, changed, "the base's, with Adam's steps behind it"), []
    # elsewhere each param has a step of its own, and those without gradients lag behind in any training
    is_usual = lags == {0} or (to_format not in (DEEPSPEED, UNIVERSAL) and 0 in found and min(found) == 0)
    if content is not None or is_usual:
        return list(layouts), []
    what = (
        f"Adam's steps differ from the run's, and without {TRAINER_STATE} nothing says so in the checkpoints that the "
        "run saves after a resume: llmtailor will refuse them"
    )
    return list(layouts), [Problem("optimizer", what, "take all optimizer states from the step of base_model")]


def _content(layouts: Sequence[FileLayout], base: CheckpointIndex) -> dict[str, Any] | None:
    there = next((layout for layout in layouts if layout.path == TRAINER_STATE), None)
    if there is None:
        return None
    first = there.pieces[0] if there.pieces else None
    if isinstance(first, Bytes):  # made for another framework than the base's, or changed already
        return dict(json.loads(first.data))
    return read_json(base.root / TRAINER_STATE, f"{base.name}/{TRAINER_STATE}")


def _with_content(layouts: Sequence[FileLayout], content: Mapping[str, Any], why: str) -> list[FileLayout]:
    data = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    made = FileLayout(TRAINER_STATE, (Bytes(data, why),))
    return [made if layout.path == TRAINER_STATE else layout for layout in layouts]
