"""`verify`, `latest` and `inspect` judge by the client: what it saves resumes, and damages that matter are told."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.fields import damages_of
from llmtailor.codes import Code
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.findings import ERROR, NOTE, WARNING
from llmtailor.formats.trainer import read as plain
from llmtailor.frameworks.framework import detect_framework
from llmtailor.frameworks.rng import ACCELERATE_TABLE
from llmtailor.frameworks.stock_fields import Field
from llmtailor.runs.scan import find_latest
from llmtailor.verify.inspect import inspect_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from thin.scene import call
from trainings.catalogue import LIGHTNING, LOOPS
from trainings.harness import Runs

Damage = Callable[[Path], object]


def lose(path: str) -> Damage:
    return lambda root: (root / path).unlink()


def cut(path: str) -> Damage:
    return lambda root: (root / path).write_bytes((root / path).read_bytes()[:200])


def spoil_rng(root: Path) -> None:
    import torch

    path = root / "random_states_1.pkl"
    states = torch.load(path, weights_only=False)
    torch.save({**states, "torch_manual_seed": torch.zeros_like(states["torch_manual_seed"])}, path)


def of_another_save(root: Path) -> None:
    import torch

    state = torch.load(root / "scheduler.bin")
    torch.save({**state, "_last_lr": [0.1]}, root / "scheduler.bin")


NOTES = {"lightning-groups": [(NOTE, Code.STATE_MISSING)]}
"""That a frozen param is taken for one"""
DAMAGES: list[tuple[str, str, Damage, str, Code]] = [
    ("engine-3", "no latest", lose("latest"), ERROR, Code.FILE_NAME),
    ("engine-2", "no latest beside another tag", lose("latest"), ERROR, Code.FILE_NAME),
    ("engine-3", "no optimizer shard", lose("global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), ERROR,
     Code.FILE_MISSING),
    ("engine-3", "no model shard", lose("global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt"), ERROR,
     Code.FILE_MISSING),
    ("engine-1", "a shard cut short", cut("1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), ERROR,
     Code.FILE_DAMAGED),
    ("accelerate-3", "no latest", lose("latest"), WARNING, Code.FILE_NAME),
    ("accelerate-3", "no optimizer shard", lose("pytorch_model/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), ERROR,
     Code.FILE_MISSING),
    ("accelerate-2", "another tag", lambda root: ((root / "pytorch_model").rename(root / "other"),
     (root / "latest").write_text("other")), ERROR, Code.FILE_NAME),
    ("accelerate-2", "no random states", lose("random_states_1.pkl"), WARNING, Code.RNG_MISSING),
    ("accelerate-2", "random states that torch refuses", spoil_rng, WARNING, Code.FIELD_RANGE),
    ("accelerate-2", "a schedule cut short", cut("scheduler.bin"), ERROR, Code.FILE_DAMAGED),
    ("accelerate-2", "a schedule of another save", of_another_save, ERROR, Code.SCHEDULER_RATE),
    ("accelerate-ddp", "no optimizer", lose("optimizer.bin"), ERROR, Code.FILE_MISSING),
    ("accelerate-ddp", "no weights", lose("model.safetensors"), ERROR, Code.WEIGHTS_MISSING),
    ("accelerate-ddp", "no random states", lose("random_states_0.pkl"), WARNING, Code.RNG_MISSING),
    ("accelerate-ddp", "an optimizer cut short", cut("optimizer.bin"), ERROR, Code.FILE_DAMAGED),
]  # fmt: skip


@pytest.mark.parametrize("name", [*LOOPS, *LIGHTNING])
def test_what_the_client_saves_is_resumable(name: str, runs: Runs) -> None:
    notes = NOTES.get(name, [])
    for step in (2, 4):
        for is_deep in (False, True):
            verdict = verify_checkpoint(runs.checkpoint(name, step), is_deep)
            assert (verdict.level, [(one.severity, one.code) for one in verdict.findings]) == (RESUMABLE, notes)
    newest = runs.checkpoint(name, runs[name].spec.steps)
    assert find_latest(runs[name].folder).path == newest
    assert call("latest", runs[name].folder)["path"] == str(newest)
    told, client = inspect_checkpoint(runs.checkpoint(name)), getattr(runs[name].spec, "client", "lightning")
    assert (told["framework"], told["global_step"], told["num_layers"]) == (client, 2, 3)
    assert len(told["findings"]) == len(notes)


@pytest.mark.parametrize(("name", "damage", "severity", "code"), [(n, *rest) for n, _, *rest in DAMAGES],
                         ids=[f"{name}: {title}" for name, title, *_ in DAMAGES])  # fmt: skip
def test_a_damage_that_matters_is_told(name, damage, severity, code, runs, tmp_path) -> None:
    root = tmp_path / "checkpoint-4"
    shutil.copytree(runs.checkpoint(name, 4), root)
    damage(root)
    verdict = verify_checkpoint(root)
    assert verdict.is_resumable == (severity != ERROR)
    (finding,) = verdict.findings
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.fix and "recipe" not in finding.fix and "Trainer" not in f"{finding.what} {finding.fix}"


@pytest.mark.parametrize("field", ACCELERATE_TABLE, ids=lambda field: field.name)
def test_a_field_of_the_random_states_that_is_off_is_told(field: Field, runs: Runs, tmp_path: Path) -> None:
    import torch

    root = tmp_path / "checkpoint-4"
    shutil.copytree(runs.checkpoint("accelerate-named", 4), root)
    good = (root / "random_states_1.pkl").read_bytes()
    damages = [*damages_of(field)]
    assert len(damages) >= 3
    for damage in damages:
        states = torch.load(io.BytesIO(good), weights_only=False)
        assert damage.apply(states)
        torch.save(states, root / "random_states_1.pkl")
        verdict = verify_checkpoint(root)
        assert [(one.severity, one.path) for one in verdict.findings] == [(WARNING, "random_states_1.pkl")], damage


@pytest.mark.parametrize("other", ["model_1.safetensors", "optimizer_1.bin", "pytorch_model_1/x", "optimizer_1/x"])
def test_several_models_are_refused(other: str, runs: Runs, tmp_path: Path) -> None:
    for name in ("accelerate-ddp", "accelerate-2", "accelerate-fsdp"):
        root = tmp_path / name / "checkpoint-2"
        shutil.copytree(runs.checkpoint(name), root)
        (root / other).parent.mkdir(exist_ok=True)
        (root / other).write_bytes(b"x")
        with pytest.raises(UnsupportedCheckpoint, match="several models"):
            verify_checkpoint(root)


def test_another_loader_can_be_asked_for(runs: Runs) -> None:
    def lacks(name: str, client: str) -> set[str | None]:
        verdict = verify_checkpoint(runs.checkpoint(name), framework=client)
        return {one.path for one in verdict.of_severity(ERROR)}

    assert lacks("engine-3", "trainer") == {"trainer_state.json"}  # its schedule is in the model states
    assert lacks("engine-1", "trainer") == {"1", "trainer_state.json", "scheduler.pt"}  # a tag of its own
    assert lacks("engine-2", "trainer") == {"trainer_state.json", "checkpoint"}
    assert lacks("accelerate-2", "trainer") == {"trainer_state.json", "scheduler.pt", "pytorch_model"}
    assert lacks("accelerate-2", "deepspeed") == set()
    assert lacks("engine-3", "accelerate") == {"global_step2"}
    for name in LIGHTNING:
        assert not lacks(name, "lightning") and lacks(name, "trainer")
    assert find_latest(runs["engine-3"].folder, framework="trainer").path is None


@pytest.mark.parametrize(
    ("names", "is_trainers", "is_engines", "client"),
    [
        ("latest global_step4/ trainer_state.json", True, True, "trainer"),
        ("latest global_step4/ trainer_state.json", False, True, "deepspeed"),
        ("latest global_step4/ rng_state_0.pth scheduler.pt", None, True, "trainer"),
        ("latest global_step4/ scheduler.pt", None, True, "deepspeed"),
        ("latest step/", None, True, "deepspeed"),
        ("latest pytorch_model/", None, True, "accelerate"),
        ("pytorch_model_fsdp_0/ optimizer_0/ random_states_0.pkl", None, False, "accelerate"),
        ("pytorch_model_fsdp_0/ optimizer_0/ rng_state_0.pth", None, False, "trainer"),
        ("model.safetensors optimizer.bin", None, False, "accelerate"),
        ("pytorch_model_fsdp.bin optimizer.bin training_args.bin", None, False, "trainer"),
        ("model.safetensors optimizer.pt", None, False, "trainer"),
        ("model.safetensors optimizer.pt trainer_state.json", False, False, "trainer"),
        ("latest global_step4/ custom_checkpoint_0.pkl", None, True, "accelerate"),
    ],
)
def test_the_client_follows_from_the_files(names: str, is_trainers: bool | None, is_engines: bool, client: str) -> None:
    assert detect_framework(names.split(), is_trainers, is_engines).name == client


def test_objects_of_a_loop_alone_are_no_checkpoint(tmp_path: Path) -> None:
    """Those that accelerate saves for a loop may lie anywhere; with the optimizer's states they are of a checkpoint."""
    for name in ("custom_checkpoint_0.pkl", "sampler.bin"):
        (tmp_path / name).touch()
        assert not plain.detects(tmp_path)
    (tmp_path / "optimizer.bin").touch()
    assert plain.detects(tmp_path)
