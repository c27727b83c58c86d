"""Weighted sums as planned and written, against torch: fp64 sum, rounded to fp32, then to the dtype of the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cases import examples
from helpers.indexes import make_index
from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.layout import Blend, Bytes, FileLayout, Plan, Slot, Term, Zeros
from llmtailor.checkpoint.placement import Contiguous, Extent, Sliced
from llmtailor.checkpoint.sources import Mix, Sources
from llmtailor.compose.fill import plan_composite
from llmtailor.engine import copy as blending
from llmtailor.engine.copy import execute
from llmtailor.engine.pool import Stop
from llmtailor.engine.recheck import read_again
from llmtailor.errors import SourceError
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.casts import add

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def oracle(values: list[torch.Tensor], shares: list[float], dtype: str) -> torch.Tensor:
    total = values[0].double() * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total = total + value.double() * share
    return total.float().to(TORCH[dtype])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


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
        value = (torch.randn(numel, generator=generator) * 3).to(TORCH[dtype])
        part, size = -(-numel // world), value.element_size()
        for rank in range(world):
            own = bits(value[rank * part : (rank + 1) * part]).ljust(part * size, b"\xab")
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
        assert written == bits(oracle(values, shares, dtype)), kind
    runs_of = [run for result in results for run in result.runs() if run.state.kind == MASTER]
    assert sum(run.num_bytes for run in runs_of) == 4 * numel
    assert plan.summary.moved == {("w", 0): 8 * numel}
    assert dict(plan.summary.shared) == dict.fromkeys(range(1, len(shares)), 8 * numel)
    assert {source for source, _ in plan.summary.read} == set(range(len(shares)))


ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, float("inf"), -float("inf"), 1 / 3, -1e-30], dtype=torch.float32)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), st.sampled_from(["F32", "BF16"]))
def test_the_average_of_one_value_is_that_value_bit_for_bit(weights, dtype):
    value = torch.cat([ODD, torch.randn(500, generator=torch.Generator().manual_seed(0))]).to(TORCH[dtype])
    terms = [(bits(value), dtype, weight / sum(weights)) for weight in weights]
    assert add(terms, dtype) == bits(value)


def test_what_is_not_finite_stays_so():
    inf, nan = float("inf"), float("nan")
    pairs = torch.tensor([[inf, 1.0], [inf, -inf], [nan, 1.0], [3e38, 3e38]], dtype=torch.float32)
    found = np.frombuffer(add([(bits(column), "F32", 0.5) for column in pairs.T], "F32"), "<f4")
    assert found[0] == inf and np.isnan(found[1]) and np.isnan(found[2]) and found[3] == np.float32(3e38)


def test_no_terms_are_zeros(tmp_path):
    state = State("w", EXP_AVG)
    held = TensorEntry("F32", (5,), Contiguous(Extent("x", 0, 20), 4))
    index = make_index(tmp_path, held={state: held, State("w", EXP_AVG_SQ): held})
    sources = Sources({"w": 0}, averages={"w": Mix(())}, sums={state: ()})
    plan = plan_composite([FileLayout("f", (Slot(state, "F32", 1, 4),))], [index], sources, base=0)
    assert plan.files[0].pieces == (Blend((), 3, "F32", 0, state, 1),)
    (result,) = execute(plan, tmp_path / "out")
    assert (tmp_path / "out/f").read_bytes() == bytes(12)
    assert [(run.state, run.begin, run.num_bytes) for run in result.runs()] == [(state, 1, 12)]


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
