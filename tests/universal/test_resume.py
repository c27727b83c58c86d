"""DeepSpeed's own loader, unpatched, holds what the source of a universal checkpoint held, bit for bit.

ZeRO-1/2 then repeat the losses of the straight run. ZeRO-3 gives one step tensor to all of its sub-groups, so with
torch's AdamW it counts a step for each of them, also after DeepSpeed's own conversion; with one sub-group the losses
are those of the straight run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle.any  # noqa: E402
from dcp.conftest import Trained, trained  # noqa: E402, F401
from helpers.states import assert_same_held, of_snapshot  # noqa: E402
from oracle.zero3 import MOMENTS  # noqa: E402
from trainings.catalogue import TWO_RANKS, TWO_RANKS_ANY  # noqa: E402
from trainings.harness import train  # noqa: E402
from universal.converting import by_deepspeed, convert  # noqa: E402

STEP = 2
DEEPSPEED = TWO_RANKS | TWO_RANKS_ANY


@dataclass(frozen=True)
class Case:
    """A universal checkpoint, and the run that resumes from it."""

    source: str
    """A run of real/runs.py or dcp/runs.py"""
    stage: int
    ranks: int = 2
    is_own: bool = True
    """Whether llmtailor has made it; otherwise ds_to_universal"""

    def __str__(self) -> str:
        return f"{self.source}-to-{self.stage}-on-{self.ranks}{'' if self.is_own else '-by-deepspeed'}"

    def spec(self, out: Path) -> Any:
        own = DEEPSPEED.get(self.source)
        # with round_robin_gradients DeepSpeed's loader mixes up the params, as a notice says
        changes = {"stage": self.stage, "steps": 4, "save_steps": 4, "round_robin": False}
        spec = replace(own or TWO_RANKS["llama"], **changes)
        batch = (own.per_device_batch if own else 3) if self.ranks == 2 else 2
        return spec.resumed(out, str(self), per_device_batch=batch)


SHORT = [Case("llama", 3), Case("llama", 2), Case("zero1-bf16opt", 1), Case("ddp", 2)]
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


def source_of(case: Case, trained: Trained, runs: Any) -> Path:  # noqa: F811
    return runs[case.source].checkpoint(STEP) if case.source in DEEPSPEED else trained.checkpoint(case.source, STEP)


@pytest.fixture(scope="module")
def resumed(request, trained, runs, tmp_path_factory) -> dict[str, Any]:  # noqa: F811
    """Convert what the tests of this session ask for, and resume from all of it in two sets of ranks."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = dict.fromkeys(item.callspec.params["case"] for item in items)
    folder, found = tmp_path_factory.mktemp("converted"), {}
    specs: dict[int, list[Any]] = {2: [], 3: []}
    for case in cases:
        source, out = source_of(case, trained, runs), folder / str(case) / f"checkpoint-{STEP}"
        if case.is_own:
            dtype = None if case.source in DEEPSPEED else "BF16"
            convert(source, out, dtype, to="universal", world_size=case.ranks)
        else:
            by_deepspeed(source, out)
        specs[case.ranks].append(case.spec(out))
    for ranks, wanted in specs.items():
        if wanted:
            found |= train(wanted, ranks, tmp_path_factory.mktemp("resumed"), program="universal.train")
    return found


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_holds_what_the_source_held(trained, runs, resumed, case):  # noqa: F811
    run = resumed[str(case)]
    if case.source in DEEPSPEED:
        wanted = of_snapshot(oracle.any.load(source_of(case, trained, runs)))
    else:
        wanted = trained[case.source].held[STEP]
    if case.stage < 3:  # DeepSpeed can't be asked before a first step; this is what it saved back
        held = of_snapshot(oracle.any.load(run.written_back))
    else:
        echo = run.echo
        states = {
            name: {"step": torch.tensor(echo["step"][name]), **{moment: echo[moment][name] for moment in MOMENTS}}
            for name in echo["master"]
        }
        held = {"weights": echo["master"], "states": states}
    assert_same_held(held, wanted)
    for name, weight in run.echo["weight"].items():
        if name in wanted["weights"]:
            assert torch.equal(weight, wanted["weights"][name].bfloat16()), name
    decay = [group["weight_decay"] for group in run.echo["groups"]]
    if case.is_own or case.stage < 3:
        assert len(decay) == 1 or 0.0 in decay
    else:  # DeepSpeed gives the options of the first group to all, if they are in the file
        assert set(decay) == {0.1}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on(trained, runs, resumed, case):  # noqa: F811
    losses = resumed[str(case)].losses
    assert losses.keys() == {3, 4}
    if case.source not in DEEPSPEED:
        straight = trained[case.source].losses
        if case.source == "ddp":  # the others see other samples
            assert losses[3] == pytest.approx(straight[3], rel=1e-2)  # fp32 before, bf16 now
        return
    straight = runs[case.source].losses
    if case.ranks == 2:
        assert losses[3] == straight[3]
        is_exact = case.stage < 3 or case.source == "llama-ds-both"
        assert (losses[4] == straight[4]) == is_exact
    elif (theirs := resumed.get(str(replace(case, is_own=False)))) and case.stage < 3:
        assert losses == theirs.losses
    else:
        assert losses[3] == pytest.approx(straight[3], rel=1e-5)
