"""Casts and checksums, against torch and zlib, and reading ahead."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers.states import in_8_bits, in_24_bits, of_16_bits, raw
from llmtailor.background.bases import DeltaBases
from llmtailor.background.packing import pack_by_torch
from llmtailor.checkpoint.placement import Bundled
from llmtailor.model.dtypes import Encoding, size_of
from llmtailor.model.roles import State
from llmtailor.storage import casts
from llmtailor.storage.casts import cast, pack, pack_differences, refine
from llmtailor.storage.checksums import part_digest
from llmtailor.storage.decoder import Decoder
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


@pytest.fixture(params=["numba", "numpy"])
def rounding(request, monkeypatch):
    """What rounds."""
    assert casts.loops() is not None, "numba is not installed"
    if request.param == "numpy":
        monkeypatch.setattr(casts, "loops", lambda: None)
    return request.param


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("every", [997, pytest.param(1, marks=pytest.mark.long)])
def test_24_bits_round_to_what_32_bits_round_to(every):
    """All patterns of the lower half for some of the upper half: ties, subnormals, infinities and NaNs included."""
    edges = {0x0000, 0x8000, 0x007F, 0x0080, 0x3380, 0x387F, 0x477F, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF}
    for high in {*range(0, 1 << 16, every), *edges}:
        bits = np.uint32(high << 16) | np.arange(1 << 16, dtype=np.uint32)
        values = bits.view("<f4")
        short = cast(values.tobytes(), "F32", "F24")
        assert bytes(pack_by_torch(torch.from_numpy(values), "F24").numpy()) == short
        wide = np.frombuffer(cast(short, "F24", "F32"), "<u4")
        assert (np.abs(wide.astype("i8") - bits) < 1 << 8).all()
        for dtype in ("BF16", "F16"):
            assert cast(short, "F24", dtype) == cast(values.tobytes(), "F32", dtype) or np.isnan(values).any()
        assert (np.isnan(wide.view("<f4")) == np.isnan(values)).all()


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 5000, 40000])
def test_blocks_of_8_bits(kind, numel):
    """What torch packs is what `casts` packs, and is read back as the obvious version says, from any element on."""
    dtype = "Q8_ROOT" if kind == "exp_avg_sq" else "Q8"
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-30, 3, (numel,), generator=generator)
    values[2:9] = 0.0
    values = values**2 if kind == "exp_avg_sq" else values
    packed = cast(values.numpy().tobytes(), "F32", dtype)
    assert bytes(pack_by_torch(values, dtype).numpy()) == packed and len(packed) == size_of(dtype, numel)
    wanted = in_8_bits(values, kind)
    assert cast(packed, dtype, "F32") == wanted.numpy().tobytes()
    assert ((wanted == 0) == (values == 0)).all() or kind == "exp_avg"
    place = Bundled(("file",), (40,), (10, 10 + numel), 4, (), dtype)
    for begin, end in [(10, 10 + numel), (15, 12 + numel // 2), (138, 139), (266, 400)]:
        if not 10 <= begin < end <= 10 + numel:
            continue
        [found] = place.cover(begin, end)
        for size in (1, 131, 1 << 20):
            decoder, data = Decoder(found.encoding), packed[found.extent.start - 40 : found.extent.stop - 40]
            parts = [decoder.feed(data[at : at + size]) for at in range(0, len(data), size)]
            assert b"".join(parts) == wanted[begin - 10 : end - 10].numpy().tobytes()


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


def test_numba_rounds_to_the_bytes_that_numpy_rounds_to(monkeypatch):
    """Any patterns, also in blocks with a few that are not finite, and any part of a file that was read."""
    generator = np.random.default_rng(3)
    bits = generator.integers(0, 1 << 32, 100_001, np.uint32)
    bits[:50_000] = bits[:50_000] & 0x807FFFFF | generator.integers(0, 20, 50_000).astype(np.uint32) << 23  # subnormals
    unaligned = np.frombuffer(b"-" + bits.tobytes(), "<f4", offset=1)
    base = pack((bits + generator.integers(0, 1 << 17, len(bits), np.uint32)).view("<f4"), "F24")

    def made(values):
        packed = [pack(values, dtype).tobytes() for dtype in ("F24", "Q8", "Q8_ROOT")]
        return [*packed, pack_differences(values, base[: 3 * len(values)]).tobytes()]

    found = [
        made(values) for values in (unaligned, unaligned[:1], unaligned[5:6_000], np.abs(unaligned), unaligned[:0])
    ]
    monkeypatch.setattr(casts, "loops", lambda: None)
    with np.errstate(all="ignore"):
        aligned = bits.view("<f4")
        assert found == [made(one) for one in (aligned, aligned[:1], aligned[5:6_000], np.abs(aligned), aligned[:0])]


def test_numba_works_where_nothing_can_be_cached():
    """In a container whose packages and home can't be written to."""
    code = (
        "from numba.core import caching\n"
        "for one in vars(caching).values():\n"
        "    if isinstance(one, type) and hasattr(one, '_locator_classes'):\n"
        "        one._locator_classes = []\n"
        "import numpy\n"
        "from llmtailor.storage import casts\n"
        "assert casts.loops() is not None\n"
        "print(bytes(casts.pack(numpy.float32([1.5] * 9), 'F24')).hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "00c03f" * 9 + "\n"), done.stderr


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("begin", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("numel", [0, 1, 2, 127, 128, 129, 1000])
def test_bytes_arrive_wherever_they_go(begin, numel):
    """Also at odd places of a file; what lies beside them stays."""
    values = np.random.default_rng(numel).standard_normal(numel, "<f4")
    for made in (values.view(np.uint8), np.frombuffer(cast(values.tobytes(), "F32", "F24"), np.uint8)):
        room = np.full(begin + len(made) + 9, 77, np.uint8)
        target = room[begin : begin + len(made)]
        if len(made) == 4 * numel:
            casts.copy(made, target)
        else:
            pack(values, "F24", target)
        assert (target == made).all() and set(room[:begin]) | set(room[begin + len(made) :]) == {77}


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["Q8", "Q8_ROOT"])
def test_what_is_not_finite_does_not_become_a_number(value, dtype):
    values = torch.ones(300)
    values[130] = value
    packed = cast(values.numpy().tobytes(), "F32", dtype)
    assert np.isnan(np.frombuffer(cast(bytes(pack_by_torch(values, dtype).numpy()), dtype, "F32"), "<f4")).sum() == 128
    found = np.frombuffer(cast(packed, dtype, "F32"), "<f4")
    assert np.isnan(found[128:256]).all() and (np.delete(found, np.s_[128:256]) == 1).all()


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 33000, pytest.param(70000, marks=pytest.mark.long)])
def test_differences_from_older_masters(scale, numel):
    """Where they are small, all 24 bits come back; elsewhere what bf16 and the older masters say."""
    generator = torch.Generator().manual_seed(numel)
    older = torch.randn(numel, generator=generator)
    newest = older + scale * torch.randn(numel, generator=generator)
    newest[:: numel // 2 + 1], older[:: numel // 2 + 1] = -0.0, 0.0
    packed = pack_differences(newest.numpy(), pack(older.numpy(), "F24")).tobytes()
    assert len(packed) == size_of("D16", numel)
    place, wanted = Bundled(("file",), (0,), (0, numel), 4, (), "D16"), of_16_bits(newest, older, 1)
    for begin, end in {(0, numel), (numel // 3, numel // 3 + 1), (numel // 2, numel)}:
        [found] = place.cover(begin, end)
        data = Decoder(found.encoding).feed(packed[found.extent.start : found.extent.stop])
        base = cast(older[begin:end].numpy().tobytes(), "F32", "F24")
        assert refine(data, "D16", base, "F24", "F32") == wanted[begin:end].numpy().tobytes()
        assert refine(data, "D16", base, "F24", "BF16") == raw(newest[begin:end].bfloat16())
    exact = (wanted == in_24_bits(newest)).float().mean()
    assert numel < 100 or (exact > 0.9 if scale < 1e-5 else exact < 0.9 if scale > 1e-3 else True)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("every", [997, pytest.param(31, marks=pytest.mark.long)])
def test_differences_of_any_patterns(every):
    """Infinities, subnormals and values of the other sign too; only a NaN may become another one."""
    bits = np.arange(0, 1 << 32, every * 65537 // 7, dtype=np.uint64).astype("<u4")
    newest = torch.from_numpy(bits.view("<f4"))
    for shift in (0, 1, 300 << 8, 1 << 31):
        older = torch.from_numpy((bits + np.uint32(shift)).view("<f4"))
        packed = pack_differences(newest.numpy(), pack(older.numpy(), "F24")).tobytes()
        data = Decoder(Encoding("D16", 0, len(bits))).feed(packed)
        found = refine(data, "D16", cast(older.numpy().tobytes(), "F32", "F24"), "F24", "BF16")
        wanted = cast(newest.numpy().tobytes(), "F32", "BF16")
        differ = np.frombuffer(found, "<u2") != np.frombuffer(wanted, "<u2")
        assert (~differ | np.isnan(newest.numpy())).all()


def test_a_failed_save_is_no_base():
    bases = DeltaBases()
    bases.coming("a", 0, 2).fill_(7)
    assert bases.of("a", 0, 2) is None
    bases.record_outcome(True)
    bases.coming("a", 0, 2).fill_(8)
    bases.record_outcome(False)
    assert bases.of("a", 0, 2).tolist() == [7] * 6 and bases.of("a", 0, 3) is None and bases.of("a", 2, 2) is None


@pytest.mark.parametrize("dtype", ["Q8", "Q8_ROOT"])
def test_blocks_without_numbers_are_found_wherever_the_bytes_begin(dtype):
    values = torch.rand(1000)
    sound = pack(values.numpy(), dtype).tobytes()
    for bad in (math.inf, math.nan, *([-1.0] if dtype == "Q8_ROOT" else [])):
        values[300] = bad  # of the third block
        lost = pack(values.numpy(), dtype).tobytes()
        for start in (0, 1, 131, 132, 263, 264):
            assert casts.has_lost_blocks(lost[start:], dtype, start), (bad, start)
            assert not casts.has_lost_blocks(sound[start:], dtype, start)
        assert not casts.has_lost_blocks(lost[265:], dtype, 265), "its head is not among these bytes"
        assert not casts.has_lost_blocks(lost[:264], dtype) and not casts.has_lost_blocks(b"", dtype)
