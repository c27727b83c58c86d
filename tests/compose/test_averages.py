"""Weighted sums as planned and written, against torch, and whole merges of averages over small ZeRO-3 checkpoints."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import llmtailor
from helpers.cases import examples
from helpers.checkpoints import SMALL, edit, make, make_run, optim_states
from helpers.indexes import make_index
from helpers.states import DTYPES, assert_states, mean, raw
from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.layout import Blend, Bytes, FileLayout, Plan, Slot, Term, Zeros
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.checkpoint.placement import Extent, Sliced
from llmtailor.checkpoint.sources import Mix, Sources
from llmtailor.cli.tables import parts_text
from llmtailor.compose.fill import plan_composite
from llmtailor.compose.plan import Options, explain_recipe, plan_merge
from llmtailor.compose.write import write
from llmtailor.copying import copy as blending
from llmtailor.copying.copy import execute
from llmtailor.copying.pool import Stop
from llmtailor.copying.recheck import read_again
from llmtailor.copying.staging import peek
from llmtailor.errors import Interrupted, MismatchError, SourceError
from llmtailor.formats.registry import display_name, find_structure, index_checkpoint
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER, MODULE, WEIGHT, State
from llmtailor.recipe.parse import parse_recipe
from llmtailor.runs.folder import RunFolder
from llmtailor.storage.casts import add
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle import zero3
from oracle.zero3 import Snapshot
from synthetic import pickled_as_deepspeed
from thin.scene import save_partial

# --- sums -------------------------------------------------------------------------------------------------------------


def oracle(values: list[torch.Tensor], shares: list[float], dtype: str) -> torch.Tensor:
    total = values[0].double() * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total = total + value.double() * share
    return total.float().to(DTYPES[dtype])


@st.composite
def cases(draw):
    numel = draw(st.integers(1, 60))
    weights = draw(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4))
    cuts = [(draw(st.sampled_from([1, 2, 3, 7])), draw(st.sampled_from(["F32", "BF16", "F16"]))) for _ in weights]
    return numel, [weight / sum(weights) for weight in weights], cuts, draw(st.integers(1, 4)), draw(st.integers(0, 9))


@given(cases())
@settings(max_examples=examples(30, 60))
def test_any_cuts_and_dtypes_give_the_sum_of_the_oracle(tmp_path_factory, case):
    """Of masters cut over any ranks, and of the weights and the module made from them, cut in another way."""
    numel, shares, cuts, ranks, seed = case
    generator = torch.Generator().manual_seed(seed)
    values, indexes = [], []
    for world, dtype in cuts:
        root = tmp_path_factory.mktemp("source")
        value = (torch.randn(numel, generator=generator) * 3).to(DTYPES[dtype])
        part, size = -(-numel // world), value.element_size()
        for rank in range(world):
            own = raw(value[rank * part : (rank + 1) * part]).ljust(part * size, b"\xab")
            (root / f"rank{rank}").write_bytes(b"hdr" + own)
        shards = tuple(Extent(f"rank{rank}", 3, 3 + part * size) for rank in range(world))
        held = {State("w", MASTER): TensorEntry(dtype, (numel,), Sliced(shards, 0, part, size))}
        indexes.append(make_index(root, held=held))
        values.append(value)
    part = -(-numel // ranks)
    runs = [(min(rank * part, numel), min((rank + 1) * part, numel)) for rank in range(ranks)]
    kinds = ((MASTER, "F32"), (WEIGHT, "BF16"), (MODULE, "F16"))
    layouts = [
        FileLayout(f"{kind}-{rank}", (Bytes(b"h", "head"), Slot(State("w", kind), dtype, *run)))
        for kind, dtype in kinds
        for rank, run in enumerate(runs)
    ]
    sources = Sources({"w": 0}, averages={"w": Mix(())}, sums={State("w", MASTER): tuple(enumerate(shares))})

    plan = plan_composite(layouts, indexes, sources, base=0)

    out = tmp_path_factory.mktemp("out")
    results = execute(plan, out)
    for kind, dtype in kinds:
        written = b"".join((out / f"{kind}-{rank}").read_bytes()[1:] for rank in range(ranks))
        assert written == raw(oracle(values, shares, dtype)), kind
    runs_of = [run for result in results for run in result.runs() if run.state.kind == MASTER]
    assert sum(run.num_bytes for run in runs_of) == 4 * numel
    assert plan.summary.moved == {("w", 0): 8 * numel}
    assert dict(plan.summary.shared) == dict.fromkeys(range(1, len(shares)), 8 * numel)
    assert {source for source, _ in plan.summary.read} == set(range(len(shares)))


ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, float("inf"), -float("inf"), 1 / 3, -1e-30], dtype=torch.float32)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), st.sampled_from(["F32", "BF16"]))
def test_the_average_of_one_value_is_that_value_bit_for_bit(weights, dtype):
    value = torch.cat([ODD, torch.randn(500, generator=torch.Generator().manual_seed(0))]).to(DTYPES[dtype])
    terms = [(raw(value), dtype, weight / sum(weights)) for weight in weights]
    assert add(terms, dtype) == raw(value)


def test_what_is_not_finite_stays_so():
    inf, nan = float("inf"), float("nan")
    pairs = torch.tensor([[inf, 1.0], [inf, -inf], [nan, 1.0], [3e38, 3e38]], dtype=torch.float32)
    found = np.frombuffer(add([(raw(column), "F32", 0.5) for column in pairs.T], "F32"), "<f4")
    assert found[0] == inf and np.isnan(found[1]) and np.isnan(found[2]) and found[3] == np.float32(3e38)


@pytest.fixture
def written(tmp_path):
    """A file of sums over two files of two sources each, longer than a chunk"""
    data = np.random.default_rng(0)
    roots = [tmp_path / name for name in "ab"]
    for root in roots:
        root.mkdir()
        for name in ("one", "two"):
            (root / name).write_bytes(b"h" + data.standard_normal(1000, "f4").tobytes())
    pieces = tuple(
        Blend(
            tuple(Term(Extent(name, 1, 4001), "F32", 0.5, source) for source in (0, 1)),
            1000,
            "F32",
            1,
            State("w", MASTER),
            begin,
        )
        for begin, name in ((0, "one"), (1000, "two"))
    )
    plan = Plan(tuple(map(str, roots)), (FileLayout("f", (*pieces, Zeros(3, "end"))),))
    return plan, execute(plan, tmp_path / "out"), roots


@pytest.mark.parametrize("chunk", [7, 1 << 15])
def test_sources_of_a_sum_are_read_again(written, monkeypatch, chunk):
    monkeypatch.setattr(blending, "CHUNK_ELEMENTS", chunk)
    plan, results, roots = written
    files = plan.summary.read
    assert files == ((0, "one"), (0, "two"), (1, "one"), (1, "two"))
    assert len(read_again(plan, results, files, lambda num_bytes: None, Stop())) == 4
    (roots[1] / "two").write_bytes(b"x" + (roots[1] / "two").read_bytes()[1:])  # no sum has this byte
    read_again(plan, results, files, lambda num_bytes: None, Stop())
    whole = bytearray((roots[1] / "two").read_bytes())
    whole[400] ^= 0x80
    (roots[1] / "two").write_bytes(whole)
    read_again(plan, results, [(0, "one"), (1, "one")], lambda num_bytes: None, Stop())
    with pytest.raises(SourceError, match="changed") as error:
        read_again(plan, results, [(1, "one"), (1, "two")], lambda num_bytes: None, Stop())
    assert [problem.where for problem in error.value.problems] == [str(roots[1] / "two")]


# --- merges -----------------------------------------------------------------------------------------------------------

BETAS = {EXP_AVG: 0.9, EXP_AVG_SQ: 0.999}
ALL = {"merge_method": "linear", "base_model": "checkpoint-20", "parameters": {"weight": 1}}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Steps 10 and 30 on two ranks, step 20 on three with several sub-groups"""
    root = tmp_path_factory.mktemp("run")
    make(root, 10)
    make(root, 20, world_size=3, sub_group_size=100)
    make(root, 30)
    make(root / "layered", 10, groups="layer")
    make(root / "layered", 20, groups="layer")
    return root


def load(checkpoint: Path) -> Snapshot:
    with pickled_as_deepspeed():
        return zero3.load(checkpoint)


def write_recipe(folder: Path, content: Mapping[str, Any], name: str = "recipe.yaml") -> Path:
    (folder / name).write_text(yaml.safe_dump(dict(content)))
    return folder / name


def average(run: Path, out: Path, content: Mapping[str, Any], **options: Any) -> tuple[Snapshot, Any]:
    report = llmtailor.merge(write_recipe(run, content), out, Options(**options))
    assert verify_checkpoint(out, deep=True).level == RESUMABLE
    return load(out), report


def models(*steps: int) -> list[dict[str, str]]:
    return [{"model": f"checkpoint-{step}"} for step in steps]


@pytest.mark.parametrize("moments", ["newest", "average", "reset"])
def test_an_average_of_everything(run, tmp_path, moments):
    """The base has other ranks and sub-groups than its sources, and is none of them."""
    found, report = average(run, tmp_path / "out", {**ALL, "models": models(10, 30), "moments": moments})
    sources = [load(run / f"checkpoint-{step}") for step in (10, 30)]
    wanted = dict(sources[1].states)
    for state in wanted:
        values = [source.states[state] for source in sources]
        if state.kind == MASTER:
            wanted[state] = mean(values, [1, 1])
            wanted[State(state.param, WEIGHT)] = wanted[state].bfloat16()
        elif state.kind in BETAS and moments == "average":
            beta = BETAS[state.kind]
            unbiased = [value.double() / (1 - beta**step) for value, step in zip(values, (10, 30), strict=True)]
            wanted[state] = (sum(unbiased) / 2 * (1 - beta**30)).float()
        elif state.kind in BETAS and moments == "reset":
            wanted[state] = torch.zeros_like(values[1])
    if moments == "average":  # factors are multiplied first: the last bit may differ
        for state in [state for state in wanted if state.kind in BETAS]:
            torch.testing.assert_close(found.states[state], wanted[state], rtol=1e-6, atol=0)
            wanted[state] = found.states[state]
    assert_states(found.states, wanted)
    assert set(found.steps.values()) == {0 if moments == "reset" else 30}
    assert found.rest["trainer_state"]["global_step"] == 20
    names = [display_name(run / f"checkpoint-{step}") for step in (10, 30)]
    assert {row.source for row in report.parts} == {f"average of {names[0]} (0.5), {names[1]} (0.5)"}
    assert {row.step for row in report.parts} == {30} and all(row.is_whole for row in report.parts)
    manifest = json.loads((tmp_path / "out/llmtailor.json").read_text())
    assert manifest["parts"][0]["source"] == report.parts[0].source
    assert sum(row.num_bytes for row in report.parts) == sum(
        tensor.numel() * tensor.element_size() for tensor in found.states.values()
    )


@pytest.mark.parametrize("moments", ["newest", "average"])
def test_the_average_of_a_checkpoint_with_itself_is_that_checkpoint(run, tmp_path, moments):
    content = {**ALL, "parameters": {"weight": 0.3}, "models": models(20, 20, 20), "moments": moments}
    found, _ = average(run, tmp_path / "out", content)
    source = load(run / "checkpoint-20")
    assert_states(found.states, source.states)
    assert found.steps == source.steps


def test_averaged_parts_beside_others(run, tmp_path):
    members = [{"from": "checkpoint-30", "weight": 3}, {"from": "checkpoint-10", "weight": 1}]
    content = {
        "base_model": "checkpoint-20",
        "parts": [{"average": members, "select": [0, "norm"]}, {"from": "checkpoint-10", "select": 1}],
    }
    found, report = average(run, tmp_path / "out", content)
    of = {step: load(run / f"checkpoint-{step}").states for step in (10, 20, 30)}
    wanted = {}
    for state in of[20]:
        if ".layers.1." in state.param:
            wanted[state] = of[10][state]
        elif ".layers.0." in state.param or state.param == "model.norm.weight":
            master = State(state.param, MASTER)
            blend = mean([of[30][master], of[10][master]], [3, 1])
            wanted[state] = {MASTER: blend, WEIGHT: blend.bfloat16()}.get(state.kind, of[30][state])
        else:
            wanted[state] = of[20][state]
    assert_states(found.states, wanted)
    rows = {row.part: row for row in report.parts}
    assert rows["layer 0"].source.startswith("average of ") and rows["layer 0"].staleness == -10
    assert rows["layer 1"].source.endswith("checkpoint-10") and rows["lm_head"].source.endswith("checkpoint-20")
    taken = {Path(row.name).name: row.num_bytes for row in report.sources}
    averaged = sum(row.num_bytes for part, row in rows.items() if part in ("layer 0", "norm"))
    assert taken["checkpoint-30"] == averaged
    assert taken["checkpoint-10"] == averaged * 6 // 14 + rows["layer 1"].num_bytes  # masters and weights, of both


def test_a_moving_average_and_its_normal_form(run, tmp_path):
    content = {"merge_method": "ema", "models": models(30, 10, 20), "parameters": {"decay": 0.5}}
    found, _ = average(run, tmp_path / "out", content)
    sources = [load(run / f"checkpoint-{step}").states for step in (10, 20, 30)]
    for state in (state for state in found.states if state.kind == MASTER):
        assert not zero3.differ(found.states[state], mean([source[state] for source in sources], [1, 2, 4]))
    text = explain_recipe(write_recipe(run, content), run)
    assert "{from: checkpoint-10, weight: 0.125}" in text and "moments: newest" in text
    again = parse_recipe(text, name="again", folder=run, environ={})
    llmtailor.merge(again, tmp_path / "again")
    assert_states(load(tmp_path / "again").states, found.states)


def test_the_plan_of_an_average_as_new_as_its_base_shows_its_sources(run, tmp_path):
    recipe = write_recipe(run, {**ALL, "models": models(10, 20)})
    report = plan_merge(recipe, tmp_path / "out").report
    assert not any(row.staleness for row in report.parts)
    assert "average of" in (told := parts_text(report)) and "nothing is older" not in told


def test_resetting_some_groups(run, tmp_path):
    """Each layer has its own step."""
    members = [{"from": f"checkpoint-{step}", "weight": 1} for step in (10, 20)]
    part = {"average": members, "select": 0, "moments": "reset"}
    found, _ = average(run / "layered", tmp_path / "out", {"base_model": "checkpoint-20", "parts": [part]})
    for state, tensor in found.states.items():
        if state.kind in BETAS:
            assert (not tensor.any()) == (".layers.0." in state.param)
    assert {param for param, step in found.steps.items() if step == 0} == {
        param for param in found.steps if ".layers.0." in param
    }


def refusal(run: Path, content: Mapping[str, Any], **options: Any) -> list[Any]:
    with pytest.raises(MismatchError) as error:
        plan_merge(write_recipe(run, content), run / "never", Options(**options))
    return list(error.value.problems)


def test_resetting_a_part_of_a_group_is_refused(run):
    part = {"average": [{"from": "checkpoint-10", "weight": 1}], "select": 0, "moments": "reset"}
    (problem,) = refusal(run, {"base_model": "checkpoint-30", "parts": [part]})
    assert "share Adam's step with params whose moments are kept" in problem.what and "embed_tokens" in problem.what
    assert "--groups layer" in problem.fix
    plan_merge(run / "recipe.yaml", run / "never", Options(groups="layer"))


def set_betas(tree: Any) -> None:
    for group in tree["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
        group["betas"] = (0.9, 0.95)


def test_moments_of_other_betas_are_not_averaged(run, tmp_path):
    make_run(tmp_path, (10, 20))
    for rank in (0, 1):
        edit(optim_states(tmp_path / "checkpoint-10", rank), set_betas)
    (problem,) = refusal(tmp_path, {**ALL, "models": models(10, 20), "moments": "average"})
    assert "different betas" in problem.what and "moments: newest" in problem.fix
    average(tmp_path, tmp_path / "out", {**ALL, "models": models(10, 20)})


def test_sources_must_hold_what_is_averaged(tmp_path):
    """A partial checkpoint, for a part that it holds and one that it does not."""
    whole = [make(tmp_path, step) for step in (20, 25, 30)]
    parts = find_structure(index_checkpoint(whole[0])).parts
    save_partial(tmp_path, whole[2], ["layer 0"], save_partial(tmp_path, whole[1], parts, Ledger("saver")))
    partial = RunFolder(tmp_path).at(30)
    part = {"average": [{"from": str(partial), "weight": 1}, {"from": "checkpoint-20", "weight": 1}]}
    found, _ = average(tmp_path, tmp_path / "out", {"base_model": "checkpoint-20", "parts": [{**part, "select": 0}]})
    values = [load(path).states for path in (whole[2], whole[0])]
    state = State("model.layers.0.self_attn.q_proj.weight", MASTER)
    assert not zero3.differ(found.states[state], mean([value[state] for value in values], [1, 1]))
    (problem,) = refusal(tmp_path, {"base_model": "checkpoint-20", "parts": [{**part, "select": "layers"}]})
    assert problem.where == display_name(partial) and "it does not hold the" in problem.what
    assert "master of model.layers.1." in problem.what


def test_other_models_are_refused(run, tmp_path):
    make(tmp_path, 20)
    make(tmp_path, 10, shape=replace(SMALL, intermediate_size=12))
    problems = refusal(tmp_path, {**ALL, "models": models(10, 20)})
    assert any("shapes differ from the base's" in problem.what for problem in problems)


def test_an_interrupted_average_goes_on(run, tmp_path):
    """And a source that changed in the meantime is found, although half of the sum was written by the earlier run."""
    recipe = write_recipe(run, {**ALL, "models": models(10, 20), "moments": "average"})
    whole = plan_merge(recipe, tmp_path / "whole")
    write(whole)
    wanted = load(tmp_path / "whole").states
    for changes in (False, True):
        out = tmp_path / f"out-{changes}"
        done = 0

        def stop_late(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if 10 * done > 9 * whole.plan.num_bytes >= 10 * (done - num_bytes):
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(Interrupted, match="rerun the same command; it resumes with"):
            write(plan_merge(recipe, out), stop_late)
        assert any("optim_states" in path for path in peek(out).marks)
        if not changes:
            assert write(plan_merge(recipe, out)).kept_bytes > 0
            assert_states(load(out).states, wanted)
            continue
        paths = [optim_states(run / "checkpoint-10", rank) for rank in (0, 1)]
        before = [(path.read_bytes(), path.stat()) for path in paths]
        index = whole.indexes[next(n for n, one in enumerate(whole.indexes) if one.global_step == 10)]
        try:
            for path, (data, stat) in zip(paths, before, strict=True):
                spoilt = bytearray(data)
                for state, held in index.held.items():
                    if state.kind == MASTER:
                        for piece in held.place.cover(0, held.numel):
                            if index.root / piece.extent.path == path:
                                spoilt[piece.extent.start + 3] ^= 0x80
                path.write_bytes(spoilt)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            with pytest.raises(SourceError, match="the file changed while it was read") as error:
                write(plan_merge(recipe, out))
            assert {problem.where for problem in error.value.problems} & {str(path) for path in paths}
            assert not out.exists()
        finally:
            for path, (data, stat) in zip(paths, before, strict=True):
                path.write_bytes(data)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_checksums_of_all_sources(run, tmp_path):
    report = llmtailor.merge(
        write_recipe(run, {**ALL, "models": models(10, 20)}), tmp_path / "out", Options(checksum=True)
    )
    assert len(report.sources) == 2
    manifest = json.loads((tmp_path / "out/llmtailor.json").read_text())
    for source in manifest["sources"]:
        digests = [file for file in source["files"] if file["path"].endswith("optim_states.pt")]
        assert digests and all(any("xxh" in key or "digest" in key for key in file) for file in digests)
