"""The planner: what is rounded, cut over several sources, and which steps it chooses.

That pieces tile every file, and the bytes that they name, is proven in test_merge_property and average/test_merge.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.indexes import make_index
from llmtailor.checkpoint.elements import gather
from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.layout import Bytes, Cast, Crc, FileLayout, Slot
from llmtailor.checkpoint.optimizer import OptimizerLayout, ParamGroup, SubGroup
from llmtailor.checkpoint.placement import (
    AllZero,
    Box,
    Boxes,
    Cells,
    Contiguous,
    Extent,
    Grid,
    Inside,
    Sliced,
    StridedRuns,
    arrange,
    columns,
)
from llmtailor.checkpoint.sources import SourceRange, Sources
from llmtailor.compose.averages import bias_factor, choose_steps, rebase_scales
from llmtailor.compose.fill import plan_composite
from llmtailor.compose.report import step_notices
from llmtailor.model.dtypes import ITEMSIZE
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER, MODULE, WEIGHT, State

# --- pieces -----------------------------------------------------------------------------------------------------------


def test_a_weight_that_is_not_saved_is_rounded_from_the_master(tmp_path):
    master = TensorEntry("F32", (6,), Sliced((Extent("r0", 0, 12), Extent("r1", 8, 20)), 0, 3, 4))
    index = make_index(tmp_path, held={State("w", MASTER): master})
    layout = FileLayout("model.safetensors", (Bytes(b"h", "header"), Slot(State("w", WEIGHT), "BF16", 0, 6)))
    (file,) = plan_composite([layout], [index], Sources({"w": 0}), base=0).files
    state = State("w", WEIGHT)
    assert file.pieces == (
        Bytes(b"h", "header"),
        Cast(Extent("r0", 0, 12), "F32", "BF16", 0, state, 0),
        Cast(Extent("r1", 8, 20), "F32", "BF16", 0, state, 3),
    )


def test_a_checksum_of_what_comes_later_cannot_be_planned():
    with pytest.raises(ValueError, match="covers bytes after it"):
        FileLayout("f", (Crc(0, 4),))


@given(st.data())
@settings(max_examples=100)
def test_a_state_may_be_cut_over_several_sources(data):
    """And what is rounded from its master with it, but not its moments."""
    numel, world = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 4))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=numel, max_size=numel))
    cuts = tuple(SourceRange(at, at + 1, owner) for at, owner in enumerate(owners))
    part = -(-numel // world)
    shards = tuple(Extent(f"rank{rank}", 0, 4 * part) for rank in range(world))
    held = {State("p", kind): TensorEntry("F32", (numel,), Sliced(shards, 0, part, 4)) for kind in (MASTER, EXP_AVG)}
    indexes = [make_index(held=held) for _ in range(3)]
    sources = Sources({"p": 2}, cuts={State("p", MASTER): cuts}, of_moments={"p": 1})
    begin = data.draw(st.integers(0, numel))
    for kind, dtype in ((MASTER, "F32"), (MODULE, "BF16"), (WEIGHT, "BF16"), (EXP_AVG, "F32")):
        layout = FileLayout("out", (Bytes(b"header", ""), Slot(State("p", kind), dtype, begin, numel)))
        (file,) = plan_composite([layout], indexes, sources, 0).files
        found = []
        for piece in file.pieces[1:]:
            size = piece.num_bytes // (4 if dtype == "F32" else 2)
            assert (piece.extent.path, piece.extent.start) == (f"rank{piece.begin // part}", 4 * (piece.begin % part))
            found += [(piece.begin + at, piece.source) for at in range(size)]
        wanted = owners if kind != EXP_AVG else [1] * numel
        assert found == list(enumerate(wanted))[begin:]
    assert sources.moments_from("p") == {1}
    assert sources.of_any("p") == {2, *owners}


# --- steps ------------------------------------------------------------------------------------------------------------

HYPER = {"betas": (0.9, 0.999)}
GROUPS = (ParamGroup(("a", "b"), HYPER), ParamGroup(("c",), HYPER))
TARGET = OptimizerLayout(3, 2, GROUPS, (SubGroup(0, ("a", "b")), SubGroup(1, ("c",))))


def index(*steps, layout=(("a", "b"), ("c",))):
    cut = enumerate(zip(layout, steps, strict=True))
    return make_index(groups=GROUPS, sub_groups=tuple(SubGroup(number, params, step) for number, (params, step) in cut))


APART = (("a",), ("b",), ("c",))


@pytest.mark.parametrize(
    ("sources", "choice", "expected"),
    [
        # a step travels when all params of a flat id bring it
        ([index(10.0, 10.0), index(5.0, 6.0)], (1, 1, 0), [(5.0, ()), (10.0, ())]),
        # sources that agree need no compromise
        ([index(10.0, 10.0), index(5.0, 5.0), index(5.0, 5.0)], (1, 2, 0), [(5.0, ()), (10.0, ())]),
        # where they differ the base's stays
        ([index(200.0, 200.0), index(100.0, 100.0)], (1, 0, 0), [(200.0, (100.0,)), (200.0, ())]),
        # params that differ in the base itself get its newest, as when one with a step per layer gets fewer groups
        ([index(10.0, 8.0, 3.0, layout=APART)], (0, 0, 0), [(10.0, (8.0,)), (3.0, ())]),
        ([index(8.0, 10.0, 3.0, layout=APART)], (0, 0, 0), [(10.0, (8.0,)), (3.0, ())]),
    ],
)
def test_what_is_chosen(sources, choice, expected):
    found = choose_steps(sources, Sources(dict(zip("abc", choice, strict=True))), base=0, target=TARGET)
    assert [(one.step, one.others) for one in found] == expected


@pytest.mark.parametrize("kinds", [(EXP_AVG, EXP_AVG_SQ), (EXP_AVG,)])
def test_only_moments_whose_bias_is_corrected_are_rebased(kinds):
    """Lion, which keeps one moment and a step, corrects none."""
    held = {State(name, kind): TensorEntry("F32", (4,), AllZero()) for name in "abc" for kind in kinds}
    sources = [replace(index(step, step), held=held) for step in (200.0, 100.0)]
    chosen = Sources({"a": 1, "b": 0, "c": 0})
    choices = choose_steps(sources, chosen, base=0, target=TARGET)
    scales = rebase_scales(sources, chosen, TARGET, choices)
    is_adam = len(kinds) == 2
    assert (choices[0].worst_factor != 1.0) == is_adam
    factors = [(1 - beta**200) / (1 - beta**100) for beta in HYPER["betas"]]
    wanted = {(State("a", kind), 1): factor for kind, factor in zip(kinds, factors, strict=False)}
    assert scales == (wanted if is_adam else {})


def test_where_they_differ_it_is_said():
    sources = [index(200.0, 200.0), index(100.0, 100.0)]
    choices = choose_steps(sources, Sources({"a": 1, "b": 0, "c": 0}), base=0, target=TARGET)
    (notice,) = step_notices(choices, "base")
    assert "100" in notice.what and "200" in notice.what
    assert f"{choices[0].worst_factor:.2f}" in notice.what
    assert str(notice).count("\n") == 0
    assert step_notices(choices, "base", rebased=True) == []
    assert step_notices(choose_steps(sources, Sources({"a": 0, "b": 0, "c": 0}), base=0, target=TARGET), "base") == []
    old = [index(20_000.0, 20_000.0), index(19_900.0, 19_900.0)]  # less than 1 % of the first update
    assert step_notices(choose_steps(old, Sources({"a": 1, "b": 0, "c": 0}), base=0, target=TARGET), "base") == []


@pytest.mark.parametrize(("own", "used"), [(5, 10), (100, 200), (50, 1000), (1000, 1100), (10, 5)])
def test_the_factor_is_what_adam_does(own, used):
    """Oracle: torch's own AdamW makes its next update with either step."""

    def update(step):
        param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.AdamW([param], lr=1.0, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0)
        state = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.tensor([0.3]).double(),
            "exp_avg_sq": torch.tensor([0.5]).double(),
        }
        optimizer.state[param] = state
        param.grad = torch.tensor([0.7]).double()
        optimizer.step()
        return param.item()

    assert bias_factor(own, used, 0.9, 0.999) == pytest.approx(update(used) / update(own), rel=1e-6)


# --- tensors cut along several dimensions -----------------------------------------------------------------------------


@st.composite
def grids(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    return shape, tuple(tuple(sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})) for size in shape)


@given(grids(), st.data())
def test_any_elements_are_found_in_any_grid(grid, data):
    shape, cuts = grid
    whole = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    stored, extents = b"", []
    for cell in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        box = whole[tuple(slice(low, high) for low, high in cell)].tobytes()
        extents.append(Extent("file", len(stored), len(stored) + len(box)))
        stored += box
    place = Boxes(shape, cuts, tuple(Contiguous(extent, ITEMSIZE["I64"]) for extent in extents))
    begin = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(begin, whole.size))
    found, at = b"", begin
    for fragment in place.cover(begin, end):
        assert fragment.begin == at
        found += stored[fragment.extent.start : fragment.extent.stop]
        at = fragment.end
    assert at == end or begin == end
    assert found == whole.reshape(-1)[begin:end].tobytes()


def cells_of(data, whole, cuts, stored, depth=0):
    """Store boxes, each as one run, in slices of ranks, or cut again; return their places."""
    cells = []
    for cell in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        box = whole[tuple(slice(low, high) for low, high in cell)]
        how = data.draw(st.sampled_from(["run", "slices", "boxes"][: 3 - depth])) if box.size else "run"
        if how == "boxes":
            inner = tuple(tuple(sorted({0, size, data.draw(st.integers(0, size))})) for size in box.shape)
            cells.append(Boxes(box.shape, inner, cells_of(data, box, inner, stored, depth + 1)))
            continue
        part = -(-box.size // data.draw(st.integers(1, 3))) if how == "slices" else max(box.size, 1)
        flat, extents = box.reshape(-1), []
        for first in range(0, max(box.size, 1), part):
            start = len(stored)
            stored.extend(flat[first : first + part].tobytes())
            extents.append(Extent("file", start, len(stored)))
        cells.append(Sliced(tuple(extents), 0, part, ITEMSIZE["I64"]))
    return tuple(cells)


def bytes_of(grid, stored):
    def read(band, start, some):
        some[:] = stored[start : start + len(some)]

    assert all(band.stride >= band.width > 0 for band in grid.bands)
    room = bytearray(grid.rows * sum(band.width for band in grid.bands))
    gather(grid.bands, grid.rows, memoryview(room), read)
    return room


@given(grids(), st.data())
def test_rows_of_short_runs_are_the_same_elements(grid, data):
    """As `Boxes.cover` finds them one by one, also in stacked layers and fused weights."""
    shape, cuts = grid
    whole, stored = np.arange(np.prod(shape), dtype=np.int64).reshape(shape), bytearray()
    boxes = Boxes(shape, cuts, cells_of(data, whole, cuts, stored))
    edges = sorted({0, whole.size, *data.draw(st.lists(st.integers(0, whole.size), max_size=2))})
    runs = data.draw(st.permutations([*itertools.pairwise(edges)]))
    ends = itertools.accumulate((high - low for low, high in runs), initial=0)
    place = data.draw(st.sampled_from([boxes, StridedRuns(boxes, tuple(ends), tuple(low for low, _ in runs))]))
    begin = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(begin, whole.size))
    found, at = b"", begin
    for have in arrange(place, begin, end):
        assert have.begin == at
        found += bytes_of(have, stored) if isinstance(have, Grid) else stored[have.extent.start : have.extent.stop]
        at = have.end
    extents = [one.extent for one in place.cover(begin, end)]
    assert found == b"".join(stored[one.start : one.stop] for one in extents) and at == end


@pytest.mark.parametrize("place_of", [lambda e: Contiguous(e, 4), lambda e: Sliced((e, e), 0, 350, 4)])
def test_columns_are_few_grids(place_of):
    cells = tuple(place_of(Extent(f"{number}", 0, 4000)) for number in range(4))
    place = Boxes((200, 10), ((0, 100, 200), (0, 3, 10)), cells)
    assert len([*place.cover(0, 2000)]) >= 400 and len([*arrange(place, 0, 2000)]) < 12
    cells = tuple(Contiguous(Extent(f"{number}", 0, 1 << 19), 4) for number in range(2))
    wide = Boxes((4, 1 << 16), ((0, 4), (0, 1 << 15, 1 << 16)), cells)
    assert not any(isinstance(have, Grid) for have in arrange(wide, 0, 1 << 18))


@given(grids(), st.data())
def test_any_elements_of_a_box_are_found(grid, data):
    shape, cuts = grid
    whole = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    edges = [sorted(data.draw(st.tuples(st.sampled_from(cut), st.sampled_from(cut)))) for cut in cuts]
    low, high = zip(*edges, strict=True)
    box = whole[tuple(map(slice, low, high))].reshape(-1)
    sizes = tuple(last - first for first, last in zip(low, high, strict=True))
    place = Inside(Contiguous(Extent("file", 0, 8 * whole.size), 8), shape, Box(low, sizes))
    begin = data.draw(st.integers(0, box.size))
    end = data.draw(st.integers(begin, box.size))
    found, at = [], begin
    for fragment in place.cover(begin, end):
        assert fragment.begin == at
        found += range(fragment.extent.start // 8, fragment.extent.stop // 8)
        at = fragment.end
    assert at == end
    assert found == box[begin:end].tolist()
    runs = [*place.runs(begin, end)]
    starts = [(first + row * stride, width) for first, width, rows, stride in runs for row in range(rows)]
    assert [element for first, width in starts for element in range(first, first + width)] == found
    assert len(runs) < 4 or len(shape) > 2


@given(grids(), st.data())
def test_a_part_of_each_row_is_found(grid, data):
    shape, cuts = grid
    whole, stored = np.arange(np.prod(shape), dtype=np.int64).reshape(shape), bytearray()
    cells = cells_of(data, whole, cuts, stored)
    if all(isinstance(one, Sliced) and len(one.shards) == 1 for one in cells):  # as DCP folders have them
        paths, starts, stops = zip(*(one.shards[0] for one in cells), strict=True)
        cells = Cells(paths, starts, stops, ITEMSIZE["I64"])
    place = Boxes(shape, cuts, cells)
    size = data.draw(st.sampled_from([np.prod(shape[at:], dtype=int) for at in range(len(shape))]))
    rows = whole.reshape(-1, size)
    first, last = sorted(data.draw(st.tuples(st.integers(0, len(rows) - 1), st.integers(0, len(rows) - 1))))
    low = data.draw(st.integers(0, size - 1))
    high = data.draw(st.integers(low + 1, size))
    found = [*columns(place, first * size + low, high - low, last - first + 1, size)]
    begins = [one.begin for one in found]
    assert begins == [*itertools.accumulate((one.rows * size for one in found[:-1]), initial=first * size + low)]
    assert b"".join(bytes_of(one, stored) for one in found) == rows[first : last + 1, low:high].tobytes()
