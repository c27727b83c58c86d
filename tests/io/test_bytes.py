"""Casts and checksums, against torch and zlib, and reading ahead."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from helpers.states import raw
from llmtailor.model.roles import State
from llmtailor.saving.snapshot import in_24_bits
from llmtailor.storage.casts import cast
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


@pytest.mark.parametrize("every", [997, pytest.param(1, marks=pytest.mark.long)])
def test_24_bits_round_to_what_32_bits_round_to(every):
    """All patterns of the lower half for some of the upper half: ties, subnormals, infinities and NaNs included."""
    edges = {0x0000, 0x8000, 0x007F, 0x0080, 0x3380, 0x387F, 0x477F, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF}
    for high in {*range(0, 1 << 16, every), *edges}:
        bits = np.uint32(high << 16) | np.arange(1 << 16, dtype=np.uint32)
        values = bits.view("<f4")
        short = cast(values.tobytes(), "F32", "F24")
        assert bytes(in_24_bits(torch.from_numpy(values)).numpy()) == short
        wide = np.frombuffer(cast(short, "F24", "F32"), "<u4")
        assert (np.abs(wide.astype("i8") - bits) < 1 << 8).all()
        for dtype in ("BF16", "F16"):
            assert cast(short, "F24", dtype) == cast(values.tobytes(), "F32", dtype) or np.isnan(values).any()
        assert (np.isnan(wide.view("<f4")) == np.isnan(values)).all()
