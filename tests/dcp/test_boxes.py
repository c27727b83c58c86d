"""Tensors cut along several dimensions."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.placement import Boxes, Extent
from llmtailor.model.roles import ITEMSIZE


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
    place = Boxes(shape, cuts, tuple(extents), ITEMSIZE["I64"])
    begin = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(begin, whole.size))
    found, at = b"", begin
    for fragment in place.cover(begin, end):
        assert fragment.begin == at
        found += stored[fragment.extent.start : fragment.extent.stop]
        at = fragment.end
    assert at == end or begin == end
    assert found == whole.reshape(-1)[begin:end].tobytes()
