"""Casts and checksums, against torch and zlib, and reading ahead."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from helpers.states import raw
from llmtailor.background.bases import DeltaBases
from llmtailor.model.roles import State
from llmtailor.storage.casts import cast, refine
from llmtailor.storage.checksums import part_digest
from llmtailor.storage.local import AHEAD_BYTES, Ahead

# --- casts and checksums ----------------------------------------------------------------------------------------------

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTEGERS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def same(ours: bytes, theirs: torch.Tensor) -> bool:
    """Bit for bit, but for the payload of NaNs, which no two libraries agree on."""
    mine = torch.frombuffer(bytearray(ours), dtype=theirs.dtype)
    nan = torch.isnan(theirs)
    return torch.equal(torch.isnan(mine), nan) and raw(mine[~nan]) == raw(theirs[~nan])


EDGES = (0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, -3.4e38, 1e-45, math.inf, math.nan)


@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("source", DTYPES)
def test_casts_are_torchs_bit_for_bit(source, target):
    dtype = DTYPES[source]
    bits = INTEGERS[dtype.itemsize]
    drawn = np.random.default_rng(0).integers(0, np.iinfo(bits).max, 200_000, bits, endpoint=True)
    values = torch.cat([torch.frombuffer(bytearray(drawn.tobytes()), dtype=dtype), torch.tensor(EDGES).to(dtype)])
    assert same(cast(raw(values), source, target), values.to(DTYPES[target]))


def test_a_digest_does_not_depend_on_order_but_on_everything_else():
    one, two = (State("a", "master"), 8, 1), (State("b", "exp_avg"), 8, 2)
    assert part_digest([one, two]) == part_digest([two, one])
    others = [
        [one],
        [one, (State("b", "exp_avg"), 8, 3)],
        [one, (State("b", "exp_avg"), 9, 2)],
        [one, (State("c", "exp_avg"), 8, 2)],
        [one, (State("b", "master"), 8, 2)],
    ]
    assert len({part_digest(states) for states in [[one, two], *others]}) == 6


# --- reading ahead ----------------------------------------------------------------------------------------------------

STEP = 1 << 20


@pytest.mark.parametrize("num_bytes", [200_000, STEP, AHEAD_BYTES, 3 * AHEAD_BYTES + 5])
def test_all_bytes_are_asked_for_before_they_are_read(monkeypatch, num_bytes):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, count, how: asked.append((fd, start, count, how)))
    first = 7
    ahead = Ahead(3, first, first + num_bytes)
    for at in range(first, first + num_bytes, STEP):
        ahead.reached(at)
        fd, start, count, how = asked[-1]
        assert (fd, how) == (3, os.POSIX_FADV_WILLNEED)
        until = start + count
        assert until >= min(at + STEP, first + num_bytes) and until - at <= 2 * AHEAD_BYTES
    assert [start for _, start, _, _ in asked] == [first, *(start + count for _, start, count, _ in asked)][:-1]
    assert sum(count for _, _, count, _ in asked) == num_bytes


def test_small_ranges_and_refusals_cost_nothing(monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    Ahead(3, 0).reached(0)
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: asked.append(words))
    Ahead(3, 0, 100_000).reached(0)
    assert not asked


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.long)])
def test_older_masters_refine_bf16(every):
    """For patterns of bf16 and masters around them: the result rounds to the newest, as near to the older as can be."""
    edges = {0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0xFF7F, 0xFF80, 0x7FC0, 0x7F81}
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.int64)
    for high in {*range(0, 1 << 16, every), *edges}:
        newest = np.full(5 * len(lows), high, np.int64)
        older = ((high + np.arange(-2, 3)[:, None]) % (1 << 16) << 16 | lows).reshape(-1)
        values, exact = newest.astype("<u2").tobytes(), older.astype("<u4").tobytes()
        found = np.frombuffer(refine(values, "BF16", exact, "F32", "F32"), "<u4").astype(np.int64)
        assert cast(found.astype("<u4").tobytes(), "F32", "BF16") == values or high & 0x7FFF > 0x7F80
        rounded = np.frombuffer(cast(exact, "F32", "BF16"), "<u2").astype(np.int64)
        if high & 0x7FFF >= 0x7F80:
            assert (found == newest << 16).all()
            continue
        near = (np.abs(rounded - newest) <= 1) & (rounded >> 15 == newest >> 15)
        assert (found[~near] == newest[~near] << 16).all()
        assert (found[rounded == newest] == older[rounded == newest]).all()
        # one step nearer to the older value, it would round to that
        beyond = (found + np.sign(older - found))[near & (rounded != newest)]
        assert cast(beyond.astype("<u4").tobytes(), "F32", "BF16") == (
            rounded[near & (rounded != newest)].astype("<u2").tobytes()
        )


def test_a_failed_save_is_no_base():
    bases = DeltaBases()
    bases.coming("a", 0, 2).fill_(7)
    assert bases.of("a", 0, 2) is None
    bases.record_outcome(True)
    bases.coming("a", 0, 2).fill_(8)
    bases.record_outcome(False)
    assert bases.of("a", 0, 2).tolist() == [7] * 6 and bases.of("a", 0, 3) is None and bases.of("a", 2, 2) is None
