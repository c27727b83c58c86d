"""Sets of elements against Python's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.placement import Runs, count, union, without


@st.composite
def runs(draw: st.DrawFn) -> Runs:
    cuts = sorted(draw(st.sets(st.integers(0, 30), max_size=10)))
    return tuple(zip(cuts[0::2], cuts[1::2], strict=False))


def elements(of: Runs) -> set[int]:
    return {element for begin, end in of for element in range(begin, end)}


def is_tidy(of: Runs) -> bool:
    flat = [bound for run in of for bound in run]
    return flat == sorted(set(flat))


@given(runs(), runs(), runs())
def test_union(a: Runs, b: Runs, c: Runs) -> None:
    assert elements(union(a, b, c)) == elements(a) | elements(b) | elements(c)
    assert is_tidy(union(a, b, c)) and count(union(a, b, c)) == len(elements(union(a, b, c)))


@given(runs(), runs())
def test_without(a: Runs, b: Runs) -> None:
    assert elements(without(a, b)) == elements(a) - elements(b)
    assert is_tidy(without(a, b))
