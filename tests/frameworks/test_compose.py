"""Composites of checkpoints without a Trainer: every state is bit for bit that of its source."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import Trainer

from helpers.cases import mostly_long
from helpers.checkpoints import copied, copy_of_partial
from helpers.composing import convert, convert_to_resume, merge
from helpers.files import names
from helpers.states import assert_same_states, read, same
from llmtailor.cli.main import cli
from llmtailor.errors import UnsafePickle
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import MASTER, WEIGHT
from llmtailor.runs.scan import find_latest
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from thin.scene import call, folders
from thin.scene import compose as compose_run
from trainings.alone import train as train_alone
from trainings.catalogue import LIGHTNING, LOOPS
from trainings.harness import Runs

pytestmark = pytest.mark.real
FILES = {
    "deepspeed": set(),
    "accelerate": {"random_states_0.pkl", "random_states_1.pkl"},
    "trainer": {"trainer_state.json", "scheduler.pt"},
}


def compose(runs: Runs, name: str, folder: Path, **options: object) -> Path:
    merge(runs.checkpoint(name, 4), folder / "checkpoint-4", {"odd": runs.checkpoint(name)}, **options)
    return folder / "checkpoint-4"


@pytest.mark.parametrize("ranks", mostly_long([1, 2, 3], 3))
@pytest.mark.parametrize("name", [*LOOPS, *LIGHTNING])
def test_a_composite_holds_the_states_of_its_sources(name: str, ranks: int, runs: Runs, tmp_path: Path) -> None:
    out = compose(runs, name, tmp_path, world_size=ranks)
    base, odd = (index_checkpoint(runs.checkpoint(name, step)) for step in (4, 2))
    assert_same_states(index_checkpoint(out), base, odd)
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.is_resumable and not verdict.findings and verdict.index is not None
    assert (verdict.index.framework, verdict.index.global_step) == (base.framework, 4)
    if base.form.stage:
        assert (verdict.index.world_size, verdict.index.zero.tag) == (ranks, base.zero.tag)


SHORT = [
    *("engine-2 trainer", "engine-3 dcp", "engine-2 universal"),
    *("accelerate-2 fsdp", "accelerate-ddp deepspeed", "accelerate-fsdp deepspeed"),
]
ALL = [
    f"{name} {to}"
    for name in ("engine-2", "engine-3", "accelerate-2", "accelerate-ddp", "accelerate-fsdp")
    for to in ("trainer", "fsdp", "dcp", "universal", "deepspeed")
]
PAIRS = mostly_long(ALL, *SHORT)
THINNED = mostly_long(LOOPS, "engine-2", "accelerate-ddp")


@pytest.mark.parametrize("pair", PAIRS)
def test_any_format_can_be_made_of_them(pair: str, runs: Runs, tmp_path: Path) -> None:
    name, to = pair.split()
    stage = {"stage": 2} if to in ("universal", "deepspeed") else {}
    out = compose(runs, name, tmp_path, to=to, **stage)
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.is_resumable, verdict.findings
    index = verdict.index
    assert index is not None
    own = LOOPS[name].client
    client = {"trainer": "trainer", "dcp": "dcp", "fsdp": "trainer" if own == "deepspeed" else own}.get(to, own)
    assert (index.framework, index.form.file_format) == (client, to)
    assert FILES.get(client, set()) <= index.files.keys()
    masters = [state for state in index.held if state.kind == MASTER]
    base = index_checkpoint(runs.checkpoint(name, 4))
    older = [state for state in masters if ".layers.1." in state.param]
    assert older and all(same(read(out, index.held[s]), read(base.root, base.held[s])) != (s in older) for s in masters)


def test_the_schedule_of_accelerate_is_counted_in_steps_for_the_trainer(runs: Runs, tmp_path: Path) -> None:
    out = convert(runs.checkpoint("accelerate-2"), tmp_path / "checkpoint-2", to="trainer")
    before = torch.load(runs.checkpoint("accelerate-2") / "scheduler.bin")
    after = torch.load(out / "scheduler.pt")
    assert (before["last_epoch"], after["last_epoch"], after["_step_count"]) == (4, 2, 3)
    assert after["_last_lr"] == before["_last_lr"]
    states = torch.load(runs.checkpoint("accelerate-2") / "random_states_1.pkl", weights_only=False)
    trainers = torch.load(out / "rng_state_1.pth", weights_only=False)
    assert trainers["python"] == states["random_state"]
    assert torch.equal(trainers["cpu"], states["torch_manual_seed"])
    assert not (out / "custom_checkpoint_0.pkl").exists() and not (out / "scheduler.bin").exists()


@pytest.mark.parametrize("name", ["engine-2", "accelerate-3"])
def test_the_trainer_resumes_from_what_is_made_for_it(name: str, runs: Runs, tmp_path: Path) -> None:
    """It holds the masters and moments of the loop, bit for bit, and goes on at its step with its learning rate."""
    found: dict[str, dict[str, torch.Tensor]] = {}

    class Watching(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            for name, param in model.named_parameters() if not found else ():
                states = {kind: value.clone() for kind, value in self.optimizer.state[param].items()}
                found[name] = {MASTER: param.detach().clone(), **states}
            return super().training_step(model, *args, **kwargs)

    source = runs.checkpoint(name)
    out = convert_to_resume(source, tmp_path / "out" / "checkpoint-2", to="trainer", groups="default")
    run = train_alone(tmp_path / "run", layers=3, kind=Watching, resume_from=out)
    assert run.losses.keys() == {3, 4}
    index = index_checkpoint(source)
    for state_of, held in index.held.items():
        if state_of.kind != WEIGHT and state_of.kind in found[state_of.param]:
            assert same(found[state_of.param][state_of.kind], read(source, held)), state_of
    assert found.keys() == index.steps().keys() and {float(one["step"]) for one in found.values()} == {2.0}
    assert verify_checkpoint(run.checkpoint(4), deep=True).level == RESUMABLE


def test_what_the_client_has_registered_is_copied_unread(runs: Runs, tmp_path: Path) -> None:
    out = compose(runs, "accelerate-ddp", tmp_path, world_size=3)
    for path in ("custom_checkpoint_0.pkl", "random_states_0.pkl", "random_states_1.pkl"):
        assert (out / path).read_bytes() == (runs.checkpoint("accelerate-ddp", 4) / path).read_bytes()
    assert (out / "random_states_2.pkl").read_bytes() == (out / "random_states_0.pkl").read_bytes()


def test_code_in_a_file_that_is_copied_is_never_run(runs: Runs, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    for path in ("custom_checkpoint_0.pkl", "sampler.bin", "random_states_0.pkl", "scheduler.bin", "optimizer.bin"):
        root = tmp_path / path / "checkpoint-2"
        shutil.copytree(runs.checkpoint("accelerate-ddp"), root)
        torch.save({"x": Harm()}, root / path)
        if path in ("custom_checkpoint_0.pkl", "sampler.bin"):
            out = convert(root, tmp_path / path / "out", world_size=3)
            assert (out / path).read_bytes() == (root / path).read_bytes()
            assert verify_checkpoint(out, deep=True).is_resumable
        else:
            with pytest.raises(UnsafePickle):
                convert(root, tmp_path / path / "out", world_size=3)
            assert path in {one.path for one in verify_checkpoint(root).findings}
    assert not (tmp_path / "ran").exists()


def test_diff_sees_what_accelerate_saves_beside_the_states(runs: Runs, tmp_path: Path) -> None:
    source = runs.checkpoint("accelerate-ddp")
    out = convert(source, tmp_path / "checkpoint-2", world_size=2)
    assert "equal: all" in CliRunner().invoke(cli, ["diff", str(source), str(out)]).stdout
    for path in ("custom_checkpoint_0.pkl", "random_states_1.pkl", "scheduler.bin"):
        shutil.copy(runs.checkpoint("accelerate-ddp", 4) / path, out / path)
        result = CliRunner().invoke(cli, ["diff", str(source), str(out)])
        assert path in result.stdout
        shutil.copy(source / path, out / path)


def test_names_of_params_stay_under_the_key_of_the_base(runs: Runs, tmp_path: Path) -> None:
    """Callers compare param groups, and the loader of FSDP asks for torch's own key."""
    source = runs.checkpoint("accelerate-named")
    saved = torch.load(source / "optimizer.bin")["param_groups"]
    out = convert(source, tmp_path / "checkpoint-2")
    assert torch.load(out / "optimizer.bin")["param_groups"] == saved and "param_names" in saved[0]
    run = copy_of_partial(runs["accelerate-ddp-saver"].folder, tmp_path / "run")
    outs = [convert(source, tmp_path / "layers", groups="layer"), compose_run(run, 2, tmp_path / "of-saves")]
    for out in outs:
        for group in torch.load(out / "optimizer.bin")["param_groups"]:
            assert len(group["param_names"]) == len(group["params"]) and "lt_params" not in group
        assert verify_checkpoint(out, deep=True).is_resumable


def test_client_state_of_an_engine_is_kept(runs: Runs, tmp_path: Path) -> None:
    out = compose(runs, "engine-2", tmp_path, world_size=3)
    model = torch.load(out / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)
    assert (model["epoch"], model["global_steps"], (out / "latest").read_text()) == (4, 4, "checkpoint")


@pytest.mark.parametrize("name", THINNED)
def test_merge_run_composes_what_thin_leaves(name: str, runs: Runs, tmp_path: Path) -> None:
    """``thin`` makes older checkpoints partial, and a composite of these is the copy that the full one would give."""
    run = copied(runs[name].folder, tmp_path / "run", (2, 4))
    told = call("thin", run, "--strategy", "full", "--keep-full-last", "1", "--yes")
    assert told["composable_after"] == [2, 4]
    assert folders(run) == ["checkpoint-4", "partial/step-00000002"]
    assert index_checkpoint(run / "partial/step-00000002").framework == LOOPS[name].client
    made = compose_run(run, 2, tmp_path / "checkpoint-2")
    wanted = convert(runs.checkpoint(name), tmp_path / "wanted" / "checkpoint-2")
    assert {path for path in names(wanted) if not path.startswith("zero_to_")} <= names(made)
    verdict = verify_checkpoint(made, deep=True)
    assert verdict.is_resumable and not verdict.findings and verdict.index is not None
    before = index_checkpoint(wanted)
    assert (verdict.index.framework, verdict.index.zero.tag) == (before.framework, before.zero.tag)
    assert_same_states(verdict.index, before)


def test_a_run_is_recovered_without_a_trainer_state(runs: Runs, tmp_path: Path) -> None:
    run = copied(runs["accelerate-3"].folder, tmp_path / "run", (2, 4))
    torn = run / "checkpoint-4" / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    torn.write_bytes(torn.read_bytes()[:100])
    assert find_latest(run).path == run / "checkpoint-2"
    call("salvage", run)
    (out,) = run.glob("salvaged-checkpoint-*")
    verdict = verify_checkpoint(out)
    assert verdict.is_resumable and verdict.index is not None and verdict.index.framework == "accelerate"
