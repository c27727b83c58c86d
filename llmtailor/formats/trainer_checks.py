"""Whether a resume accepts the Trainer's small files: random states, loss scale, trainer state.

``training_args.bin`` says which of their fields matter. It pickles a class of transformers, which is never created
here: its attributes are read as data. The Trainer reads its own files with ``torch.load(weights_only=True)``, which
refuses some names that the reader here accepts.
"""

from __future__ import annotations

import ast
import importlib.util
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.fields import extent_of
from llmtailor.containers.json import is_count
from llmtailor.containers.pickle_nodes import Call, Global, as_tensor, children
from llmtailor.containers.torch_zip import read_attributes
from llmtailor.errors import COPY_FILE, PathIn, SourceError, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.resumed.tables import Table, check_fields
from llmtailor.formats.resumed.trainer import (
    RNG_TABLE,
    SCALER_TABLE,
    TORCH_STATE_BYTES,
    TRAINER_STATE_TABLE,
    TWISTER_WORDS,
    is_torch_state,
)
from llmtailor.storage.local import open_source

TRAINING_ARGS = "training_args.bin"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The content of ``training_args.bin``; None where it is missing or says nothing."""

    logs_by_steps: bool | None = None
    saves_by_steps: bool | None = None
    evaluates_by_steps: bool | None = None
    scales_loss: bool | None = None
    """Whether it trains in fp16: with a loss scale, and maybe with skipped steps"""


def read_run_facts(root: Path, where: str) -> RunFacts:
    """Return the run's arguments. A missing or damaged file gives none: no resume needs it."""
    try:
        args = read_attributes(root, TRAINING_ARGS, where)
    except SourceError:
        return RunFacts()
    fp16 = args.get("fp16")
    return RunFacts(
        _by_steps(args, "logging_strategy"),
        _by_steps(args, "save_strategy"),
        _by_steps(args, "eval_strategy"),
        fp16 if isinstance(fp16, bool) else None,
    )


def _by_steps(args: Mapping[str, Any], key: str) -> bool | None:
    """Return whether a strategy is by steps. It is an enum: ``Class(value)`` or ``getattr(Class, name)``."""
    node = args.get(key)
    value = node.args[-1] if isinstance(node, Call) and isinstance(node.args, tuple) and node.args else node
    return value.lower() == "steps" if isinstance(value, str) else None


_FIX = "a resume fails: torch.load considers it unsafe; copy the file again, or save it with plain numbers and tensors"
_LEAVES = (str, bytes, int, float, type(None))
OF_ARRAYS = frozenset(("_reconstruct", "ndarray", "dtype"))
"""The numpy names that the Trainer allows in files with random number states"""


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


_STATE = struct.Struct("<qiiq")
"""The start of torch's state: seed, words left, whether it is seeded, next word; then the words, in 8 bytes each"""


def check_rng(root: Path, tree: Any, where: str) -> Iterator[Finding]:
    """Yield findings on states that a resume rejects. Of tensors, only that of the CPU's generator is read."""
    yield from find_refused(tree, where, OF_ARRAYS)
    if not isinstance(tree, dict):
        fix = f"a resume fails; {COPY_FILE}"
        yield Finding(where, f"it holds a {type(tree).__name__}, not random states", fix, Code.FIELD_TYPE, ERROR)
        return
    yield from check_fields(tree, RNG_TABLE, where)
    if is_torch_state(tree.get("cpu")) and not _is_valid(_bytes_of(root, tree["cpu"], where)):
        fix = f"a resume fails, or reads out of bounds; {COPY_FILE}"
        yield Finding(where, "cpu does not hold a state of torch's generator", fix, Code.FIELD_RANGE, ERROR)


def _bytes_of(root: Path, node: Any, where: str) -> bytes:
    view = as_tensor(node)
    assert view is not None
    extent = extent_of(view, "cpu", where)
    with open_source(root / extent.path, where) as file:
        return file.read(extent.start, extent.stop)


def _is_valid(state: bytes) -> bool:
    """Return whether torch accepts the state: it checks each counter. They add up to the words, except at first."""
    _, left, seeded, following = _STATE.unpack_from(state)
    words = state[_STATE.size : _STATE.size + 8 * TWISTER_WORDS]
    return (
        len(state) == TORCH_STATE_BYTES
        and seeded == 1
        and ((left, following) == (1, 0) or (left + following == TWISTER_WORDS + 1 and left > 0 < following))
        and any(words)
    )


def find_swapped(saved_as: Mapping[str, str], name: str, may_repeat: bool) -> Iterator[Finding]:
    """Yield findings on files of another rank. ``saved_as`` is the name of each when it was saved.

    With ``may_repeat``, several ranks may share one on purpose, as in a composite for more ranks.
    """
    is_mixed = saved_as.keys() != set(saved_as.values())
    if may_repeat and is_mixed:
        return
    for path, other in saved_as.items():
        if path != other and (not is_mixed or other in saved_as):
            what = f"the file was saved as {other}, so it holds the random numbers of another rank"
            fix = "rename it to its own name to repeat dropout exactly"
            yield Finding(PathIn(name, path), what, fix, Code.RNG_SWAPPED, WARNING)


def check_scaler(tree: Any, facts: RunFacts, where: str) -> Iterator[Finding]:
    """Yield findings on a loss scale that a resume rejects, or that makes it skip every step."""
    yield from find_refused(tree, where)
    if facts.scales_loss is False:
        what = "the run trained without a loss scale, and can't load one"
        yield Finding(where, what, "a resume fails; remove the file", Code.FIELD_UNKNOWN, ERROR)
    if not isinstance(tree, dict):
        fix = "a resume fails; copy the file again"
        yield Finding(where, f"it holds a {type(tree).__name__}, not a loss scale", fix, Code.FIELD_TYPE, ERROR)
        return
    yield from check_fields(tree, SCALER_TABLE, where)


KEYS = frozenset(
    (
        *("epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
        *("num_train_epochs", "num_input_tokens_seen", "total_flos", "log_history", "best_metric"),
        *("best_global_step", "best_model_checkpoint", "is_local_process_zero", "is_world_process_zero"),
        *("is_hyper_param_search", "trial_name", "trial_params", "stateful_callbacks"),
    )
)
"""Those of transformers 5.23, used if none is installed"""
KEYS_OF = "5.23"
CALLBACKS, MARK = "stateful_callbacks", "llmtailor"
"""Where the saver states the attempt; see `formats.attempt_mark`"""
_SAME_TO = 0.011
"""Versions before 4.53 rounded the logged epochs to hundredths"""


def read_global_step(content: Mapping[str, Any], where: str) -> int:
    """Return the step of a state. Raises SourceError if it has none."""
    if "global_step" not in content:
        raise SourceError.at(
            where, "it has no global_step, so a resume would start at step 0", COPY_FILE, Code.FIELD_MISSING
        )
    step = content["global_step"]
    if not is_count(step):
        code = Code.FIELD_RANGE if type(step) is int else Code.FIELD_TYPE
        raise SourceError.at(where, f"global_step is {step!r:.40}, not a number of steps", COPY_FILE, code)
    return int(step)


def is_trainers(content: Mapping[str, Any]) -> bool:
    """Return whether the Trainer wrote this, rather than the saver in a training loop without it.

    The saver writes only the step and its own mark there, and no Trainer resumes from it.
    """
    callbacks = content.get(CALLBACKS, {})
    if content.keys() - {CALLBACKS} != {"global_step"} or not isinstance(callbacks, dict):
        return True
    return callbacks.keys() - {MARK} != set()


def check_trainer_state(content: Mapping[str, Any], facts: RunFacts, where: str) -> Iterator[Finding]:
    """Yield findings on fields that a resume rejects or loses. ``facts`` say what the run reads of them."""
    if not is_trainers(content):
        return
    yield from _unknown(content, where)
    yield from check_fields(content, _read_in(facts), where)
    yield from _log(content, where)


def _read_in(facts: RunFacts) -> Table:
    unread = {
        key
        for key, is_read in (
            ("logging_steps", facts.logs_by_steps),
            ("save_steps", facts.saves_by_steps),
            ("eval_steps", facts.evaluates_by_steps),
        )
        if is_read is False
    }
    return replace(
        TRAINER_STATE_TABLE,
        fields=tuple(field for field in TRAINER_STATE_TABLE.fields if field.path[0] not in unread),
    )


def _unknown(content: Mapping[str, Any], where: str) -> Iterator[Finding]:
    installed = installed_keys()
    unknown = sorted(content.keys() - (KEYS if installed is None else installed[1]))
    if not unknown:
        return
    if installed is None:
        what = f"it has {some(unknown)}, which transformers {KEYS_OF} does not know"
        fix = "a resume fails unless the transformers there knows it; copy the file again"
        yield Finding(where, what, fix, Code.FIELD_UNKNOWN, WARNING)
        return
    what = f"it has {some(unknown)}, which the transformers installed here ({installed[0]}) does not know"
    fix = "a resume fails; remove what was added, or resume with the transformers that saved it"
    yield Finding(where, what, fix, Code.FIELD_UNKNOWN, ERROR)


@lru_cache(maxsize=1)
def installed_keys() -> tuple[str, frozenset[str]] | None:
    """Return the version of transformers that is installed, and the fields of its TrainerState, from its source.

    None if it is not installed, or the class has moved. Nothing is imported.
    """
    try:
        spec = importlib.util.find_spec("transformers")  # of a top-level name: finds it, and imports nothing
        if spec is None or spec.origin is None:
            return None
        tree = ast.parse(Path(spec.origin).with_name("trainer_callback.py").read_text(encoding="utf-8"))
        fields = {
            one.target.id
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == "TrainerState"
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        return (version("transformers"), frozenset(fields)) if "global_step" in fields else None
    except (OSError, ValueError, SyntaxError, PackageNotFoundError):
        return None


def _log(content: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield findings from a comparison with the log, whose entries were added step by step."""
    step, epoch, log = content.get("global_step"), content.get("epoch"), content.get("log_history")
    entries = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    steps = [entry["step"] for entry in entries if type(entry.get("step")) is int]
    if type(step) is not int:
        return
    if steps and max(steps) > step:
        what = f"global_step is {step}, but log_history continues to step {max(steps)}"
        fix = f"a resume follows the former; {COPY_FILE}"
        yield Finding(where, what, fix, Code.FIELD_CONFLICT, ERROR)
    best = content.get("best_global_step")
    if type(best) is int and best > step:
        what = f"global_step is {step}, but best_global_step is {best}"
        yield Finding(where, what, f"a resume follows the former; {COPY_FILE}", Code.FIELD_CONFLICT, WARNING)
    logged = [entry.get("epoch") for entry in entries if entry.get("step") == step]
    logged_epoch = next((one for one in reversed(logged) if isinstance(one, (int, float))), None)
    if logged_epoch is not None and not (isinstance(epoch, (int, float)) and abs(epoch - logged_epoch) <= _SAME_TO):
        what = f"epoch is {epoch!r:.20}, but log_history says {logged_epoch:g} at this step"
        yield Finding(where, what, "a resume counts it again; copy the file again", Code.FIELD_CONFLICT, WARNING)
