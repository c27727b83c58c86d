"""DeepSpeed's own loader, unpatched, holds what the source of a universal checkpoint held, bit for bit.

ZeRO-1/2 then repeat the losses of the straight run. ZeRO-3 gives one step tensor to all of its sub-groups, so with
torch's AdamW it counts a step for each of them, also after DeepSpeed's own conversion; with one sub-group the losses
are those of the straight run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from helpers.composing import convert_to_resume
from helpers.states import assert_same_held, held_by, loaded_by
from oracle.deepspeed_tools import to_universal
from trainings.catalogue import DEEPSPEED
from trainings.harness import Run
from trainings.spec import Spec

STEP = 2


@dataclass(frozen=True)
class Case:
    """A universal checkpoint, and the run that resumes from it."""

    source: str
    """A run of trainings/catalogue.py"""
    stage: int
    ranks: int = 2
    is_own: bool = True
    """Whether llmtailor has made it; otherwise ds_to_universal"""

    def __str__(self) -> str:
        return f"{self.source}-to-{self.stage}-on-{self.ranks}{'' if self.is_own else '-by-deepspeed'}"

    def spec(self, out: Path) -> Spec:
        own = DEEPSPEED.get(self.source)
        # with round_robin_gradients DeepSpeed's loader mixes up the params, as a notice says
        changes = {"stage": self.stage, "steps": 4, "save_steps": 4, "round_robin": False, "load_universal": True}
        batch = (own.per_device_batch if own else 3) if self.ranks == 2 else 2
        base = own or DEEPSPEED["llama"]
        return base.resumed(out, str(self), ranks=self.ranks, per_device_batch=batch, **changes)


SHORT = [Case("llama", 3), Case("llama", 2), Case("zero1-bf16opt", 1), Case("no-fsdp", 2)]
LONG = [Case("llama", 3, is_own=False), Case("llama-ds-both", 3), Case("titan", 1)]
LONG += [Case(name, stage) for name in ("llama-frozen", "llama-tied", "gpt-neox", "mixtral") for stage in (1, 2, 3)]
LONG += [
    case
    for name in ("zero1", "zero2", "zero3", "zero2-aligned", "zero2-tied", "zero2-rr", "zero1-bf16opt", "zero2-layer")
    for stage in (1, 2, 3)
    for ranks in (2, 3)
    if (case := Case(name, stage, ranks)) not in SHORT
]
LONG += [Case(f"zero{stage}", stage, ranks, is_own=False) for stage in (1, 2, 3) for ranks in (2, 3)]
CASES = [*(pytest.param(case, id=str(case)) for case in SHORT)]
CASES += [pytest.param(case, id=str(case), marks=pytest.mark.long) for case in LONG]


@pytest.fixture(scope="module")
def resumed(runs, train, selected, tmp_path_factory) -> dict[str, Run]:
    """Convert what the tests of this session ask for, and resume from all of it."""
    folder, specs = tmp_path_factory.mktemp("converted"), []
    for case in (case for case in (*SHORT, *LONG) if case in selected):
        source, out = runs.checkpoint(case.source, STEP), folder / str(case) / f"checkpoint-{STEP}"
        if case.is_own:
            dtype = None if case.source in DEEPSPEED else "BF16"
            convert_to_resume(source, out, dtype=dtype, to="universal", world_size=case.ranks)
        else:
            to_universal(source, out)
        specs.append(case.spec(out))
    return train(specs)


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_holds_what_the_source_held(runs, resumed, case):
    run, wanted = resumed[str(case)], held_by(runs[case.source], STEP)
    assert_same_held(loaded_by(run, STEP), wanted)
    for name, weight in run.echo["weight"].items():
        if name in wanted["weights"]:
            assert torch.equal(weight, wanted["weights"][name].bfloat16()), name
    decay = [group["weight_decay"] for group in run.echo["groups"]]
    if case.is_own or case.stage < 3:
        assert len(decay) == 1 or 0.0 in decay
    else:  # DeepSpeed gives the options of the first group to all, if they are in the file
        assert set(decay) == {0.1}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on(runs, resumed, case):
    losses = resumed[str(case)].losses
    assert losses.keys() == {3, 4}
    straight = runs[case.source].losses
    if case.source not in DEEPSPEED:
        if case.source == "no-fsdp":  # the others see other samples
            assert losses[3] == pytest.approx(straight[3], rel=1e-2)  # fp32 before, bf16 now
    elif case.ranks == 2:
        assert losses[3] == straight[3]
        is_exact = case.stage < 3 or case.source == "llama-ds-both"
        assert (losses[4] == straight[4]) == is_exact
    elif (theirs := resumed.get(str(replace(case, is_own=False)))) and case.stage < 3:
        assert losses == theirs.losses
    else:
        assert losses[3] == pytest.approx(straight[3], rel=1e-5)
