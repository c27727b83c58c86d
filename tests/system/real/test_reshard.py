"""Other numbers of ranks and other ZeRO stages: the same states bit for bit, laid out as stock DeepSpeed would have.

Stock DeepSpeed resumes from the results on that many ranks, and loads what the oracle reads out of the source.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.composing import convert, merge
from helpers.same import differences
from helpers.states import part_of
from llmtailor.model.roles import BUFFER, MASTER, WEIGHT, State
from oracle import zero12
from oracle.any import load
from oracle.deepspeed_tools import assert_universal_agrees
from oracle.weights import with_weights
from oracle.zero3 import Snapshot, assert_same, compose
from trainings.catalogue import MIDDLE, OTHERS, long_but
from trainings.common import DTYPES
from trainings.harness import Run, Runs, Train
from trainings.loaded import assert_loaded, assert_module_is_rounded
from trainings.spec import Spec

NOISE = 5e-4
"""Of the loss, when gradients are summed in another order and rounded to bf16"""

TO = {
    "zero3": ["3x1", "3x3", "3x4", "2x2", "2x3", "1x4", "1x1"],
    "zero3-layer": ["3x3", "2x4", "1x1"],
    "llama-layer-w3": ["3x2", "3x1", "2x2"],
    "llama-sub": ["3x1", "3x3", "3x4", "2x2"],
    "llama-sub-w3": ["3x1", "3x2", "3x4", "1x2"],
    "llama-layer-sub": ["3x3", "3x4", "1x3"],
    "llama-fp16": ["3x3", "2x3"],
    "llama-fp32": ["2x3"],
    "llama-tied": ["3x3", "1x2"],
    "llama-tied-layer": ["3x1", "2x3"],
    "llama-frozen": ["3x3", "2x4", "1x3"],
    "llama-extras-w3": ["3x2", "3x4", "2x2", "1x4"],
    "llama-extras-layer": ["3x3", "2x1"],
    "llama-ds-adamw": ["3x3", "2x3"],
    "llama-ds-both": ["3x1", "1x3"],
    "llama-cpu-adam": ["3x3", "2x3"],
    "llama-offload": ["3x1"],
    "llama-no-gather": ["3x3", "2x3"],
    "llama-sharded": ["3x3", "2x3"],
    "mixtral": ["3x3", "2x3"],
    "qwen2-w3": ["3x2", "2x4"],
    "zero1": ["1x1", "1x3", "2x3", "3x4"],
    "zero2": ["2x1", "2x3", "2x4", "1x2", "3x2"],
    "zero2-layer": ["2x3", "2x1", "3x4"],
    "zero2-rr": ["2x1", "2x3", "2x4", "1x2", "3x3"],
    "zero2-rr-w3": ["2x2", "2x1", "2x4", "3x3"],
    "zero1-rr": ["1x3", "2x2", "3x2"],
    "zero2-aligned": ["2x3", "2x1", "3x2"],
    "zero2-aligned-w3": ["2x2", "1x4"],
    "zero1-bf16opt": ["1x1", "1x3", "2x2", "3x3"],
    "zero1-bf16opt-w3": ["1x2", "1x4"],
    "zero1-bf16opt-rr": ["1x3", "2x3", "3x2"],
    "zero2-fp32-grads": ["1x3", "2x1", "3x3"],
    "zero3-fp32-grads": ["1x3", "2x2", "3x1"],
    "zero2-fp16": ["2x3", "3x3", "1x1"],
    "zero1-fp32": ["1x3", "3x2"],
    "zero2-frozen": ["2x3", "1x2", "3x3"],
    "zero2-tied": ["2x3", "3x3"],
    "zero1-extras-layer": ["1x3", "2x2", "3x4"],
    "zero2-extras": ["2x3", "3x3"],
}
"""run -> the targets, STAGExRANKS"""
CASES = [(name, target) for name, targets in TO.items() for target in targets]


def parse(target: str) -> tuple[int, int]:
    stage, ranks = target.split("x")
    return int(stage), int(ranks)


# What stock DeepSpeed would have


def is_bf16_optimizer(spec: Spec, stage: int) -> bool:
    return stage == 1 and spec.dtype == "bf16" and spec.grad_accum_dtype == "fp32"


def dealt_out(count: int, ranks: int) -> list[int]:
    """The order of ``round_robin_gradients``: rank 0's params, then rank 1's, and so on."""
    return sorted(range(count), key=lambda number: (number % ranks, number))


def groups_of(snapshot: Snapshot, spec: Spec) -> list[list[str]]:
    """The params of the optimizer's groups, in its own order."""
    if spec.stage == 3:
        ids = [group["params"] for group in snapshot.rest["param_groups"]]
        return [[param for flat_id in owned for param in snapshot.flat_ids[flat_id]] for owned in ids]
    groups = []
    for params in snapshot.flat_ids:
        order = list(range(len(params)))
        if spec.round_robin and not is_bf16_optimizer(spec, spec.stage):
            order = dealt_out(len(params), spec.ranks)
        groups.append([param for _, param in sorted(zip(order, params, strict=True))])
    return groups


def flat_ids(spec: Spec, groups: list[list[str]], numels: Mapping[str, int], stage: int, ranks: int) -> list[list[str]]:
    """How the groups become flat tensors."""
    if stage < 3:
        dealt = spec.round_robin and not is_bf16_optimizer(spec, stage)
        return [[params[i] for i in dealt_out(len(params), ranks)] if dealt else params for params in groups]
    limit = spec.sub_group_size or 10**9
    flats: list[list[str]] = []
    for params in groups:
        flats.append([])
        whole = sum(math.ceil(numels[param] / ranks) for param in params)
        for param in params:
            if whole > limit and sum(math.ceil(numels[each] / ranks) for each in flats[-1]) >= limit:
                flats.append([])
            flats[-1].append(param)
    return flats


def expect(run: Run, snapshot: Snapshot, stage: int, ranks: int) -> Snapshot:
    """What a checkpoint holds after a change of its layout. With ZeRO-1/2, one file has the buffers for all ranks."""
    if not run.spec.gather:
        snapshot = with_weights(snapshot, DTYPES[run.spec.dtype], run.spec.arch)
    states = dict(snapshot.states)
    for name, copies in snapshot.kind(BUFFER).items():
        rows = [rank % len(copies) if stage == 3 else 0 for rank in range(ranks)]
        states[State(name, BUFFER)] = copies[rows]
    if snapshot.names(WEIGHT):
        for alias, name in snapshot.rest["tied"].items():  # ZeRO-1/2 have both names in the safetensors files
            states.pop(State(alias, WEIGHT), None)
            if stage < 3:
                states[State(alias, WEIGHT)] = states[State(name, WEIGHT)]
    numels = {name: tensor.numel() for name, tensor in snapshot.kind(MASTER).items()}
    return Snapshot(states, snapshot.steps, flat_ids(run.spec, groups_of(snapshot, run.spec), numels, stage, ranks), {})


def assert_slice_mappings(checkpoint: Path, snapshot: Snapshot, ranks: int) -> None:
    gaps = snapshot.rest["gaps"] or [[0] * len(params) for params in snapshot.flat_ids]
    wanted: list[list[dict[str, tuple[int, int]]]] = [[{} for _ in snapshot.flat_ids] for _ in range(ranks)]
    for group, params in enumerate(snapshot.flat_ids):
        places = []
        for param, gap in zip(params, gaps[group], strict=True):
            places += [param] * snapshot.states[State(param, MASTER)].numel() + [""] * gap
        part = math.ceil(len(places) / (2 * ranks)) * 2
        for rank in range(ranks):
            mine = places[rank * part : (rank + 1) * part]
            wanted[rank][group] = {
                param: (mine.index(param), mine.count(param)) for param in dict.fromkeys(mine) if param
            }
    assert zero12.slice_mappings(checkpoint) == wanted


def file_names(spec: Spec, stage: int, ranks: int, step: int) -> set[str]:
    """The files of the tag folder, and of the random number generators."""
    prefix = "bf16_" if spec.dtype == "bf16" else ""
    model = [f"zero_pp_rank_{rank}_" for rank in range(ranks)] if stage == 3 else [""]
    names = {f"global_step{step}/{each}mp_rank_00_model_states.pt" for each in model}
    names |= {f"global_step{step}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)}
    return names | ({f"rng_state_{rank}.pth" for rank in range(ranks)} if ranks > 1 else {"rng_state.pth"})


# The states


@pytest.mark.parametrize("name", OTHERS)
def test_every_stock_run_of_other_stages_can_be_read(runs: Runs, name: str) -> None:
    """The expectations of this file hold for what stock DeepSpeed wrote itself."""
    run, ranks = runs[name], runs[name].spec.ranks
    snapshot = load(run.checkpoint(6))
    assert expect(run, snapshot, run.spec.stage, ranks).flat_ids == snapshot.flat_ids
    assert_files(run.checkpoint(6), run, run.spec.stage, ranks, 6)
    if run.spec.stage < 3:
        assert_module_is_rounded(run.checkpoint(6), snapshot, DTYPES[run.spec.dtype])
    if run.spec.stage < 3 and not run.spec.round_robin:
        assert_slice_mappings(run.checkpoint(6), snapshot, ranks)


def assert_files(checkpoint: Path, run: Run, stage: int, ranks: int, step: int) -> None:
    found = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.pt*") if path.suffix in (".pt", ".pth")}
    assert found - {"scheduler.pt"} == file_names(run.spec, stage, ranks, step)


@pytest.mark.parametrize(("name", "target"), long_but(CASES[::3], CASES))
def test_a_new_layout_has_the_same_states(runs: Runs, name: str, target: str, tmp_path: Path) -> None:
    run, (stage, ranks) = runs[name], parse(target)
    source = load(run.checkpoint(6))
    out = convert(run.checkpoint(6), tmp_path / "out", stage=stage, world_size=ranks)
    found = load(out)
    assert_same(found, expect(run, source, stage, ranks), rest=False)
    assert_files(out, run, stage, ranks, 6)
    assert found.rest["zero_stage"] == stage
    counters = source.rest["counters"] | {"dp_world_size": ranks}
    assert {key: found.rest["counters"].get(key) for key in counters} == counters
    for key in ("lr_scheduler", "module_names", "tied", "scheduler", "trainer_state", "latest", "ds_version"):
        assert found.rest[key] == source.rest[key], key
    hyper = [[{k: v for k, v in group.items() if k != "params"} for group in each.rest["param_groups"]]
             for each in (found, source)]  # fmt: skip
    assert hyper[0] == hyper[1]
    assert found.rest["step_type"] == source.rest["step_type"]
    assert found.rest["ds_config"]["zero_optimization"]["stage"] == stage
    if stage == 3:
        ids = [number for group in found.rest["param_groups"] for number in group["params"]]
        assert ids == list(range(len(found.flat_ids)))
        assert found.rest["outer"]["partition_count"] == ranks
        assert_zero_padding(out)
    else:
        assert [group["params"] for group in found.rest["param_groups"]] == [[i] for i in range(len(found.flat_ids))]
        assert_module_is_rounded(out, found, DTYPES[run.spec.dtype])
        assert_slice_mappings(out, found, ranks)
    if stage < 3:
        has_scaler = found.rest["loss_scaler"] is not None
        assert has_scaler != is_bf16_optimizer(run.spec, stage)
    if source.rest["loss_scaler"] and found.rest["loss_scaler"]:
        assert found.rest["loss_scaler"] == source.rest["loss_scaler"]


def assert_zero_padding(checkpoint: Path) -> None:
    """Stock leaves uninitialised memory in the masters' padding, ours must be zero."""
    tag = checkpoint / (checkpoint / "latest").read_text()
    ranks = len([*tag.glob("*optim_states.pt")])
    for path in tag.glob("*optim_states.pt"):
        rank = int(re.search(r"rank_(\d+)_", path.name)[1])  # type: ignore[index]
        groups = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]
        shapes = torch.load(next(tag.glob("*model_states.pt")), weights_only=False)["param_shapes"]
        for flat, params in zip(groups, shapes, strict=True):
            at = 0
            for shape in params.values():
                part = math.ceil(shape.numel() / ranks)
                real = min(max(0, shape.numel() - rank * part), part)
                assert not flat[at + real : at + part].any()
                at += part


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama-fp16", "zero2-fp16"])
def test_no_moments_stay_no_moments(runs: Runs, name: str, stage: int, tmp_path: Path) -> None:
    """fp16, and every step so far was skipped."""
    run = runs[name]
    source = load(run.checkpoint(1))
    assert not source.names("exp_avg")
    found = load(convert(run.checkpoint(1), tmp_path / "out", stage=stage, world_size=3))
    assert_same(found, expect(run, source, stage, 3), rest=False)


@pytest.mark.parametrize("target", ["1x2", "2x3", "3x2", "3x1"])
@pytest.mark.parametrize("name", ["zero1-elastic", "zero2-elastic"])
def test_elastic_checkpoints_are_sources(runs: Runs, name: str, target: str, tmp_path: Path) -> None:
    """They hold no hyperparameters, so they can't be a base."""
    stage, ranks = parse(target)
    base, source = runs["llama"], load(runs[name].checkpoint(6))
    out = tmp_path / "out"
    merge(base.checkpoint(4), out, {"*": runs[name].checkpoint(6)}, stage=stage, world_size=ranks)
    wanted = expect(base, load(base.checkpoint(4)), stage, ranks)
    wanted.states, wanted.steps = source.states, source.steps
    assert_same(load(out), wanted, rest=False)


# Round trips


ROUND_TRIPS = [
    *[(name, ["x3", ""]) for name in ("zero3", "zero2", "zero2-rr", "zero1-bf16opt", "zero2-aligned", "llama-sub")],
    *[(name, ["x1", "x4", ""]) for name in ("zero2-layer", "zero1", "zero2-fp16", "zero2-frozen", "zero2-extras")],
    *[(name, ["x2", ""]) for name in ("llama-extras-w3", "zero2-rr-w3", "llama-sub-w3", "qwen2-w3")],
    *[(name, ["2x2", "1x2", ""]) for name in ("zero3", "zero3-layer", "llama-frozen", "llama-tied", "llama-fp16")],
    *[(name, ["2x3", "1x4", ""]) for name in ("llama-sub", "llama-cpu-adam", "mixtral")],
    *[(name, ["3x3", ""]) for name in ("zero2", "zero2-rr", "zero1-extras-layer", "zero2-aligned", "zero2-tied")],
    ("zero1-bf16opt", ["2x3", ""]),
    ("zero1-bf16opt", ["3x3", ""]),
]


@pytest.mark.parametrize(("name", "way"), long_but(ROUND_TRIPS[::3], ROUND_TRIPS))
def test_a_round_trip_gives_back_the_same_bytes(runs: Runs, name: str, way: list[str], tmp_path: Path) -> None:
    run = runs[name]
    first = convert(run.checkpoint(6), tmp_path / "first")  # in the base's own layout, but with zeros as padding
    last, wanted = run.checkpoint(6), load(run.checkpoint(6))
    rest, flat_ids = wanted.rest, wanted.flat_ids
    for number, station in enumerate(way):
        stage, _, ranks = station.partition("x")
        layout = int(stage or run.spec.stage), int(ranks or run.spec.ranks)
        last = convert(last, tmp_path / f"station-{number}", stage=layout[0], world_size=layout[1])
        wanted.states = expect(run, wanted, *layout).states  # ranks that are gone on the way take their buffers along
    assert_same(load(last), Snapshot(wanted.states, wanted.steps, flat_ids, rest), rest=False)
    lost = ["param_alignment_paddings"] if any(station.startswith("3") for station in way) else []
    if run.spec.extras:  # they are there, but not always each rank's own
        lost.append("module")
    assert not [*differences(trees(last, *lost), trees(first, *lost))]


def trees(checkpoint: Path, *without: str) -> dict[str, Any]:
    """Everything in a checkpoint that a resume reads, but for some keys."""
    files: dict[str, Any] = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.suffix == ".pt":
            files[name] = torch.load(path, weights_only=False)
            for key in without:
                files[name].pop(key, None)
                files[name].get("optimizer_state_dict", {}).pop(key, None)
        elif path.suffix == ".safetensors":
            files[name] = dict(sorted(load_file(path).items()))
        elif path.name in ("latest", "trainer_state.json"):
            files[name] = path.read_bytes()
    return files


@pytest.mark.parametrize(
    ("source", "stock"),
    [
        *[("zero3", "llama-w3"), ("llama-w3", "zero3"), ("zero3-layer", "llama-layer-w3")],
        *[("llama-sub", "llama-sub-w3"), ("llama-sub-w3", "llama-sub")],
        *[("zero2", "zero2-w3"), ("zero2-w3", "zero2"), ("zero1", "zero1-w3"), ("zero2-layer", "zero2-layer-w3")],
        *[("zero2-rr", "zero2-rr-w3"), ("zero2-rr-w3", "zero2-rr"), ("zero2-aligned", "zero2-aligned-w3")],
        *[("zero1-bf16opt", "zero1-bf16opt-w3"), ("zero2-extras", "zero1-extras-w3")],
        *[("zero3", "zero2"), ("zero3", "zero1"), ("zero2", "zero3"), ("zero1", "zero2"), ("zero2", "llama-w3")],
        *[("llama-fp32", "zero1-fp32"), ("llama-frozen", "zero2-frozen")],
        *[("zero2-frozen", "llama-frozen"), ("qwen2", "zero2-tied"), ("zero1-extras-layer", "llama-extras-layer")],
        *[("llama-extras-layer", "zero1-extras-layer"), ("zero2-layer", "zero3-layer"), ("zero3-layer", "zero2-layer")],
        *[("zero2-rr", "zero1-rr"), ("zero1-bf16opt", "zero2"), ("zero1-bf16opt", "zero3")],
        *[("zero2-fp32-grads", "zero1-bf16opt-w3"), ("zero3-fp32-grads", "zero1-bf16opt")],
    ],
)
def test_the_files_are_like_those_that_stock_writes(runs: Runs, source: str, stock: str, tmp_path: Path) -> None:
    """After as many steps in the other layout: the same keys, shapes, counters, paddings and names everywhere."""
    other = runs[stock].spec
    out = convert(runs[source].checkpoint(6), tmp_path / "out", stage=other.stage, world_size=other.ranks)
    ours, theirs = (shapes(checkpoint) for checkpoint in (out, runs[stock].checkpoint(6)))
    if other.round_robin:  # stock's own mappings are wrong
        for tree in (*ours.values(), *theirs.values()):
            tree.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
    if runs[source].spec.stage == 3 or is_bf16_optimizer(runs[source].spec, runs[source].spec.stage):
        for tree in theirs.values():  # newer versions write it, even if all zero, and no version asks for it
            paddings = tree.get("optimizer_state_dict", {}).pop("param_alignment_paddings", [])
            assert not any(map(any, paddings))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert not unlike(ours[name], theirs[name], name)


def shapes(checkpoint: Path) -> dict[str, Any]:
    tag = checkpoint / (checkpoint / "latest").read_text()
    found = {path.name: _bare(torch.load(path, weights_only=False)) for path in tag.glob("*.pt")}
    for tree in found.values():
        tree.pop("ds_config")
        tree.pop("global_samples", None)
    return found


def _bare(value: Any) -> Any:
    """Return a tree that can be compared: of tensors only what depends on the layout and not on the training."""
    if isinstance(value, torch.Tensor):
        is_whole = not value.dtype.is_floating_point or not value.dim()
        return (str(value.dtype), tuple(value.shape), value.tolist() if is_whole else None)
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return [_bare(item) for item in value]
    if type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__") and not isinstance(value, int):
        return {type(value).__name__: {key: _bare(item) for key, item in vars(value).items()}}
    return value


def unlike(ours: Any, theirs: Any, where: str) -> list[str]:
    """Tell of each place in which two trees differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [f"{where}: {sorted(map(str, ours.keys() ^ theirs.keys()))}"] if ours.keys() != theirs.keys() else []
        if not found and list(ours) != list(theirs) and where.endswith(("param_shapes", "module")):
            found = [f"{where}: another order"]
        return found + [each for key in ours.keys() & theirs.keys()
                        for each in unlike(ours[key], theirs[key], f"{where}/{key}")]  # fmt: skip
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [each for i, pair in enumerate(zip(ours, theirs, strict=True)) for each in unlike(*pair, f"{where}/{i}")]
    return [] if ours == theirs else [f"{where}: {ours}, not {theirs}"]


# Sources of several layouts in one recipe


@pytest.mark.parametrize(
    ("base", "sources", "target"),
    [
        ("zero3", ["llama-w3", "zero2", "zero1-w3"], "3x2"),
        ("zero2-rr-w3", ["zero2-rr", "zero3-b", "zero2-aligned"], "2x2"),
        ("llama-sub-w3", ["zero1-bf16opt", "zero2-elastic", "zero2-rr-w3"], "3x4"),
        ("zero1-bf16opt", ["zero3", "zero2-w3", "llama-sub"], "1x3"),
        ("zero2-layer", ["zero3-layer", "zero2-layer-w3", "llama-layer-w3"], "2x4"),
        ("zero3-layer", ["zero2-layer", "zero2-layer-w3", "llama-layer-w3"], "1x1"),
        ("zero2-extras", ["zero1-extras-w3", "llama-extras", "zero1-extras-w3"], "3x3"),
        ("llama-extras", ["zero1-extras-w3", "zero2-extras", "zero1-extras-w3"], "3x4"),
        ("zero1-extras-w3", ["llama-extras", "zero2-extras", "llama-extras"], "2x3"),
        ("zero1-extras-w3", ["llama-extras", "zero2-extras", "llama-extras"], "3x3"),
    ],
)
def test_sources_of_several_layouts_in_one_recipe(
    runs: Runs, base: str, sources: list[str], target: str, tmp_path: Path
) -> None:
    stage, ranks = parse(target)
    parts: Sequence[str | int] = ["embed_tokens", 1, "norm"]
    chosen = {part: runs[name].checkpoint(step) for part, name, step in zip(parts, sources, (2, 4, 6), strict=True)}
    out = tmp_path / "out"
    merge(runs[base].checkpoint(6), out, chosen, stage=stage, world_size=ranks)
    layout = expect(runs[base], load(runs[base].checkpoint(6)), stage, ranks)
    snapshots = {"base": load(runs[base].checkpoint(6))} | {str(part): load(path) for part, path in chosen.items()}
    for snapshot in snapshots.values():
        for name, copies in snapshot.kind(BUFFER).items():
            rows = [rank % len(copies) if stage == 3 else 0 for rank in range(ranks)]
            snapshot.states[State(name, BUFFER)] = copies[rows]
    wanted = compose(snapshots, "base", lambda name: str(part_of(name)) if part_of(name) in chosen else "base", layout)
    found = load(out)
    assert_same(found, wanted, rest=False)
    if stage < 3:
        assert_module_is_rounded(out, found, DTYPES[runs[base].spec.dtype])
        assert_slice_mappings(out, found, ranks)


# DeepSpeed's own tools


UNIVERSAL = [
    *[("zero3", "3x3"), ("llama-sub", "3x3"), ("llama-frozen", "3x4"), ("zero2-rr", "3x3"), ("zero2-tied", "3x3")],
    *[("zero2", "2x3"), ("zero2-layer", "2x1"), ("zero1", "1x4"), ("zero3", "2x4"), ("llama-sub-w3", "1x2")],
    *[("zero1-bf16opt", "1x3"), ("zero2-fp16", "2x3"), ("zero2-frozen", "2x3"), ("zero2-extras", "2x3")],
    ("zero2-tied", "2x3"),
]


@pytest.mark.parametrize(("name", "target"), long_but(UNIVERSAL[1::3], UNIVERSAL))
def test_ds_to_universal_reads_the_same_states(runs: Runs, name: str, target: str, tmp_path: Path) -> None:
    stage, ranks = parse(target)
    out = convert(runs[name].checkpoint(6), tmp_path / "out", stage=stage, world_size=ranks)
    assert_universal_agrees(load(runs[name].checkpoint(6)), out, tmp_path)


# Stock resumes


RESUMES = [
    *[("zero3", "3x3"), ("zero3-layer", "3x3"), ("zero2", "2x3"), ("zero2-layer", "2x3"), ("zero1-bf16opt", "1x3")],
    *[("zero2", "3x3"), ("zero2-rr", "2x3"), ("zero2-aligned", "2x3"), ("zero2-fp16", "2x3"), ("zero2-tied", "2x3")],
    *[("zero1-extras-layer", "3x3"), ("zero1-fp32", "1x3"), ("zero2-frozen", "2x3"), ("zero1-bf16opt-rr", "1x3")],
    *[("zero2-frozen", "1x3"), ("zero1-extras-layer", "1x3"), ("zero3-fp32-grads", "1x3"), ("zero2-fp32-grads", "1x3")],
    *[("llama-extras-w3", "1x2"), ("zero1-bf16opt", "3x3"), ("zero1-bf16opt-rr", "2x3")],
    *[("llama-w3", "3x2"), ("llama-sub-w3", "3x2"), ("llama-extras-w3", "3x2"), ("zero2-w3", "2x2")],
    ("llama-sub-w3", "1x2"),
    *[("zero2-rr-w3", "2x2"), ("zero2-layer-w3", "2x2"), ("llama-w3", "2x2"), ("llama-layer-w3", "1x2")],
    *[("zero1-w3", "1x2"), ("zero1-bf16opt-w3", "1x2"), ("llama-extras-w3", "2x2"), ("zero2-aligned-w3", "2x2")],
    *[("zero1-rr", "1x3"), ("qwen2-w3", "2x2"), ("zero1-bf16opt-w3", "2x2"), ("zero2-rr-w3", "1x2")],
    *[("zero3", "3x1"), ("zero2", "2x1"), ("zero2-rr", "2x1"), ("zero3", "1x1"), ("zero1-bf16opt", "1x1")],
]
"""Run and target. All ranks together see six samples in a step, whatever their number."""
SHORT_RESUMES = {
    *[("zero1-bf16opt", "1x3"), ("zero1-extras-layer", "3x3"), ("zero2-fp16", "2x3")],
    *[("llama-sub-w3", "1x2"), ("zero2-rr-w3", "2x2"), ("zero2-aligned", "2x3")],
}


@pytest.fixture(scope="module")
def resumed(
    runs: Runs, train: Train, selected: set[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Run]:
    """Stock resumes at `MIDDLE` in another layout."""
    root, specs = tmp_path_factory.mktemp("resharded"), []
    wanted = [case for case in RESUMES if case in selected]
    for name, target in wanted:
        stage, ranks = parse(target)
        run = runs[name]
        out = root / name / target / f"checkpoint-{MIDDLE}"
        convert(run.checkpoint(MIDDLE), out, stage=stage, world_size=ranks)
        changes = {"stage": stage, "ranks": ranks, "per_device_batch": 6 // ranks, "save_steps": run.spec.steps}
        specs.append(run.spec.resumed(out, f"{name} to {target}", **changes))
    done = train(specs)
    return {(name, target): done[f"{name} to {target}"] for name, target in wanted}


@pytest.mark.parametrize(("name", "target"), long_but(SHORT_RESUMES, RESUMES))
def test_stock_loads_what_the_source_held_and_goes_on(
    resumed: dict[tuple[str, str], Run], runs: Runs, name: str, target: str
) -> None:
    """Same samples in every step as on the source's ranks; only the order in which gradients are summed differs."""
    stage, ranks = parse(target)
    source = load(runs[name].checkpoint(MIDDLE))
    assert_loaded(resumed[name, target], expect(runs[name], source, stage, ranks), source.rest)
    straight, after = runs[name].after(MIDDLE), resumed[name, target].losses
    print(f"{name} to {target}: {straight} there, {after} here", file=sys.stderr)
    assert after == pytest.approx(straight, abs=NOISE)


@pytest.mark.parametrize("name", ["llama", "llama-sub-w3", "zero2-w3"])
def test_what_gradients_are_clipped_at_comes_from_the_source(runs: Runs, name: str, tmp_path: Path) -> None:
    """A file of ZeRO-1/2 states it, ZeRO-3 leaves it to the config: with neither, DeepSpeed's own default counts."""
    run = runs[name]
    out = convert(run.checkpoint(6), tmp_path / "out", stage=2, world_size=1)
    (path,) = (out / "global_step6").glob("*_optim_states.pt")
    made = torch.load(path, weights_only=False)
    assert ("gradient_clipping" in made["ds_config"]) == run.spec.clipping
    stated = run.spec.clipping or run.spec.stage < 3
    assert made["optimizer_state_dict"].get("clip_grad") == (1.0 if stated else None)
    assert max(log["grad_norm"] for log in run.logs.values()) > 1  # else it would not matter
