"""Checkpoints of FSDP, DCP and DeepSpeed universal, thinned out: composites hold what the full ones held."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import llmtailor
import oracle.any
from helpers.cases import mostly_long
from helpers.checkpoints import copied
from helpers.commands import run_here
from helpers.composing import convert
from helpers.states import assert_holds, read, same
from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.copying import staging as space
from llmtailor.copying.pool import Stop
from llmtailor.errors import StorageError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import WEIGHT
from llmtailor.runs import thin as service
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle.deepspeed_tools import to_universal
from thin.scene import SHORT, call, compose, copy_of_trained, folders, make_run, sources, thinned
from trainings.harness import Runs

STEPS = (100, 200, 300)
ODD = (".layers.1.", ".layers.3.", "lm_head.")


def assert_same_index(found: CheckpointIndex, wanted: CheckpointIndex, older: CheckpointIndex | None = None) -> None:
    """Compare all states of a composite with those of the full checkpoint; even parts may be an older one's."""
    told = ("format", "form", "world_size", "global_step", "precision", "params", "tied", "groups", "framework")
    for what in told:
        assert getattr(found, what) == getattr(wanted, what), what
    assert found.zero.tag == wanted.zero.tag
    assert found.held.keys() == wanted.held.keys()
    for state, held in found.held.items():
        source = older if older and not any(word in f"{state.param}." for word in ODD) else wanted
        assert same(read(found.root, held), read(source.root, source.held[state])), state
    if older is None:
        assert found.sub_groups == wanted.sub_groups


def value_of(index: CheckpointIndex, key: str) -> Any:
    """Return a value that belongs neither to the model nor to the optimizer."""
    entry = index.dcp.others[key]
    if not entry.is_tensor:
        return entry.content
    dtype, shape, boxes = entry.content
    parts = [(offsets, sizes, (index.root / at.path).read_bytes()[at.start : at.stop]) for offsets, sizes, at in boxes]
    return dtype, shape, parts


@pytest.mark.parametrize("to", mostly_long(["fsdp", "dcp", "universal"], "fsdp"))
def test_every_step_is_composed_as_from_full_checkpoints(to: str, tmp_path: Path) -> None:
    originals = make_run(tmp_path / "originals", STEPS, to, shape=SHORT, world_size=3)
    run = copied(originals, tmp_path / "run", STEPS)
    told = thinned(run, "--strategy", "parity")
    assert folders(run) == ["checkpoint-300", "partial/step-00000100", "partial/step-00000200"]
    assert told["composable_before"] == told["composable_after"] == list(STEPS)
    first, second = (index_checkpoint(originals / f"checkpoint-{step}") for step in STEPS[:2])
    for step, older in ((100, None), (200, first)):
        out = compose(run, step, tmp_path / f"out-{step}")
        assert_same_index(index_checkpoint(out), first if older is None else second, older)
        assert verify_checkpoint(out, deep=True).level == RESUMABLE
        assert verify_checkpoint(run / f"partial/step-{step:08}", deep=True).is_intact
    assert set(sources(tmp_path / "out-200").values()) == {100, 200}


@pytest.mark.parametrize(
    "name",
    mostly_long(
        ["trainer", "loop", "full", "fsdp1", "columns", "titan", "hf", "loop-tied", "loop-frozen", "titan-bf16"],
        "full",
        "titan",
    ),
)
def test_what_trainings_saved(runs: Runs, name: str, tmp_path: Path) -> None:
    """The composite holds what the ranks held in memory, in the form in which they saved it."""
    full = runs.checkpoint(name)
    run = copy_of_trained(runs, name, tmp_path / "run")
    told = call("thin", run, "--strategy", "full", "--yes")
    assert [row["becomes"] for row in told["checkpoints"]] == ["partial", "stays"], told["checkpoints"]
    assert not (run / full.name).exists()
    done = run_here("merge", "--run", run, "--at", 2)
    assert done.returncode == 0, done.stderr
    out = run / full.name  # where the training looks for it
    index, wanted = index_checkpoint(out), index_checkpoint(full)
    assert_holds(index, runs[name].held[2])
    assert_same_index(index, wanted)
    own = {"llmtailor.json", "README.md", ".metadata"}
    assert {path for path in index.files if path not in own} >= {path for path in wanted.files if path not in own}
    for key, entry in wanted.dcp.others.items():
        assert value_of(index, key) == value_of(wanted, key), (key, entry)
    assert verify_checkpoint(out, deep=True).level == verify_checkpoint(full, deep=True).level


@pytest.mark.parametrize("name", mostly_long(["trainer", "full", "hf", "loop", "titan-bf16"], "trainer", "loop"))
def test_only_the_weights_stay(runs: Runs, name: str, tmp_path: Path) -> None:
    run = copy_of_trained(runs, name, tmp_path / "run")
    left = run / runs.checkpoint(name).name
    (left / "tokenizer_config.json").write_text("{}\n")
    live = runs[name].held[2]["weights"]
    told = thinned(run, "--keep-optimizer-last", 1)
    assert (left / "tokenizer_config.json").read_text() == "{}\n"
    assert (told["composable_before"], told["composable_after"]) == ([2, 4], [4])
    for param, weight in loaded(left, live).items():
        assert same(weight, live[param]), param
    assert "no optimizer state" in str(verify_or_refusal(left))
    again = call("thin", run, "--keep-optimizer-last", 1, "--yes")
    assert again["freed_bytes"] == 0 and "no optimizer state" in again["skipped"][0]["what"]


def test_weights_that_do_not_fit_leave_nothing_behind(runs: Runs, tmp_path: Path, monkeypatch: Any) -> None:
    run = copy_of_trained(runs, "loop", tmp_path / "run")
    full = run / runs.checkpoint("loop").name
    index, before = index_checkpoint(full), folders(run)

    def fail(plan: Any, staging: Path, *_: object) -> None:
        (staging / "part").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(service, "execute", fail)
        with pytest.raises(OSError, match="no space"):
            service.reduce_to_weights(index, Stop())
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == before
    monkeypatch.setattr(space, "free_bytes", lambda out: 1000)
    with pytest.raises(StorageError, match="bytes are needed"):
        service.reduce_to_weights(index, Stop())


def loaded(left: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Load the weights of a folder by torch's own loaders."""
    import torch.distributed.checkpoint as dcp

    if (left / "pytorch_model_fsdp.bin").exists():
        return dict(torch.load(left / "pytorch_model_fsdp.bin"))
    empty = {name: torch.empty_like(weight) for name, weight in like.items()}
    if shards := sorted(left.glob("shard-*.safetensors")):
        parts = [load_file(path) for path in shards]
        return {name: torch.cat([part[name] for part in parts if name in part]) for name in like}
    folder = left / "pytorch_model_fsdp_0"
    keys = dcp.FileSystemReader(folder if folder.exists() else left).read_metadata().state_dict_metadata
    prefix = "model." if all(key.startswith("model.") for key in keys) and not set(like) <= keys.keys() else ""
    assert {key.removeprefix(prefix) for key in keys} == like.keys()
    state = {prefix + name: tensor for name, tensor in empty.items()}
    dcp.load(state, checkpoint_id=folder if folder.exists() else left, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def verify_or_refusal(left: Path) -> object:
    try:
        return verify_checkpoint(left).findings
    except llmtailor.TailorError as error:
        return error


UNIVERSAL = [
    *("llama-frozen", "llama-extras-layer", "llama-ds-both", "llama-tied-layer", "mixtral", "zero1-bf16opt"),
    *("zero1-extras-layer", "zero2-aligned", "zero2-frozen", "zero2-tied", "llama-extras-w3", "zero2-layer-w3"),
]


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("llama-extras-w3", convert),
        *(pytest.param(name, convert, marks=pytest.mark.long) for name in UNIVERSAL),
        *(pytest.param(name, to_universal, marks=pytest.mark.long) for name in ("llama", "zero1", "zero2", "zero3")),
    ],
)
def test_universal_checkpoints_of_trainings(runs: Runs, name: str, by: Any, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"to": "universal"} if by is convert else {}
    run.mkdir()
    for step in (2, 4):
        by(runs[name].checkpoint(step), run / f"checkpoint-{step}", **options)
    wanted = copied(run, tmp_path / "kept", [2])
    told = call("thin", run, "--strategy", "full", "--yes")
    assert [row["becomes"] for row in told["checkpoints"]] == ["partial", "stays"], told["checkpoints"]
    out = compose(run, 2, tmp_path / "out")
    assert_same_index(index_checkpoint(out), index_checkpoint(wanted / "checkpoint-2"))
    # and as from the checkpoint that it was converted from, in DeepSpeed's own form
    done = run_here("merge", "--run", run, "--at", 2, "--to", "deepspeed", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    back, original = oracle.any.load(tmp_path / "back"), oracle.any.load(runs[name].checkpoint(2))
    for state, tensor in original.states.items():
        if state.kind != WEIGHT:
            assert same(back.states[state], tensor), state
