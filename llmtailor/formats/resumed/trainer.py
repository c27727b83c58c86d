"""What a resume reads of the Trainer's small files and of random states (transformers 5.23, torch 2.13)."""

from __future__ import annotations

import math
from typing import Any

from llmtailor.containers.pickle_nodes import Call, as_tensor
from llmtailor.findings import ERROR, WARNING
from llmtailor.formats.resumed.optimizers import SCHEDULER_TABLE
from llmtailor.formats.resumed.tables import (
    ANYTHING,
    BEYOND,
    DICT,
    EACH,
    FINITE,
    MISSING,
    MISTYPED,
    NAN,
    POSITIVE,
    Field,
    Kind,
    Says,
    Table,
    count,
    is_number,
    number,
    optional,
)

TWISTER_WORDS = 624
TORCH_STATE_BYTES = 5056
"""What the generator of torch's CPU takes, neither more nor less"""
_NUMPY_NAME = "MT19937"


def is_python_state(value: Any) -> bool:
    """Whether ``random.setstate`` takes this: version, 624 words and a position, and what ``gauss`` has in store."""
    if not isinstance(value, (tuple, list)) or len(value) != 3 or value[0] not in (2, 3):
        return False
    words = value[1]
    return (
        isinstance(words, tuple)
        and len(words) == TWISTER_WORDS + 1
        and all(isinstance(word, int) for word in words)
        and (value[2] is None or isinstance(value[2], float))
    )


def _python_in_range(value: Any) -> bool:
    *words, position = value[1]
    return all(0 <= word < 1 << 32 for word in words) and any(words) and 0 <= position <= TWISTER_WORDS


def is_numpy_state(value: Any) -> bool:
    """Whether ``numpy.random.set_state`` takes this, and ``torch.load`` without unsafe globals."""
    if isinstance(value, dict):
        inner = value.get("state")
        if not isinstance(inner, dict):
            return False
        value = (value.get("bit_generator"), inner.get("key"), inner.get("pos"))
    if not isinstance(value, (tuple, list)) or len(value) not in (3, 5) or value[0] != _NUMPY_NAME:
        return False
    has_gauss, gauss = value[3:] or (0, 0.0)
    return (
        _numpy_words(value[1]) is not None
        and type(value[2]) is int
        and isinstance(has_gauss, int)
        and isinstance(gauss, (int, float))
    )


def _numpy_in_range(value: Any) -> bool:
    key, position = (value["state"]["key"], value["state"]["pos"]) if isinstance(value, dict) else value[1:3]
    words = _numpy_words(key)
    return bool(words) and 0 <= position <= TWISTER_WORDS


def _numpy_words(node: Any) -> bool | None:
    """Whether any of the 624 words of an array is set; None for what is no such array."""
    if isinstance(node, (list, tuple)):
        fits = len(node) == TWISTER_WORDS and all(type(word) is int and 0 <= word < 1 << 32 for word in node)
        return any(node) if fits else None
    if not isinstance(node, Call) or getattr(node.func, "name", "") != "_reconstruct":
        return None
    state = node.state
    if not isinstance(state, tuple) or len(state) != 5 or state[1] != (TWISTER_WORDS,):
        return None
    dtype, data = state[2], state[4]
    named = dtype.args[0] if isinstance(dtype, Call) and isinstance(dtype.args, tuple) and dtype.args else None
    return any(data) if named == "u4" and isinstance(data, bytes) and len(data) == 4 * TWISTER_WORDS else None


def is_torch_state(value: Any) -> bool:
    """Whether this is a tensor that torch's CPU generator takes; what it holds, `formats.trainer_checks` looks at."""
    view = as_tensor(value)
    fits = view is not None and view.storage.dtype == "U8" and view.numel == TORCH_STATE_BYTES
    return fits and view is not None and view.is_contiguous


def is_cuda_state(value: Any) -> bool:
    """Whether this is the state of one GPU, or those of several."""
    states = value if isinstance(value, (list, tuple)) else [value]
    views = [as_tensor(state) for state in states]
    return bool(views) and all(view is not None and view.storage.dtype == "U8" for view in views)


_WORDS = tuple(range(1, TWISTER_WORDS + 1))
PYTHON = Kind(
    "state of Python's generator",
    is_python_state,
    _python_in_range,
    (None, "x", (), {}, (3, [*_WORDS, 624], None), (4, (*_WORDS, 624), None), (3, _WORDS, None), (3, (*_WORDS, 624))),
    ((3, (*_WORDS, 625), None), (3, (-1, *_WORDS), None), (3, (*([0] * 624), 624), None)),
)
NUMPY = Kind(
    "state of numpy's generator",
    is_numpy_state,
    _numpy_in_range,
    (
        *(None, "x", [], {}),
        *(("PCG64", [*_WORDS], 624, 0, 0.0), (_NUMPY_NAME, [*_WORDS][:-1], 624, 0, 0.0)),
        *((_NUMPY_NAME, [*_WORDS], "x", 0, 0.0), (_NUMPY_NAME, [*_WORDS], 624, 0), (_NUMPY_NAME, [*_WORDS])),
    ),
    ((_NUMPY_NAME, [*_WORDS], 625, 0, 0.0), (_NUMPY_NAME, [0] * TWISTER_WORDS, 624, 0, 0.0)),
)
TORCH = Kind("byte tensor of torch's generator", is_torch_state, lambda value: True, (None, [], b"x", math.pi))
CUDA = Kind("byte tensor of a GPU's generator, or a list of them", is_cuda_state, lambda value: True, ("x", []))
_LOADS = "Trainer._load_rng_state"
_FAILS = Says(ERROR, "a resume fails")
_UNDEFINED = Says(ERROR, "undefined: a resume fails, reads beyond the end, or draws the same number forever")

RNG_FIELDS = (
    Field(("python",), PYTHON, _LOADS, _FAILS, _FAILS, _UNDEFINED),
    Field(("numpy",), NUMPY, _LOADS, _FAILS, _FAILS, _UNDEFINED),
    Field(("cpu",), TORCH, _LOADS, _FAILS, _FAILS),
    Field(
        ("cuda",),
        CUDA,
        "set_rng_state_for_device",
        None,
        Says(WARNING, "a resume on a GPU logs an error, and draws other random numbers", read=True),
        only="runs on GPUs",
    ),
)


_ALL_WAYS = frozenset((MISSING, MISTYPED, BEYOND))
_BEGINS = "TrainerState.load_from_json"
_FLOW = "DefaultFlowCallback.on_step_end"
_LOST = Says(WARNING, "a resume works; what the file said is lost")
_OVERWRITTEN = "reset from the run's arguments before anything reads them"


INTERVAL = number("number other than 0", lambda value: value != 0, (0,))
FROM_ZERO = number("number from 0 up", lambda value: value >= 0, (-1.0,))
NOT_NAN = Kind("number", is_number, lambda value: not math.isnan(value), ("x", [1.0]), (NAN,))
FOLDER = Kind("path", lambda value: isinstance(value, (str, bool, int)), lambda value: True, ([], {}))
LOG = Kind(
    "list of entries",
    lambda value: value is None or isinstance(value, list),
    lambda value: value is not None and all(isinstance(entry, dict) for entry in value),
    ({}, "x", 3),
    (None, [1]),
)
YES_OR_NO = Kind("true or false", lambda value: isinstance(value, bool), lambda value: True, ("x", None))
STATES = Kind("object or list of them", lambda value: isinstance(value, (dict, list)), lambda value: True, (None, "x"))

TRAINER_STATE_TABLE = Table(
    "trainer_state.json",
    "trainer_state.json",
    (
        Field(
            ("global_step",),
            count(),
            "Trainer._init_training_state",
            Says(ERROR, "silent: it starts at step 0"),
            Says(ERROR, "a resume fails, or starts at another step"),
            Says(ERROR, "silent: it starts at another step, or is already at its end"),
            told_by_reader=_ALL_WAYS,
        ),
        Field(
            ("train_batch_size",),
            number("number", lambda value: True, ()),
            "compare_trainer_and_checkpoint_args",
            Says(ERROR, "a resume fails: it divides the value"),
            Says(ERROR, "a resume fails: it divides the value"),
        ),
        Field(
            ("logging_steps",),
            INTERVAL,
            _FLOW,
            Says(WARNING, "a resume logs every 500 steps, not as often as the run did"),
            Says(ERROR, "a resume fails at the end of the first step"),
            Says(ERROR, "a resume fails at the end of the first step, or never logs"),
            only="logging_strategy steps",
        ),
        Field(
            ("save_steps",),
            FINITE,
            _FLOW,
            Says(WARNING, "a resume saves every 500 steps, not as often as the run did"),
            Says(ERROR, "a resume fails at the end of the first step"),
            Says(ERROR, "silent: a resume never saves"),
            only="save_strategy steps",
        ),
        Field(
            ("eval_steps",),
            INTERVAL,
            _FLOW,
            None,
            Says(ERROR, "a resume fails at the end of the first step, if it evaluates by steps"),
            Says(ERROR, "a resume fails at the end of the first step, if it evaluates by steps"),
            only="eval_strategy steps",
        ),
        Field(
            ("log_history",),
            LOG,
            "Trainer.log",
            Says(WARNING, "a resume works; the log of the run so far is lost"),
            Says(ERROR, "a resume fails when it first logs"),
            Says(WARNING, "a resume works; the log of the run so far is lost, or can't be read"),
        ),
        Field(
            ("total_flos",),
            FROM_ZERO,
            "Trainer.store_flos",
            _LOST,
            Says(ERROR, "a resume fails when it first saves or logs"),
            _LOST,
        ),
        Field(("num_input_tokens_seen",), count(), "Trainer.log", None, _LOST, _LOST),
        Field(
            ("best_metric",),
            optional(NOT_NAN),
            "Trainer._determine_best_metric",
            None,
            Says(WARNING, "a resume fails at the first evaluation, if it looks for the best model"),
            Says(WARNING, "no evaluation after a resume ever counts as the best"),
        ),
        Field(("best_global_step",), optional(count()), "Trainer._save_checkpoint", None, _LOST, _LOST),
        Field(
            ("best_model_checkpoint",),
            optional(FOLDER),
            "Trainer._init_training_state",
            None,
            Says(ERROR, "a resume fails: it looks for such a folder"),
        ),
        Field(("is_hyper_param_search",), YES_OR_NO, "integrations for logging", None, _LOST),
        Field(
            ("stateful_callbacks",),
            DICT,
            "Trainer._save_checkpoint",
            Says(ERROR, "a resume fails when it first saves"),
            Says(ERROR, "a resume fails at once, or when it first saves"),
        ),
        Field(
            ("stateful_callbacks", "TrainerControl"),
            ANYTHING,
            "Trainer._save_checkpoint",
            Says(ERROR, "a resume fails when it first saves"),
        ),
        Field(
            ("stateful_callbacks", EACH),
            STATES,
            "Trainer._load_callback_state",
            None,
            Says(WARNING, "a resume fails, if it restores the states of callbacks"),
        ),
    ),
    (
        ("max_steps, num_train_epochs, is_local_process_zero, is_world_process_zero, trial_params", _OVERWRITTEN),
        ("epoch", "reset at the end of the first step; compared with log_history only"),
        ("trial_name", "only logged"),
        ("best_model_checkpoint", "a path on the run's machine; one that does not exist is ignored, with a warning"),
        ("a key that is there twice", "the last one counts, here as there"),
    ),
)
"""`formats.trainer_checks` checks whether the Trainer knows the keys, and what the log says of step and epoch"""


DTYPES = frozenset(
    (
        *("float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "uint8", "int16", "int32", "int64", "auto"),
    )
)
"""What a config may call the dtype of weights"""
_GRADES = "torch.amp.GradScaler.load_state_dict"
_SKIPS = Says(ERROR, "silent: no more steps are made, or each with wrong gradients")
SCALER_TABLE = Table(
    "scaler.pt (fp16 without DeepSpeed)",
    "scaler.pt",
    (
        Field(("scale",), POSITIVE, _GRADES, _FAILS, _FAILS, _SKIPS),
        Field(
            ("growth_factor",),
            number("number above 1", lambda value: value > 1, (1.0, 0.5, -1.0)),
            _GRADES,
            *(_FAILS, Says(ERROR, "a resume fails after a while"), _SKIPS),
        ),
        Field(
            ("backoff_factor",),
            number("number between 0 and 1", lambda value: 0 < value < 1, (0.0, 1.0, -1.0)),
            _GRADES,
            *(_FAILS, Says(ERROR, "a resume fails after a while"), _SKIPS),
        ),
        Field(
            ("growth_interval",),
            count(least=1),
            _GRADES,
            *(_FAILS, Says(ERROR, "a resume fails after a while"), _SKIPS),
        ),
        Field(("_growth_tracker",), count(), _GRADES, _FAILS, _FAILS, _SKIPS),
    ),
)
RNG_TABLE = Table(
    "rng_state.pth, rng_state_N.pth",
    "rng_state.pth",
    RNG_FIELDS,
    (
        ("random numbers of another step", "nothing else on disk says what they were"),
        ("xla, npu, hpu, mlu, musa", "read on these machines only"),
    ),
)

_CONFIG = "PreTrainedConfig.from_json_file"
_LABELS = Kind("object or null", lambda value: value is None or isinstance(value, dict), lambda value: True, ("x", 3))
CONFIG_TABLE = Table(
    "config.json (without DeepSpeed)",
    "config.json",
    (
        Field(("id2label",), _LABELS, _CONFIG, None, _FAILS),
        Field(("rope_scaling",), _LABELS, _CONFIG, None, _FAILS),
        Field(("rope_parameters",), _LABELS, _CONFIG, None, _FAILS),
        Field(("num_labels",), optional(count()), _CONFIG, None, Says(ERROR, "a resume fails"), None),
        Field(
            ("layer_types",),
            Kind(
                "list of names or null",
                lambda value: value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
                lambda value: True,
                (3, [1]),
            ),
            _CONFIG,
            None,
            _FAILS,
        ),
        Field(
            ("dtype",),
            Kind(
                "dtype of torch or null",
                lambda value: True,
                lambda value: not isinstance(value, str) or value.removeprefix("torch.") in DTYPES,
                (),
                ("foo",),
            ),
            _CONFIG,
            None,
            None,
            _FAILS,
        ),
    ),
    (("all else", "the run's script builds the model; a resume reads only the version from the config"),),
)
TABLES = (TRAINER_STATE_TABLE, SCHEDULER_TABLE, RNG_TABLE, SCALER_TABLE, CONFIG_TABLE)
