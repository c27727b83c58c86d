"""What DeepSpeed held after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helpers.states import assert_states
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT
from oracle import zero12
from oracle.any import load
from oracle.zero3 import MOMENTS, Snapshot, assert_same, differ
from trainings.common import DTYPES
from trainings.harness import Run


def assert_module_is_rounded(checkpoint: Path, snapshot: Snapshot, dtype: torch.dtype) -> None:
    """ZeRO-1/2 train on with ``module`` until the first step overwrites it from the masters: they must agree."""
    module = zero12.load_module(checkpoint)
    wanted = {name: master.to(dtype) for name, master in snapshot.kind(MASTER).items()}
    wanted |= snapshot.kind(FROZEN) | {name: copies[0] for name, copies in snapshot.kind(BUFFER).items()}
    wanted |= {alias: wanted[name] for alias, name in snapshot.rest["tied"].items()}
    assert_states(module, wanted)


def assert_loaded(run: Run, wanted: Snapshot, rest: Mapping[str, Any] | None = None) -> None:
    """What DeepSpeed held, and wrote back, between the resume and its first step."""
    rest = rest or wanted.rest
    echo = run.echo
    trained = {name: master.to(DTYPES[run.spec.dtype]) for name, master in wanted.kind(MASTER).items()}
    told = {"weight": trained | wanted.kind(FROZEN), MASTER: wanted.kind(MASTER)}
    if run.spec.stage == 3:
        told |= {moment: wanted.kind(moment) for moment in MOMENTS}
        assert echo["step"] == wanted.steps
    else:
        back = load(run.written_back)
        wanted_back = Snapshot(dict(wanted.states), wanted.steps, wanted.flat_ids, {})
        for state in wanted.states:
            if state.kind == WEIGHT:
                del wanted_back.states[state]
        assert_same(back, wanted_back, rest=False)
        assert_module_is_rounded(run.written_back, back, DTYPES[run.spec.dtype])
        if run.spec.round_robin:  # DeepSpeed itself can't tell which param is where
            told.pop(MASTER)
    for kind, tensors_of in told.items():
        assert_states(echo[kind], tensors_of)
    for name, copies in wanted.kind(BUFFER).items():
        assert not differ(echo["buffer"][name], copies[0]), name
    assert {key: echo[key] for key in ("global_steps", "skipped_steps")} == {
        key: rest["counters"][key] for key in ("global_steps", "skipped_steps")
    }
    assert echo["scheduler"] == (rest["scheduler"] or rest["lr_scheduler"])
    assert echo["groups"] == [{k: v for k, v in group.items() if k != "params"} for group in rest["param_groups"]]
