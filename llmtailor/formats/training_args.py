"""``training_args.bin``: what the run was told. A resume does not read it; it tells which other fields matter.

It pickles a class of transformers, which is never made here: its attributes are read as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.containers.pickle_nodes import Call
from llmtailor.containers.torch_zip import read_attributes
from llmtailor.errors import SourceError

TRAINING_ARGS = "training_args.bin"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What ``training_args.bin`` says; None where it is missing or says nothing."""

    logs_by_steps: bool | None = None
    saves_by_steps: bool | None = None
    evaluates_by_steps: bool | None = None
    scales_loss: bool | None = None
    """Whether it trains in fp16: with a loss scale, and maybe steps that were skipped"""


def read_run_facts(root: Path, where: str) -> RunFacts:
    """Read what the run was told. A file that is missing or damaged tells nothing: no resume needs it."""
    try:
        said = read_attributes(root, TRAINING_ARGS, where)
    except SourceError:
        return RunFacts()
    fp16 = said.get("fp16")
    return RunFacts(
        _by_steps(said, "logging_strategy"),
        _by_steps(said, "save_strategy"),
        _by_steps(said, "eval_strategy"),
        fp16 if isinstance(fp16, bool) else None,
    )


def _by_steps(said: Mapping[str, Any], key: str) -> bool | None:
    """A strategy is an enum: pickled as a call of its class with its value."""
    node = said.get(key)
    value = node.args[0] if isinstance(node, Call) and isinstance(node.args, tuple) and node.args else node
    return value == "steps" if isinstance(value, str) else None
