"""Whether a resume accepts the Trainer's small files: random states, loss scale, trainer state.

``training_args.bin`` says whether there is a loss scale. It pickles a class of transformers, which is never created
here: its attributes are read as data. The Trainer reads its own files with ``torch.load(weights_only=True)``, which
refuses some names that the reader here accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import is_count
from llmtailor.containers.pickle_nodes import Global, children
from llmtailor.containers.torch_zip import read_attributes
from llmtailor.errors import COPY_FILE, SourceError, damaged
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.field_tables import DICT, POSITIVE, FieldType, Table, check_fields, count, field, number

TRAINING_ARGS = "training_args.bin"


def read_scales_loss(root: Path, where: str) -> bool | None:
    """Return whether a run trains in fp16: with a loss scale, and maybe with skipped steps.

    None if unknown: no resume needs ``training_args.bin``, so it may be missing or damaged.
    """
    try:
        fp16 = read_attributes(root, TRAINING_ARGS, where).get("fp16")
    except SourceError:
        return None
    return fp16 if isinstance(fp16, bool) else None


_FIX = "a resume fails: torch.load considers it unsafe; copy the file again, or save it with plain numbers and tensors"
_LEAVES = (str, bytes, int, float, type(None))


def find_refused(tree: Any, where: str, of_numpy: frozenset[str] = frozenset()) -> list[Finding]:
    """Return findings on names that llmtailor accepts and torch does not; ``of_numpy`` are the numpy names it accepts.

    A file with names that llmtailor does not accept was refused earlier.
    """
    refused: dict[str, None] = {}
    seen: set[int] = set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Global):
            module = node.module.partition(".")[0]
            if module == "deepspeed" or (module == "numpy" and node.name not in of_numpy):
                refused[str(node)] = None
        elif not isinstance(node, _LEAVES) and id(node) not in seen:
            seen.add(id(node))
            nodes += children(node)
    return [Finding(where, f"it names {name}", _FIX, Code.FIELD_TYPE, ERROR) for name in refused]


def check_file(
    tree: Any, table: Table, content: str, where: str, of_numpy: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    """Yield findings on a file that a resume loads as a dict; ``content`` says what it is."""
    yield from find_refused(tree, where, of_numpy)
    if isinstance(tree, dict):
        yield from check_fields(tree, table, where)
    else:
        what, fix = f"it holds a {type(tree).__name__}, not {content}", f"a resume fails; {COPY_FILE}"
        yield Finding(where, what, fix, Code.FIELD_TYPE, ERROR)


_GROWTH = number("number > 1", lambda value: value > 1)
_BACKOFF = number("number between 0 and 1", lambda value: 0 < value < 1)
SCALER_TABLE = Table(
    "scaler.pt (fp16 without DeepSpeed)",
    "scaler.pt",
    (
        field("scale", POSITIVE),
        field("growth_factor", _GROWTH),
        field("backoff_factor", _BACKOFF),
        field("growth_interval", count("count from 1 up", 1)),
        field("_growth_tracker", count()),
    ),
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
TRAINER_STATE_TABLE = Table(
    "trainer_state.json",
    "trainer_state.json",
    (
        field("train_batch_size", number("number", lambda value: True)),
        field("log_history", _LOG, if_missing=None),
        field("stateful_callbacks", DICT),
    ),
)
"""``global_step`` is checked by `read_global_step`."""


CALLBACKS, MARK = "stateful_callbacks", "llmtailor"
"""Where the saver states the attempt; see `formats.attempt_mark`"""
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


def read_lags(content: Mapping[str, Any]) -> frozenset[int]:
    """Return how many steps Adam may be behind the run; 0 is among them.

    A composite whose moments were reset, or come from another step than its base, states the difference. A training
    that resumes from it keeps the statement, as it keeps all states of callbacks, and the difference stays the same.
    """
    callbacks = content.get(CALLBACKS)
    stated = callbacks.get(LAGS) if isinstance(callbacks, Mapping) else None
    attributes = stated.get("attributes") if isinstance(stated, Mapping) else None
    lags = attributes.get("step_lags") if isinstance(attributes, Mapping) else None
    return frozenset((0, *(lag for lag in lags if type(lag) is int))) if isinstance(lags, list) else frozenset((0,))


def with_lags(content: Mapping[str, Any], lags: frozenset[int]) -> dict[str, Any]:
    """Return the content of a ``trainer_state.json`` that states these lags; none if 0 is the only one."""
    callbacks = content.get(CALLBACKS)
    others = {key: value for key, value in callbacks.items() if key != LAGS} if isinstance(callbacks, Mapping) else {}
    if lags - {0}:
        others[LAGS] = {"args": {}, "attributes": {"step_lags": sorted(lags - {0})}}
    return {**content, CALLBACKS: others}


def is_trainers(content: Mapping[str, Any]) -> bool:
    """Return whether the Trainer wrote this, rather than the saver in a training loop without it.

    The saver writes only the step and our own marks there, and no Trainer resumes from it.
    """
    callbacks = content.get(CALLBACKS, {})
    if content.keys() - {CALLBACKS} != {"global_step"} or not isinstance(callbacks, dict):
        return True
    return callbacks.keys() - {MARK, LAGS} != set()


def check_trainer_state(content: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield findings on fields that a resume rejects, and on a log that continues beyond the step."""
    if not is_trainers(content):
        return
    yield from check_fields(content, TRAINER_STATE_TABLE, where)
    step, log = content.get("global_step"), content.get("log_history")
    entries = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    steps = [entry["step"] for entry in entries if type(entry.get("step")) is int]
    if type(step) is int and steps and max(steps) > step:
        what = f"global_step is {step}, but log_history continues to step {max(steps)}"
        yield Finding(where, what, f"a resume follows the former; {COPY_FILE}", Code.FIELD_CONFLICT, ERROR)
