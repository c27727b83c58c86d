"""How elements are compared, held against torch in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cases import examples
from llmtailor.verify.diff import Change, compare
from llmtailor.verify.values import BLOCK_ELEMENTS

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")


def expected(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float, int]:
    """Relative change, largest change, cosine, changed elements: the slow obvious way."""
    one, two = a.double(), b.double()
    norms = one.norm() * two.norm()
    return (
        float((two - one).norm() / one.norm()),
        float((two - one).abs().max()),
        float((one @ two) / norms),
        int((a != b).sum()),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(25, 100))
@given(seed=st.integers(0, 1 << 30), numel=st.sampled_from([1, 7, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 3]))
def test_changes_are_those_of_torch(dtype, seed, numel):
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(numel, generator=random).to(DTYPES[dtype])
    b = torch.where(torch.rand(numel, generator=random) < 0.5, a, a * 1.25 + 1)
    found = compare(raw(a), dtype, raw(b), dtype)
    relative, largest, cosine, changed = expected(a, b)
    assert found.relative == pytest.approx(relative, rel=1e-9)
    assert found.largest == pytest.approx(largest)
    assert found.cosine == pytest.approx(cosine, rel=1e-9)
    assert (found.numel, found.changed, found.not_finite) == (numel, changed, 0)


def test_tiny_moments_do_not_underflow():
    a, b = torch.full((5,), 1e-30), torch.full((5,), 2e-30)
    found = compare(raw(a), "F32", raw(b), "F32")
    assert found.relative == pytest.approx(1)
    assert found.cosine == pytest.approx(1)


def test_the_wider_dtype_is_rounded():
    master = torch.randn(100, generator=torch.Generator().manual_seed(0))
    weight = master.bfloat16()
    assert compare(raw(master), "F32", raw(weight), "BF16").changed == 0
    weight[3] += 1
    assert compare(raw(weight), "BF16", raw(master), "F32").changed == 1


def test_values_that_are_not_finite_are_counted_and_left_out():
    a = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
    b = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    found = compare(raw(a), "F32", raw(b), "F32")
    assert (found.changed, found.not_finite, found.largest) == (2, 2, 1.0)
    assert found.relative == pytest.approx(1 / np.sqrt(5))


def test_from_nothing_everything_is_infinitely_far():
    zeros, ones = torch.zeros(4), torch.ones(4)
    found = compare(raw(zeros), "F32", raw(ones), "F32")
    assert found.relative == float("inf")
    assert found.cosine is None


def test_a_sign_of_zero_is_a_change_without_distance():
    found = compare(raw(torch.tensor([0.0])), "F32", raw(torch.tensor([-0.0])), "F32")
    assert (found.changed, found.relative) == (1, 0.0)


def test_whole_numbers_are_only_compared_for_equality():
    found = compare(raw(torch.arange(6)), "I64", raw(torch.tensor([0, 1, 9, 3, 4, 5])), "I64")
    assert found == Change(numel=6, changed=1)
