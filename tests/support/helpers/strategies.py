"""Hypothesis strategies that several properties share."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from synthetic import SHAPES, Shape


@st.composite
def shapes(draw: st.DrawFn, max_layers: int = 4) -> Shape:
    """Tiny models whose sizes no world size divides in particular."""
    return replace(
        SHAPES["tiny"],
        vocab_size=draw(st.integers(1, 9)),
        hidden_size=draw(st.integers(1, 5)),
        intermediate_size=draw(st.integers(1, 7)),
        num_layers=draw(st.integers(1, max_layers)),
        num_heads=2,
        num_kv_heads=1,
        head_dim=draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
    )
