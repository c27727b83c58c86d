"""Masters that are saved as compressed differences, held against copies of the live tensors."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import time
import zlib
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
import zstandard

from helpers.cases import mostly_long
from helpers.commands import call
from helpers.files import flip
from helpers.states import in_24_bits
from llmtailor.background.arena import Arena
from llmtailor.background.packing import LiveTensors
from llmtailor.background.snapshot import Snapshot
from llmtailor.background.writing import Share, lay_out_compressed, write_share
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.errors import SourceError, TailorError, UnsupportedCheckpoint, UsageError
from llmtailor.formats.partial import differences
from llmtailor.formats.registry import index_checkpoint
from llmtailor.live.tensors import bytes_of
from llmtailor.model.dtypes import size_of
from llmtailor.saving import SaveFailed
from llmtailor.storage import casts, frames, rounding, zstd
from llmtailor.verify.inspect import inspect_checkpoint
from llmtailor.verify.verify import verify_checkpoint
from saving.loop import Disk, Loop, check_states, manifests

FILE = "differences-00000-of-00001.delta"
IN_TURN = {"policy": "moments_in_turn:3", "masters": "24bit-delta"}
LARGE = {"hidden": 128, "rate": 1e-5}
"""Tensors of one frame, of several, and of a part of one; a rate at which masters keep most of their bits"""


BACKGROUND = ["background", "blocking"]
WHICH = [(is_held, only) for is_held in (True, False) for only in (None, "moments")]


def rounded(loop, at):
    return {key: in_24_bits(one) if key[1] == "master" else one for key, one in loop.wanted(at).items()}


@pytest.fixture(scope="module", params=mostly_long(BACKGROUND, "background"))
def trained(request, tmp_path_factory):
    """Saves at steps 1 to 5. Never write into its folder."""
    run = tmp_path_factory.mktemp("differences") / "run"
    return Loop(run, background=request.param == "background", **IN_TURN, **LARGE).trained(5)


@pytest.fixture
def loop(trained, tmp_path):
    with trained.copied(tmp_path / "run") as copied:
        yield copied


def test_a_composite_has_all_24_bits(loop, tmp_path):
    """From at most three folders, and from a run that was moved."""
    saves = manifests([loop.run])
    assert [(loop.run / f"partial/step-0000000{step}" / FILE).exists() for step in saves] == [False] + [True] * 4
    by_id = {one["save_id"]: step for step, one in saves.items()}
    for step, found in saves.items():
        bases = {by_id[one["base"]] for one in found.get("masters", ())}
        assert bases <= {*range(max(1, step - 2), step)} and (step == 1 or len(found["masters"]) > 1)
        out = tmp_path / f"{step}"
        call("merge", "--run", loop.run, "--at", step, out, "--checksum")
        check_states(out, rounded(loop, step))
        assert verify_checkpoint(out, deep=True).is_intact
    assert "weights were saved in 24 bits" in (out / "README.md").read_text()


def test_they_take_fewer_bytes_and_inspect_tells_them(loop):
    path = loop.run / "partial/step-00000005"
    listed = {one["path"]: one["num_bytes"] for one in loop.manifest(5)["bundles"]}
    assert listed[FILE] == (path / FILE).stat().st_size
    numel = sum(one.numel() for (_, kind), one in loop.wanted(5).items() if kind == "master")
    alone = {part["part"] for part in loop.manifest(5)["masters"]}
    described = inspect_checkpoint(path)["parts"]
    stored = sum(one["num_bytes_by_kind"]["master"] for one in described if one["part"] in alone)
    assert listed[FILE] - 5000 < stored < listed[FILE] < 1.5 * numel
    report = json.loads((loop.run / "partial/saves.jsonl").read_text().splitlines()[-1])
    assert report["num_bytes"] == sum(listed.values())


def read_frame(frame):
    """Return the codes of a frame, as docs/formats.md says."""
    assert struct.unpack("<I", frame[-4:])[0] == zlib.crc32(frame[:-4])
    numel, *sizes = struct.unpack("<4I", frame[:16])
    codes, at = [0] * numel, 16
    for plane, size in enumerate(sizes):
        content = zstandard.ZstdDecompressor().decompress(frame[at : at + size])
        assert len(content) == numel
        codes = [code | octet << 8 * plane for code, octet in zip(codes, content, strict=True)]
        at += size
    assert len(frame) == at + 4
    return codes


def test_the_file_is_as_documented(loop):
    """Each frame has the differences of the 24 bits."""
    path = loop.run / "partial/step-00000003"
    content = (path / FILE).read_bytes()
    index = index_checkpoint(path)
    steps = {one["save_id"]: step for step, one in manifests([loop.run]).items()}
    magic, length = struct.unpack("<8sQ", content[:16])
    head, count = json.loads(content[16:][:length]), struct.unpack("<Q", content[-16:-8])[0]
    assert magic == content[-8:] == b"llmt-z24" and head["save_id"] == loop.manifest(3)["save_id"]
    lengths = [*struct.unpack(f"<{count}I", content[-16 - 4 * count : -16])]
    at = 16 + length
    for row in head["masters"]:
        name = row["param"]
        base = steps[index.partial.differences[name].base]
        new, old = (
            in_24_bits(loop.truth[step][name]["master"]).numpy().view("<u4").reshape(-1).astype(np.int64) >> 8
            for step in (3, base)
        )
        wanted = new - old + (1 << 23) & 0xFFFFFF
        found = []
        while len(found) < row["end"]:
            size = lengths.pop(0)
            found += read_frame(content[at : at + size])
            at += size
        off = [code >> 1 if code % 2 == 0 else ~(code >> 1) for code in found]
        assert row["begin"] == 0 and [one + (1 << 23) for one in off] == [*wanted]
    assert not lengths and at == len(content) - 16 - 4 * count


def test_gc_keeps_what_they_differ_from(loop, tmp_path):
    call("gc", loop.run, "--keep", 1, "--yes")
    assert [*manifests([loop.run])] == [3, 4, 5]
    call("merge", "--run", loop.run, tmp_path / "out")
    check_states(tmp_path / "out", rounded(loop, 5))


@pytest.mark.parametrize("keep", mostly_long([1, 2], 1))
def test_keep_composable_keeps_it_too(tmp_path, keep):
    """As many folders as there are groups, and one for each further step."""
    loop = Loop(tmp_path / "run", keep_composable=keep, **IN_TURN).start()
    for step in range(1, 6):
        loop.make_saves()
        assert loop.saves == [*range(max(1, step - keep - 1), step + 1)]
        for at in loop.saves[-keep:]:
            check_states(loop.compose(at, tmp_path / f"{step}-{at}"), rounded(loop, at))
    loop.saver.close()


def test_without_the_other_save_they_count_as_not_saved(loop, tmp_path):
    lost = loop.run / "partial/step-00000004"
    held = {one["part"] for one in loop.manifest(4)["parts"]}
    shutil.rmtree(lost)
    call("merge", "--run", loop.run, tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "llmtailor.json").read_text())["parts"]
    steps = {key: {row["step"] for row in rows if (row["part"] in held, row["only"]) == key} for key in WHICH}
    assert steps == {(True, None): {3}, (True, "moments"): {1}, (False, None): {5}, (False, "moments"): {3}}


def test_a_restart_begins_with_whole_masters(tmp_path):
    loop = Loop(tmp_path / "run", **IN_TURN).start()
    loop.make_saves(3)
    loop.start_again(**IN_TURN)
    loop.make_saves(3)
    loop.saver.close()
    bases = [{one.get("base") for one in found.get("masters", ())} for found in manifests([loop.run]).values()]
    assert bases[3] == {None} and None in bases[4] and None not in bases[5]
    call("merge", "--run", loop.run, tmp_path / "out")
    check_states(tmp_path / "out", rounded(loop, 6))


def test_nothing_differs_from_a_failed_save(tmp_path, monkeypatch):
    loop, disk = Loop(tmp_path / "run", **IN_TURN).start(), Disk(monkeypatch)
    loop.make_saves(2)
    disk.error = OSError(28, "No space left on device")
    with pytest.raises(SaveFailed):
        loop.make_saves()
    disk.recover()
    loop.make_saves(2)
    loop.saver.close()
    assert loop.saves == [1, 2, 4, 5]
    for step in (4, 5):
        check_states(loop.compose(step, tmp_path / f"{step}"), rounded(loop, step))


def test_it_is_copied_with_the_others(tmp_path):
    loop = Loop(tmp_path / "run", staging_dir=tmp_path / "stage", **IN_TURN).trained(3)
    call("verify", "--deep", loop.run / "partial/step-00000003")
    check_states(loop.compose(3, tmp_path / "out"), rounded(loop, 3))


def written(folder, how, tensors, bases):
    """Write masters as differences; return the file's content."""
    live, found = LiveTensors(), []
    for number, (one, base) in enumerate(zip(tensors, bases, strict=True)):
        [piece] = live.entry(f"{number}", one).content
        found.append((f"{number}", (0, len(one)), piece, bytes_of(base)))
    share = Share(files=(FileLayout("empty", ()),), live=live, compressed=lay_out_compressed(FILE, {}, found))
    store = None
    if how.startswith("ring"):
        store = Snapshot(live, share.copied, Arena(int(how.split()[1]) << 20, pinned=False), 60, time.monotonic())
        store.start()
    try:
        folder.mkdir()
        write_share(folder, share, store)
    finally:
        if store is not None:
            store.close()
    return (folder / FILE).read_bytes()


def test_the_file_is_the_same_wherever_they_are_compressed(tmp_path, monkeypatch):
    """Out of a ring of any size, or straight from the tensors."""
    monkeypatch.setattr("llmtailor.background.writing.MIN_DIRECT_BYTES", 0)
    generator = torch.Generator().manual_seed(0)
    sizes = [3 * frames.ELEMENTS + 77, 5, frames.ELEMENTS, 1000, 2 * frames.ELEMENTS + 64]
    older = [torch.randn(size, generator=generator) * 0.02 for size in sizes]
    tensors = [one + torch.randn(len(one), generator=generator) * 1e-6 for one in older]
    bases = [torch.from_numpy(rounding.pack(one.numpy(), "F24")) for one in older]
    hows = ["blocking", "ring 1", "ring 3", "ring 64"]
    contents = {how: written(tmp_path / how, how, tensors, bases) for how in hows}
    assert len({*contents.values()}) == 1
    file = differences.read_differences(tmp_path / "ring 1", FILE, "")
    for (_, _, place), one, base in zip(file.masters, tensors, bases, strict=True):
        edges = place.frames[0]
        codes = [frames.decode(contents["ring 1"][begin:end]) for begin, end in pairwise(edges)]
        found = casts.add_codes(np.concatenate(codes), casts.widen(base.numpy().data, "F24").view("<u4"))
        assert torch.equal(torch.from_numpy(found.view("<f4")), in_24_bits(one))


# Damage


def test_verify_and_merge_find_damaged_frames(loop, tmp_path):
    path = loop.run / "partial/step-00000005"
    file = differences.read_differences(path, FILE, "")
    _, _, place = file.masters[-1]
    flip(path / FILE, sum(place.frames[0][:2]) // 2)
    assert f"{FILE}: the file is not the one that the save wrote" in call("verify", "--deep", path, code=7).stdout
    wrong = call("merge", "--run", loop.run, tmp_path / "out", code=4).stderr
    assert FILE in wrong and "a frame is damaged" in wrong and not (tmp_path / "out").exists()


def test_a_file_that_is_cut_or_of_another_save_is_refused(loop):
    path = loop.run / "partial/step-00000005"
    content, of_another = (path / FILE).read_bytes(), path.with_name("step-00000004") / FILE
    for wrong in (content[:-1], content[1:], b"", content[:20], content + b"\0", of_another.read_bytes()):
        (path / FILE).write_bytes(wrong)
        with pytest.raises(SourceError, match=FILE):
            index_checkpoint(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"begin":0', b'"begin":1'),
        (b'"begin":0', b'"begin":"'),
        (b'"param":"', b'"param":0'),
        (b'"masters":[', b'"master":[ '),
        (b'"rank":"0"', b'"rank":"1"'),
    ],
)
def test_a_head_that_is_damaged_is_refused(loop, old, new):
    path = loop.run / "partial/step-00000005"
    content = (path / FILE).read_bytes()
    assert old in content
    (path / FILE).write_bytes(content.replace(old, new, 1))
    with pytest.raises(SourceError):
        index_checkpoint(path)


@pytest.mark.parametrize("at", [*range(-20, 0)])
def test_an_index_that_is_damaged_is_refused(loop, at):
    path = loop.run / "partial/step-00000005"
    flip(path / FILE, (path / FILE).stat().st_size + at)
    with pytest.raises(SourceError, match=FILE):
        index_checkpoint(path)


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.long)])
def test_any_damage_is_found_or_does_no_harm(loop, tmp_path, rounds):
    """Also what the manifest knows nothing of."""
    path, wanted, random = loop.run / "partial/step-00000005" / FILE, rounded(loop, 5), Random(rounds)
    good, refused = path.read_bytes(), 0
    for at in range(rounds):
        bad = bytearray(good)
        bad[random.randrange(len(bad) if at % 2 else 800)] ^= 1 << random.randrange(8)
        path.write_bytes(bad)
        try:
            index_checkpoint(path.parent)  # else the run goes on without it
            check_states(loop.compose(5, tmp_path / f"{at}"), wanted)
        except TailorError:
            refused += 1
    assert refused > rounds // 2


def test_a_file_of_the_old_coder_is_refused_by_name(loop):
    path = loop.run / "partial/step-00000005"
    (path / FILE).write_bytes((path / FILE).read_bytes().replace(b"llmt-z24", b"llmt-d24"))
    with pytest.raises(UnsupportedCheckpoint, match=r"(?s)coder of an earlier development version.*composite"):
        index_checkpoint(path)


def test_a_frame_that_the_index_makes_too_large_is_refused(loop):
    """Nothing of that size is read at once."""
    path = loop.run / "partial/step-00000005" / FILE
    content = bytearray(path.read_bytes())
    count = struct.unpack("<Q", content[-16:-8])[0]
    most = size_of("D24", frames.ELEMENTS)
    struct.pack_into("<I", content, len(content) - 16 - 4 * count, most + 1)
    path.write_bytes(content)
    with pytest.raises(SourceError, match="a frame that is too large"):
        index_checkpoint(path.parent)


def test_without_zstd_it_is_refused_where_it_is_asked_for_or_met(loop, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    zstd._library.cache_clear()
    try:
        told = call("merge", "--run", loop.run, tmp_path / "out", code=2).stderr
        assert "need zstd" in told and "pip install zstandard" in told and not (tmp_path / "out").exists()
        with pytest.raises(UsageError, match="masters: compressed masters need zstd"):
            Loop(tmp_path / "run", **IN_TURN).start()
    finally:
        zstd._library.cache_clear()


def framed(numel, planes):
    """Return a frame with a right checksum."""
    frame = struct.pack("<4I", numel, *map(len, planes)) + b"".join(planes)
    return frame + struct.pack("<I", zlib.crc32(frame))


PLANE = zstd.compress(bytes(64))
TERABYTES = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 42) + b"\3\0\0\0"
UNTOLD = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))


@pytest.mark.parametrize(
    "frame",
    [
        framed(frames.ELEMENTS + 1, [zstd.compress(bytes(frames.ELEMENTS + 1))] * 3),
        framed(0xFFFFFFFF, [PLANE] * 3),
        framed(0, [zstd.compress(b"")] * 3),
        framed(63, [PLANE] * 3),
        framed(65, [PLANE] * 3),
        framed(64, [PLANE, PLANE, zstd.compress(bytes(65))]),
        framed(64, [PLANE, PLANE, PLANE[:-1]]),
        framed(64, [PLANE, PLANE, b""]),
        framed(64, [PLANE, PLANE, bytes(20)]),
        framed(64, [PLANE, PLANE, TERABYTES]),
        framed(64, [PLANE, PLANE, UNTOLD]),
        framed(64, [PLANE] * 3)[:-1],
        framed(64, [PLANE] * 3) + b"0",
        b"",
        bytes(20),
    ],
)
def test_a_frame_that_is_not_one_is_refused(frame):
    """Also if its checksum is right. Nothing of the size that it claims is allocated."""
    with pytest.raises(ValueError, match=r".+"):
        frames.decode(frame)


# Any patterns


def packed(newest, older):
    """Return the frame of 24-bit patterns."""
    octets = memoryview(older.view(np.uint8).reshape(-1, 4)[:, :3].tobytes())
    return frames.encode((newest << 8).view("<f4"), octets)


def test_every_pattern_comes_back():
    """Infinities, NaNs of all kinds, subnormals and both zeros, each given some other one."""
    every = np.arange(1 << 24, dtype="<u4")
    for step in (1, 0x7FFFFF, 0x800000):
        older = np.roll(every, step)
        for begin in range(0, 1 << 24, 41 * frames.ELEMENTS + 7):
            mine, other = every[begin:][: frames.ELEMENTS], older[begin:][: frames.ELEMENTS]
            frame = packed(mine, other)
            assert len(frame) <= size_of("D24", len(mine))
            assert (casts.add_codes(frames.decode(frame), other << 8) >> 8 == mine).all()


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000, frames.ELEMENTS - 1, frames.ELEMENTS])
@pytest.mark.parametrize("moved", [1, 100, 1 << 16, 1 << 24])
def test_any_differences_are_packed_as_documented(numel, moved):
    """Also what can't be compressed takes no more than its place says."""
    random = np.random.default_rng(numel)
    older = random.integers(0, 1 << 24, numel, dtype="<u4")
    off = random.integers(0, moved, numel)
    frame = packed((older + off & 0xFFFFFF).astype("<u4"), older)
    assert len(frame) <= size_of("D24", numel)
    codes = frames.decode(frame)
    assert codes.tolist() == [2 * one if one < 1 << 23 else 2 * ((1 << 24) - one) - 1 for one in off.tolist()]
    assert numel > 1000 or read_frame(frame) == codes.tolist()


def test_what_did_not_change_takes_next_to_nothing():
    same = np.arange(5000, dtype="<u4")
    assert len(packed(same, same)) < 80


def test_negative_zero_is_another_pattern():
    zeros = np.array([0.0, -0.0], "<f4").view("<u4")
    for old in zeros:
        codes = frames.decode(packed(zeros >> 8, np.full(2, old) >> 8)).tobytes()
        assert casts.refine(codes, "D24", np.full(2, old).tobytes(), "F32", "F32") == zeros.tobytes()
