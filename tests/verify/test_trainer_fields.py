"""The Trainer's own files: every field that a stock resume reads, off in every way that its row speaks of."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

from helpers.fields import damages_of, places_of  # noqa: E402
from llmtailor.findings import ERROR  # noqa: E402
from llmtailor.formats.field_tables import CODES, EACH, MISSING, UNLIKE, Field, Table  # noqa: E402
from llmtailor.formats.plain.optimizer import OPTIMIZER_TABLE  # noqa: E402
from llmtailor.formats.rng import RNG_TABLE  # noqa: E402
from llmtailor.formats.scheduler import SCHEDULER_TABLE  # noqa: E402
from llmtailor.formats.trainer_checks import CONFIG_TABLE, SCALER_TABLE, TRAINER_STATE_TABLE  # noqa: E402
from llmtailor.verify.verify import verify_checkpoint  # noqa: E402
from plain.training import NamedGroups, train  # noqa: E402
from verify.damages import STEP  # noqa: E402

SCALE = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 4}
PLATEAU = {"mode": "min", "num_bad_epochs": 0, "last_epoch": 4, "_last_lr": [0.1], "min_lrs": [0]}
"""Of a scheduler by metric, in so far as a row speaks of it"""
NOT_TRIED = {"max_exp_avg_sq": "no run of the tests has amsgrad", "bias_correction": "a field of DeepSpeed's"}
TABLES = (
    (TRAINER_STATE_TABLE, "trainer_state.json"),
    (SCHEDULER_TABLE, "scheduler.pt"),
    (RNG_TABLE, "rng_state.pth"),
    (SCALER_TABLE, "scaler.pt"),
    (OPTIMIZER_TABLE, "optimizer.pt"),
    (CONFIG_TABLE, "config.json"),
)
CASES = [
    pytest.param(table, path, field, id=f"{path}-{field.name}")
    for table, path in TABLES
    for field in table.fields
    if field.path[-1] not in NOT_TRIED
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint whose params are known by name: no model is asked for, so that verifying takes no time."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, arch="llama", kind=NamedGroups)
    (folder / "checkpoint-4" / "training_args.bin").unlink()  # else it tells that there is no loss scale
    return folder / "checkpoint-4"


def load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else torch.load(path, weights_only=False)


def save(tree: Any, path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(tree))
    else:
        torch.save(tree, path)


def sound(checkpoint: Path, path: str, field: Field) -> Any:
    """Return a file's tree that has a field, and that `verify` finds nothing wrong with."""
    if path == "scaler.pt":
        return dict(SCALE)
    tree = load(checkpoint / path)
    if path == "scheduler.pt" and field.path == ("mode",):
        rates = tree["_last_lr"]
        return PLATEAU | {"_last_lr": rates, "min_lrs": [0] * len(rates)}
    if path == "rng_state.pth" and field.path == ("cuda",):
        return tree | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    if path == "config.json":
        return {"id2label": None, "num_labels": 2, "layer_types": None, "rope_scaling": None, "dtype": "float32"} | tree
    return tree


@pytest.mark.parametrize(("table", "path", "field"), CASES)
def test_a_field_that_is_off_is_told(table: Table, path: str, field: Field, plain, tmp_path):
    root = tmp_path / "checkpoint-4"
    shutil.copytree(plain, root)
    good = io.BytesIO()
    torch.save(sound(plain, path, field), good)
    tried = 0
    for damage in damages_of(field):
        if damage.way == UNLIKE or (damage.way == MISSING and field.path[-1] == EACH):
            continue  # there is one rank; and which entries there are, nobody says
        tree = torch.load(io.BytesIO(good.getvalue()), weights_only=False)
        if not [*places_of(tree, field.path)]:
            pytest.skip("the file has no such field")
        if field.path[-1] == "step" and damage.way == MISSING:
            del tree["state"][0]["step"]  # without any step it is another optimizer's, and can't be judged
        else:
            assert damage.apply(tree)
        save(tree, root / path)
        verdict = verify_checkpoint(root, name="x")
        text = f"{damage}:\n" + "\n".join(map(str, verdict.findings))
        tried += 1
        if damage.says is None:
            assert verdict.is_resumable, text
            continue
        told = [finding for finding in verdict.findings if finding.path == path]
        assert damage.says.severity in {finding.severity for finding in told}, text
        assert verdict.is_resumable == (damage.says.severity != ERROR), text
        if damage.way not in field.told_by_reader and field.path[-1] not in ("params", "param_groups", "state"):
            assert (damage.says.code or CODES[damage.way]) in {finding.code for finding in told}, text
    assert tried


def test_what_is_sound_is_not_complained_of(plain, tmp_path):
    for _, path, field in (case.values for case in CASES):
        root = tmp_path / field.name.replace("[*]", "-") / "checkpoint-4"
        shutil.copytree(plain, root, dirs_exist_ok=True)
        save(sound(plain, path, field), root / path)
        if field.path != ("mode",):  # whose schedule is of another run
            assert not verify_checkpoint(root).findings, field.name


SHARED = [
    pytest.param(path, field, id=f"{path}-{field.name}")
    for table, path in TABLES[:3]
    for field in table.fields
    if field.path[-1] not in ("cuda", "mode")
]


@pytest.mark.parametrize(("path", "field"), SHARED)
def test_with_deepspeed_the_same_is_told(path: str, field: Field, runs, tmp_path):
    """One damage of each kind: the tables are the same, and so are the readers."""
    root = tmp_path / f"checkpoint-{STEP}"
    shutil.copytree(runs["llama"].checkpoint(STEP), root)
    (root / "training_args.bin").unlink()  # else it tells what of trainer_state.json is read
    target = root / ("rng_state_1.pth" if path == "rng_state.pth" else path)
    good = target.read_bytes()
    for damage in damages_of(field):
        if damage.way == UNLIKE or damage.sample or (damage.way == MISSING and field.path[-1] == EACH):
            continue
        target.write_bytes(good)
        tree = load(target)
        assert damage.apply(tree)
        save(tree, target)
        verdict = verify_checkpoint(root, name="x")
        text = f"{damage}:\n" + "\n".join(map(str, verdict.findings))
        told = {finding.severity for finding in verdict.findings if finding.path == target.name}
        assert damage.says is None or damage.says.severity in told, text
        assert verdict.is_resumable == (damage.says is None or damage.says.severity != ERROR), text


@pytest.mark.parametrize("callbacks", [None, 3, "x", []])
def test_a_state_of_little_more_than_a_step_is_looked_at(callbacks, plain, tmp_path):
    """The saver's own, in a loop without the Trainer, has an object there; anything else is the Trainer's, damaged."""
    root = tmp_path / "checkpoint-4"
    shutil.copytree(plain, root)
    save({"global_step": 4, "stateful_callbacks": callbacks}, root / "trainer_state.json")
    assert not verify_checkpoint(root).is_resumable
