"""Frozen params are compared with what an earlier save holds: also what changes through ``.data``, in one element."""

from __future__ import annotations

import pytest
import torch

from llmtailor.background.frozen import FrozenParams, digest_of
from llmtailor.errors import StorageError
from llmtailor.live.training import FrozenFile

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
ROW = 3
"""Of a table in which a sample takes every 32nd element, so that it misses this row"""


@pytest.fixture(params=DEVICES)
def frozen(request: pytest.FixtureRequest) -> FrozenFile:
    return FrozenFile("frozen", {"table": torch.zeros(1 << 21, 4, device=request.param)})


def write_seen(table: torch.Tensor) -> None:
    with torch.no_grad():
        table[ROW] = 1


def write_unseen(table: torch.Tensor) -> None:
    table.data[ROW] = 1


def test_a_write_that_torch_counts_is_seen_at_the_next_save(frozen: FrozenFile) -> None:
    params = FrozenParams(frozen)
    before, _ = params.look(frozen)
    assert params.look(frozen) == (before, ())
    write_seen(frozen.tensors["table"])
    after, moving = params.look(frozen)
    assert moving == ("table",) and after != before


def test_a_write_without_a_change_moves_nothing(frozen: FrozenFile) -> None:
    params = FrozenParams(frozen)
    before, _ = params.look(frozen)
    with torch.no_grad():
        frozen.tensors["table"].mul_(1)
    assert params.look(frozen) == (before, ())


def test_a_write_through_data_fails_one_save_and_is_seen_from_then_on(frozen: FrozenFile) -> None:
    params = FrozenParams(frozen)
    before, _ = params.look(frozen)
    params.check(frozen, before, is_copied=False)
    write_unseen(frozen.tensors["table"])
    assert params.look(frozen) == (before, ())
    with pytest.raises(StorageError, match="table"):
        params.check(frozen, before, is_copied=False)
    after, moving = params.look(frozen)
    assert moving == ("table",) and after != before
    frozen.tensors["table"].data[ROW + 1] = 1
    assert params.look(frozen)[1] == ("table",)


def test_a_later_write_that_torch_counts_is_none_of_a_links_business(frozen: FrozenFile) -> None:
    params = FrozenParams(frozen)
    digests, _ = params.look(frozen)
    write_seen(frozen.tensors["table"])
    params.check(frozen, digests, is_copied=False)
    with pytest.raises(StorageError, match="table"):  # what is copied may be of either
        params.check(frozen, digests, is_copied=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_digest_changes_with_each_element_their_order_shape_and_dtype(device: str, dtype: torch.dtype) -> None:
    values = torch.arange(1, 8, device=device).to(dtype)
    swapped, other = values.clone(), values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    other[-1] += 1
    variants = [values, swapped, other, values.reshape(1, 7), values.view(torch.int8)]
    digests = [digest_of(tensor) for tensor in variants]
    assert len({*digests}) == len(digests)
    assert digest_of(values.clone()) == digests[0]


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_with_few_bits_do_not_cancel_out(device: str) -> None:
    """Swapped rows of ones and twos, which differ in the highest bits only."""
    table = torch.ones(1 << 12, 4, device=device)
    table[::2] = 2
    digests = {digest_of(table.roll(by, 0)) for by in (0, 1)}
    for row in (1, 513, 1025, 2049):
        swapped = table.clone()
        swapped[[0, row]] = table[[row, 0]]
        digests.add(digest_of(swapped))
    assert len(digests) == 6
