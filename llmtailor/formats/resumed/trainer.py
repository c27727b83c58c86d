"""The Trainer's smaller files: what a resume by transformers 5.23 and torch 2.13 reads of them."""

from __future__ import annotations

from llmtailor.core.findings import ERROR
from llmtailor.formats.resumed.kinds import POSITIVE, count, number, optional
from llmtailor.formats.resumed.model import Field, Kind, Says, Table
from llmtailor.formats.resumed.random_states import RNG_FIELDS
from llmtailor.formats.resumed.schedulers import SCHEDULER_TABLE
from llmtailor.formats.resumed.trainer_state import TRAINER_STATE_TABLE

DTYPES = frozenset(
    (
        *("float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "uint8", "int16", "int32", "int64", "auto"),
    )
)
"""What a config may call the dtype of weights"""
_GRADES = "torch.amp.GradScaler.load_state_dict"
_FAILS = Says(ERROR, "a resume fails")
_SKIPS = Says(ERROR, "silent: no step is made any more, or each with other gradients")
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
        ("random numbers of another step", "nothing else on disk tells what they were"),
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
    (("all else", "a resume makes the model as its script says, and reads the config for its version only"),),
)
TABLES = (TRAINER_STATE_TABLE, SCHEDULER_TABLE, RNG_TABLE, SCALER_TABLE, CONFIG_TABLE)
