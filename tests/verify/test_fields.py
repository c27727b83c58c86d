"""Every field that decides a training, off in every way that its row speaks of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fields import Damage, damages_of, places_of, unlike
from llmtailor.codes import Code
from llmtailor.findings import ERROR
from llmtailor.formats.deepspeed.shards import MODEL, ZERO3, ZERO12
from llmtailor.formats.torch_optimizer import OPTIMIZER_TABLE
from llmtailor.frameworks.rng import RNG_TABLE
from llmtailor.frameworks.scheduler import SCHEDULER_TABLE
from llmtailor.frameworks.stock_fields import Field, Table
from llmtailor.frameworks.trainer_state import SCALER_TABLE, TRAINER_STATE_TABLE
from llmtailor.verify.verify import verify_checkpoint
from trainings.alone import NamedGroups, train
from verify.damages import STEP

pytestmark = pytest.mark.real

RUNS = (
    (ZERO3, "*optim_states.pt", "llama llama-fp16"),
    (ZERO12, "*optim_states.pt", "zero2 zero2-fp16"),
    (MODEL, "*model_states.pt", "llama zero2 llama-ds-both"),
)
"""Which files a table is about, and runs of which some have every field"""
WITHOUT = "max_exp_avg_sq"
"""No run of the tests has amsgrad; see `test_damages`"""
SCALE = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 4}
TRAINERS = (
    (TRAINER_STATE_TABLE, "trainer_state.json"),
    (SCHEDULER_TABLE, "scheduler.pt"),
    (RNG_TABLE, "rng_state.pth"),
    (SCALER_TABLE, "scaler.pt"),
    (OPTIMIZER_TABLE, "optimizer.pt"),
)


def cases(*tables: tuple[Table, str, str]) -> list[Any]:
    return [
        pytest.param(*rest, one, id=f"{rest[-1]}-{one.name}")
        for table, *rest in tables
        for one in table
        if one.path[-1] != WITHOUT
    ]


@pytest.mark.parametrize(("pattern", "names", "field"), cases(*RUNS))
def test_a_field_of_deepspeed_that_is_off_is_told(pattern: str, names: str, field: Field, runs, tmp_path):
    checkpoint = tmp_path / f"checkpoint-{STEP}"
    for name in names.split():
        source = runs[name].checkpoint(STEP)
        found = sorted(path.relative_to(source) for path in source.glob(f"global_step*/{pattern}"))
        if [*places_of(load(source / found[0]), field.path)]:
            shutil.copytree(source, checkpoint)
            break
    files = [checkpoint / path for path in found]
    for damage in [*damages_of(field), *([unlike(field)] if field.is_alike and len(files) > 1 else [])]:
        kept = [path.read_bytes() for path in files]
        for path in files[1:] if damage.code == Code.RANKS_DIFFER else files:
            tree = load(path)
            assert damage.apply(tree)
            save(tree, path)
        check(checkpoint, damage, files[-1].relative_to(checkpoint).as_posix())
        for path, data in zip(files, kept, strict=True):
            path.write_bytes(data)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint whose params are known by name: no model is asked for, so that verifying takes no time."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, arch="llama", kind=NamedGroups)
    (folder / "checkpoint-4" / "training_args.bin").unlink()  # else it tells that there is no loss scale
    return folder / "checkpoint-4"


@pytest.mark.parametrize(("path", "field"), cases(*TRAINERS))
def test_a_field_of_the_trainer_that_is_off_is_told(path: str, field: Field, plain, tmp_path):
    root = tmp_path / "checkpoint-4"
    shutil.copytree(plain, root)
    if path == "scaler.pt":
        save(SCALE, root / path)
    assert not verify_checkpoint(root).findings
    good = (root / path).read_bytes()
    for damage in damages_of(field):
        (root / path).write_bytes(good)
        tree = load(root / path)
        if field.path[-1] == "step" and damage.code == Code.FIELD_MISSING:
            del tree["state"][0]["step"]  # without any step it is another optimizer's, and can't be judged
        else:
            assert damage.apply(tree)
        save(tree, root / path)
        check(root, damage, path)


def load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else torch.load(path, weights_only=False)


def save(tree: Any, path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(tree))
    else:
        torch.save(tree, path)


def check(checkpoint: Path, damage: Damage, path: str) -> None:
    verdict = verify_checkpoint(checkpoint, name="x")
    told = {(finding.code, finding.severity) for finding in verdict.findings if finding.path == path}
    severity = ERROR if damage.code == Code.RANKS_DIFFER else damage.field.severity
    assert (damage.code, severity) in told, f"{damage}:\n" + "\n".join(map(str, verdict.findings))
    assert verdict.is_resumable == (severity != ERROR)


@pytest.mark.parametrize("callbacks", [None, 3, "x", []])
def test_a_state_of_little_more_than_a_step_is_looked_at(callbacks, plain, tmp_path):
    """The saver's own, in a loop without the Trainer, has an object there; anything else is the Trainer's, damaged."""
    root = tmp_path / "checkpoint-4"
    shutil.copytree(plain, root)
    save({"global_step": 4, "stateful_callbacks": callbacks}, root / "trainer_state.json")
    assert not verify_checkpoint(root).is_resumable
