"""Whether a resume accepts the Trainer's small files: random states, loss scale, trainer state.

``training_args.bin`` says which of their fields matter. It pickles a class of transformers, which is never created
here: its attributes are read as data. The Trainer reads its own files with ``torch.load(weights_only=True)``, which
refuses some names that the reader here accepts.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.json import is_count
from llmtailor.containers.pickle_nodes import Call, Global, children
from llmtailor.containers.torch_zip import read_attributes
from llmtailor.errors import COPY_FILE, SourceError, damaged, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.field_tables import (
    ANYTHING,
    DICT,
    FAILS,
    FAILS_AT_END,
    FINITE,
    FROM_ZERO,
    NAN,
    POSITIVE,
    WAYS,
    Kind,
    Table,
    check_fields,
    count,
    field,
    is_a,
    is_number,
    number,
    optional,
    warns,
)

TRAINING_ARGS = "training_args.bin"


_BY_STEPS = {"logging_strategy": "logging_steps", "save_strategy": "save_steps", "eval_strategy": "eval_steps"}
"""Arguments, and the fields of the state that matter only if the argument is ``steps``"""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The content of ``training_args.bin``."""

    unread: frozenset[str] = frozenset()
    """Fields of the state that the run does not read, as far as is known"""
    scales_loss: bool | None = None
    """Whether it trains in fp16: with a loss scale, and maybe with skipped steps; None if unknown"""


def read_run_facts(root: Path, where: str) -> RunFacts:
    """Return the run's arguments. A missing or damaged file gives none: no resume needs it."""
    try:
        args = read_attributes(root, TRAINING_ARGS, where)
    except SourceError:
        return RunFacts()
    strategies = {name: _value(args.get(argument)) for argument, name in _BY_STEPS.items()}
    unread = (name for name, value in strategies.items() if isinstance(value, str) and value.lower() != "steps")
    fp16 = args.get("fp16")
    return RunFacts(frozenset(unread), fp16 if isinstance(fp16, bool) else None)


def _value(node: Any) -> Any:
    """Return an enum's value, or its name: ``Class(value)`` or ``getattr(Class, name)``."""
    return node.args[-1] if isinstance(node, Call) and isinstance(node.args, tuple) and node.args else node


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


_GRADES, _LATER = "torch.amp.GradScaler.load_state_dict", "a resume fails after a while"
_SKIPS = "silent: no more steps are made, or each with wrong gradients"
_GROWTH = number("number above 1", lambda value: value > 1, (1.0, 0.5, -1.0))
_BACKOFF = number("number between 0 and 1", lambda value: 0 < value < 1, (0.0, 1.0, -1.0))
SCALER_TABLE = Table(
    "scaler.pt (fp16 without DeepSpeed)",
    "scaler.pt",
    (
        field("scale", POSITIVE, _GRADES, FAILS, FAILS, _SKIPS),
        field("growth_factor", _GROWTH, _GRADES, FAILS, _LATER, _SKIPS),
        field("backoff_factor", _BACKOFF, _GRADES, FAILS, _LATER, _SKIPS),
        field("growth_interval", count(least=1), _GRADES, FAILS, _LATER, _SKIPS),
        field("_growth_tracker", count(), _GRADES, FAILS, FAILS, _SKIPS),
    ),
)


def check_scaler(tree: Any, facts: RunFacts, where: str) -> Iterator[Finding]:
    """Yield findings on a loss scale that a resume rejects, or that makes it skip every step."""
    yield from check_file(tree, SCALER_TABLE, "a loss scale", where)
    if facts.scales_loss is False:
        what = "the run trained without a loss scale, and can't load one"
        yield Finding(where, what, "a resume fails; move the file out of the folder", Code.FIELD_UNKNOWN, ERROR)


INTERVAL = number("number other than 0", lambda value: value != 0, (0,))
NOT_NAN = Kind("number", is_number, ("x", [1.0]), lambda value: not math.isnan(value), (NAN,))
FOLDER = Kind("path", is_a(str, bool, int), ([], {}))
LOG = Kind(
    "list of entries",
    is_a(list, type(None)),
    ({}, "x", 3),
    lambda value: value is not None and all(isinstance(entry, dict) for entry in value),
    (None, [1]),
)
YES_OR_NO = Kind("true or false", is_a(bool), ("x", None))
STATES = Kind("object or list of them", is_a(dict, list), (None, "x"))
_INIT, _SAVE, _FLOW = "Trainer._init_training_state", "Trainer._save_checkpoint", "DefaultFlowCallback.on_step_end"
_LOST = warns("a resume works; what the file said is lost")
_DIVIDES = "a resume fails: it divides the value"
_EVALUATES = "a resume fails at the end of the first step, if it evaluates by steps"
_WHEN_SAVED = "a resume fails when it first saves"

TRAINER_STATE_TABLE = Table(
    "trainer_state.json",
    "trainer_state.json",
    (
        field(
            *("global_step", count(), _INIT),
            *("silent: it starts at step 0", "a resume fails, or starts at another step"),
            "silent: it starts at another step, or is already at its end",
            told_by_reader=WAYS[:3],
        ),
        field("train_batch_size", number("number"), "compare_trainer_and_checkpoint_args", _DIVIDES, _DIVIDES),
        field(
            *("logging_steps", INTERVAL, _FLOW),
            warns("a resume logs every 500 steps, not as often as the run did"),
            *(FAILS_AT_END, "a resume fails at the end of the first step, or never logs"),
            only="logging_strategy steps",
        ),
        field(
            *("save_steps", FINITE, _FLOW),
            warns("a resume saves every 500 steps, not as often as the run did"),
            *(FAILS_AT_END, "silent: a resume never saves"),
            only="save_strategy steps",
        ),
        field("eval_steps", INTERVAL, _FLOW, "", _EVALUATES, _EVALUATES, only="eval_strategy steps"),
        field(
            *("log_history", LOG, "Trainer.log"),
            warns("a resume works; the log of the run so far is lost"),
            "a resume fails when it first logs",
            warns("a resume works; the log of the run so far is lost, or can't be read"),
        ),
        field(
            "total_flos", FROM_ZERO, "Trainer.store_flos", _LOST, "a resume fails when it first saves or logs", _LOST
        ),
        field("num_input_tokens_seen", count(), "Trainer.log", "", _LOST, _LOST),
        field(
            *("best_metric", optional(NOT_NAN), "Trainer._determine_best_metric", ""),
            warns("a resume fails at the first evaluation, if it looks for the best model"),
            warns("no evaluation after a resume ever counts as the best"),
        ),
        field("best_global_step", optional(count()), _SAVE, "", _LOST, _LOST),
        field("best_model_checkpoint", optional(FOLDER), _INIT, "", "a resume fails: it looks for such a folder"),
        field("is_hyper_param_search", YES_OR_NO, "integrations for logging", "", _LOST),
        field("stateful_callbacks", DICT, _SAVE, _WHEN_SAVED, "a resume fails at once, or when it first saves"),
        field("stateful_callbacks.TrainerControl", ANYTHING, _SAVE, _WHEN_SAVED),
        field(
            *("stateful_callbacks.*", STATES, "Trainer._load_callback_state", ""),
            warns("a resume fails, if it restores the states of callbacks"),
        ),
    ),
    (
        (
            "max_steps, num_train_epochs, is_local_process_zero, is_world_process_zero, trial_params",
            "reset from the run's arguments before anything reads them",
        ),
        ("epoch", "reset at the end of the first step; compared with log_history only"),
        ("trial_name", "only logged"),
        ("best_model_checkpoint", "a path on the run's machine; one that does not exist is ignored, with a warning"),
        ("a key that is there twice", "the last one counts, here as there"),
    ),
)
"""Beside it, what follows checks whether the Trainer knows the keys, and what the log says of step and epoch"""
_DTYPES = frozenset(
    (
        *("float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "uint8", "int16", "int32", "int64", "auto"),
    )
)
"""What a config may call the dtype of weights"""
_CONFIG = "PreTrainedConfig.from_json_file"
_LABELS = Kind("object or null", is_a(dict, type(None)), ("x", 3))
_NAMES = Kind(
    "list of names or null",
    lambda value: value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
    (3, [1]),
)
_DTYPE = Kind(
    "dtype of torch or null",
    *(lambda value: True, ()),
    lambda value: not isinstance(value, str) or value.removeprefix("torch.") in _DTYPES,
    ("foo",),
)
CONFIG_TABLE = Table(
    "config.json (without DeepSpeed)",
    "config.json",
    (
        *(field(key, _LABELS, _CONFIG, "", FAILS) for key in ("id2label", "rope_scaling", "rope_parameters")),
        field("num_labels", optional(count()), _CONFIG, "", FAILS),
        field("layer_types", _NAMES, _CONFIG, "", FAILS),
        field("dtype", _DTYPE, _CONFIG, "", "", FAILS),
    ),
    (("all else", "the run's script builds the model; a resume reads only the version from the config"),),
)


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
LAGS = "llmtailor-optimizer"
"""The callback whose ``step_lags`` a composite states, see `read_lags`"""
_SAME_TO = 0.011
"""Versions before 4.53 rounded the logged epochs to hundredths"""


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


def check_trainer_state(content: Mapping[str, Any], facts: RunFacts, where: str) -> Iterator[Finding]:
    """Yield findings on fields that a resume rejects or loses. ``facts`` say what the run reads of them."""
    if not is_trainers(content):
        return
    yield from _unknown(content, where)
    read = tuple(one for one in TRAINER_STATE_TABLE.fields if one.path[0] not in facts.unread)
    yield from check_fields(content, replace(TRAINER_STATE_TABLE, fields=read), where)
    yield from _log(content, where)


def _unknown(content: Mapping[str, Any], where: str) -> Iterator[Finding]:
    installed = installed_keys()
    unknown = sorted(content.keys() - (KEYS if installed is None else installed))
    if unknown and installed is None:
        what = f"it has {some(unknown)}, which transformers {KEYS_OF} does not know"
        fix = "a resume fails unless the transformers there knows it; copy the file again"
        yield Finding(where, what, fix, Code.FIELD_UNKNOWN, WARNING)
    elif unknown and installed is not None:
        what = f"it has {some(unknown)}, which the transformers installed here ({_installed_version()}) does not know"
        fix = "a resume fails; remove what was added, or resume with the transformers that saved it"
        yield Finding(where, what, fix, Code.FIELD_UNKNOWN, ERROR)


@lru_cache(maxsize=1)
def installed_keys() -> frozenset[str] | None:
    """Return the fields of the TrainerState of the transformers that is installed, from its source.

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
        return frozenset(fields) if "global_step" in fields else None
    except (OSError, ValueError, SyntaxError):
        return None


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # it imports the whole of email

    try:
        return version("transformers")
    except PackageNotFoundError:
        return "no version stated"


def _log(content: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield findings from a comparison with the log, whose entries were added step by step."""
    step, epoch, log = content.get("global_step"), content.get("epoch"), content.get("log_history")
    entries = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    steps = [entry["step"] for entry in entries if type(entry.get("step")) is int]
    if type(step) is not int:
        return
    if steps and max(steps) > step:
        what = f"global_step is {step}, but log_history continues to step {max(steps)}"
        yield Finding(where, what, f"a resume follows the former; {COPY_FILE}", Code.FIELD_CONFLICT, ERROR)
    best = content.get("best_global_step")
    if type(best) is int and best > step:
        what = f"global_step is {step}, but best_global_step is {best}"
        yield Finding(where, what, f"a resume follows the former; {COPY_FILE}", Code.FIELD_CONFLICT, WARNING)
    logged = [entry.get("epoch") for entry in entries if entry.get("step") == step]
    logged_epoch = next((one for one in reversed(logged) if isinstance(one, (int, float))), None)
    if logged_epoch is not None and not (isinstance(epoch, (int, float)) and abs(epoch - logged_epoch) <= _SAME_TO):
        what = f"epoch is {epoch!r:.20}, but log_history says {logged_epoch:g} at this step"
        yield Finding(where, what, "a resume counts it again; copy the file again", Code.FIELD_CONFLICT, WARNING)
