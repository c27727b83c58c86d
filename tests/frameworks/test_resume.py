"""The client's own loader, unpatched, resumes from what llmtailor writes for it, and training goes on.

From a copy the losses are those of the straight run, to the last digit; on other ranks the same batch is summed up in
another order. accelerate's loops draw their data from the random states, so they compare on the same ranks only.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cases import mostly_long
from helpers.checkpoints import copy_of_partial
from helpers.composing import convert
from helpers.files import names
from llmtailor.findings import WARNING
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from thin.scene import call, compose
from trainings.catalogue import LOOPS, LOOPS_SAVED
from trainings.harness import Run, Runs, Train
from trainings.spec import Loop

pytestmark = pytest.mark.real
STEP = 2
RELATIVE = 2e-4
"""Of the loss in bf16, summed up in another order"""


@dataclass(frozen=True)
class Case:
    """A conversion, and the run that resumes from it."""

    source: str
    ranks: int = 2
    stage: int | None = None
    """Of the output; None keeps the source's"""
    lost: str = ""
    """A file that is removed from it"""

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"-stage-{self.stage}"
        return f"{self.source}-to-{self.ranks}{stage}{self.lost and f'-without-{self.lost}'}"

    @property
    def is_exact(self) -> bool:
        return self.ranks == 2 and self.stage is None and self.lost in ("", "latest")

    def spec(self, out: Path) -> Loop:
        changes: dict[str, Any] = {"ranks": self.ranks, "per_device_batch": 6 // self.ranks}
        if self.stage is not None:
            changes |= {"stage": self.stage}
        return LOOPS[self.source].resumed(out, str(self), **changes)


SHORT = [
    *(Case(name) for name in ("engine-2", "engine-3", "accelerate-2", "accelerate-ddp", "accelerate-fsdp")),
    Case("engine-3", 2, 2),
    Case("accelerate-2", 2, 0),
]
LOST = [Case("accelerate-3", lost="latest"), Case("accelerate-ddp", lost="random_states_0.pkl")]
LONG = [case for name in LOOPS for ranks in (1, 2, 3) if (case := Case(name, ranks)) not in SHORT]
LONG.append(Case("accelerate-2", 2, 3))


def salvaged_tags(runs: Runs, run: Path) -> Path:
    """A folder of tags whose newest one has lost a rank's file, and a composite in its place."""
    for step in (2, 4):
        shutil.copytree(runs.checkpoint("engine-3", step), run, dirs_exist_ok=True)
    (run / "global_step4" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    call("salvage", run, "--replace")
    return run


def unclipped(runs: Runs, out: Path) -> Loop:
    """A resume from a copy that says that gradients are not clipped, which its config leaves to DeepSpeed."""
    case = Case("engine-3", 2, 2)
    convert(runs.checkpoint(case.source), out, stage=case.stage)
    for path in out.glob("*/*_optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        tree["optimizer_state_dict"]["clip_grad"] = 0.0
        torch.save(tree, path)
    return replace(case.spec(out), name="unclipped")


@pytest.fixture(scope="module")
def resumed(runs: Runs, train: Train, selected: set[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Convert what the tests of this session ask for, and resume from it."""
    folder = tmp_path_factory.mktemp("converted")
    specs = []
    for case in [*(case for case in (*SHORT, *LONG) if case in selected), *LOST]:
        out = folder / str(case) / f"checkpoint-{STEP}"
        convert(runs.checkpoint(case.source), out, world_size=case.ranks, stage=case.stage)
        if case.lost:
            (out / case.lost).unlink()
        specs.append(case.spec(out))
    for name, spec in ((name, spec) for name, spec in LOOPS_SAVED.items() if name in selected):
        run = copy_of_partial(runs[name].folder, folder / name / "run")
        out = compose(run, STEP, folder / name / f"checkpoint-{STEP}")
        specs.append(spec.resumed(out, name, saver=""))
    specs.append(unclipped(runs, folder / "unclipped" / f"checkpoint-{STEP}"))
    run = salvaged_tags(runs, folder / "tags")
    for name, place in (("by-latest", run), ("by-name", run / "checkpoint-4")):
        specs.append(LOOPS["engine-3"].resumed(place, name, steps=5, save_steps=5))
    return train(specs)


@pytest.mark.parametrize("case", mostly_long([*SHORT, *LONG], *SHORT), ids=str)
def test_training_goes_on(case: Case, runs: Runs, resumed: dict[str, Run]) -> None:
    run = resumed[str(case)]
    wanted = runs[case.source].after(STEP)
    assert run.losses.keys() == wanted.keys()
    if case.is_exact:
        assert run.losses == wanted
    elif case.source.startswith("engine") or case.ranks == 2:
        assert run.losses == pytest.approx(wanted, rel=RELATIVE)
    saved = verify_checkpoint(run.checkpoint(4), deep=True)  # what the client has saved back
    assert saved.level == RESUMABLE and not saved.findings
    assert saved.index is not None and saved.index.framework == LOOPS[case.source].client
    # the output has the files that the client would have saved on that many ranks
    out = Path(run.spec.resume_from)
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.level == RESUMABLE and not verdict.findings
    own = {path.replace("global_step4", "global_step2") for path in names(run.checkpoint(4))}
    assert {path for path in names(out) ^ own if not path.startswith("zero_to_")} == {
        "README.md",
        "llmtailor.json",
    }
    source, index = index_checkpoint(runs.checkpoint(case.source)), index_checkpoint(out)
    assert (index.framework, index.world_size, index.global_step) == (source.framework, case.ranks, STEP)


@pytest.mark.parametrize("name", LOOPS_SAVED)
def test_the_client_resumes_from_partial_checkpoints_of_its_loop(
    name: str, runs: Runs, resumed: dict[str, Run]
) -> None:
    run, spec = resumed[name], LOOPS_SAVED[name]
    assert run.losses == runs[name].after(STEP)
    for partial in sorted(runs[name].folder.glob("partial/step-*")):
        assert not verify_checkpoint(partial).findings
        assert index_checkpoint(partial).framework == spec.client
    verdict = verify_checkpoint(Path(run.spec.resume_from), deep=True)
    assert verdict.level == RESUMABLE and not verdict.findings
    assert verdict.index is not None and verdict.index.framework == spec.client


def test_gradients_are_clipped_as_the_config_says_or_deepspeed_does(runs: Runs, resumed: dict[str, Run]) -> None:
    """ZeRO-1 and ZeRO-2 clip at what the checkpoint says, ZeRO-3 does not save it: without it, both at the default."""
    wanted = runs["engine-3"].after(STEP)
    assert len(wanted) == 4 and resumed[str(Case("engine-3", 2, 2))].losses == pytest.approx(wanted, rel=RELATIVE)
    lost = resumed["unclipped"].losses
    assert lost[STEP + 1] == pytest.approx(wanted[STEP + 1], rel=RELATIVE)
    assert all(lost[step] != pytest.approx(wanted[step], rel=RELATIVE) for step in wanted if step > STEP + 1)


def test_an_engine_finds_what_salvage_has_put_in_place(resumed: dict[str, Run]) -> None:
    """Also without being told where: through ``latest``."""
    run = Path(resumed["by-latest"].spec.resume_from)
    assert (run / "latest").read_text() == "checkpoint-4/global_step4"
    assert resumed["by-latest"].losses == resumed["by-name"].losses and resumed["by-name"].losses.keys() == {5}


def test_a_file_is_missed_as_verify_says(runs: Runs, resumed: dict[str, Run]) -> None:
    """accelerate does not ask for ``latest``, and goes on without random states, with other numbers."""
    for case in LOST:
        wanted = runs[case.source].after(STEP)
        assert (resumed[str(case)].losses == wanted) == case.is_exact
        verdict = verify_checkpoint(Path(resumed[str(case)].spec.resume_from))
        assert verdict.is_resumable and {one.path for one in verdict.of_severity(WARNING)} >= {case.lost}
