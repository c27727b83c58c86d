"""``trainer_state.json``: what a resume by transformers 5.23 reads of it."""

from __future__ import annotations

import math

from llmtailor.core.findings import ERROR, WARNING
from llmtailor.formats.resumed.kinds import ANYTHING, DICT, FINITE, NAN, count, is_number, number, optional
from llmtailor.formats.resumed.model import BEYOND, EACH, MISSING, MISTYPED, Field, Kind, Says, Table

_ALL_WAYS = frozenset((MISSING, MISTYPED, BEYOND))
_BEGINS = "TrainerState.load_from_json"
_FLOW = "DefaultFlowCallback.on_step_end"
_LOST = Says(WARNING, "a resume works; what the file said is lost")
_OVERWRITTEN = "set anew from the run's arguments before anything reads it"


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
            Says(ERROR, "silent: it begins at step 0"),
            Says(ERROR, "a resume fails, or begins at another step"),
            Says(ERROR, "silent: it begins at another step, or is at its end"),
            told_by_reader=_ALL_WAYS,
        ),
        Field(
            ("train_batch_size",),
            number("number", lambda value: True, ()),
            "compare_trainer_and_checkpoint_args",
            Says(ERROR, "a resume fails: it divides it"),
            Says(ERROR, "a resume fails: it divides it"),
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
            Says(ERROR, "a resume fails when it logs first"),
            Says(WARNING, "a resume works; the log of the run so far is lost, or can't be read"),
        ),
        Field(
            ("total_flos",),
            FROM_ZERO,
            "Trainer.store_flos",
            _LOST,
            Says(ERROR, "a resume fails when it saves or logs first"),
            _LOST,
        ),
        Field(("num_input_tokens_seen",), count(), "Trainer.log", None, _LOST, _LOST),
        Field(
            ("best_metric",),
            optional(NOT_NAN),
            "Trainer._determine_best_metric",
            None,
            Says(WARNING, "a resume fails at the first evaluation, if it looks for the best model"),
            Says(WARNING, "no evaluation after a resume is ever the best"),
        ),
        Field(("best_global_step",), optional(count()), "Trainer._save_checkpoint", None, _LOST, _LOST),
        Field(
            ("best_model_checkpoint",),
            optional(FOLDER),
            "Trainer._init_training_state",
            None,
            Says(ERROR, "a resume fails: it looks whether there is such a folder"),
        ),
        Field(("is_hyper_param_search",), YES_OR_NO, "integrations for logging", None, _LOST),
        Field(
            ("stateful_callbacks",),
            DICT,
            "Trainer._save_checkpoint",
            Says(ERROR, "a resume fails when it saves first"),
            Says(ERROR, "a resume fails, or does so when it saves first"),
        ),
        Field(
            ("stateful_callbacks", "TrainerControl"),
            ANYTHING,
            "Trainer._save_checkpoint",
            Says(ERROR, "a resume fails when it saves first"),
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
        ("epoch", "set anew at the end of the first step; compared with log_history only"),
        ("trial_name", "only logged"),
        ("best_model_checkpoint", "a path where the run was; one that leads nowhere is ignored, with a warning"),
        ("a key that is there twice", "the last one counts, here as there"),
    ),
)
"""Whether the keys are known to the Trainer, `formats.trainer_state` checks, and what the log says of step and epoch"""
