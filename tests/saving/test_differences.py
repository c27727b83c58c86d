"""Masters that are saved as compressed differences, held against copies of the live tensors."""

from __future__ import annotations

import io
import json
import shutil
from random import Random

import numpy as np
import pytest
import zstandard

from helpers.cases import mostly_long
from helpers.commands import call
from helpers.files import flip
from helpers.states import in_24_bits
from llmtailor.errors import SourceError, TailorError, UnsupportedCheckpoint, UsageError
from llmtailor.formats.partial import differences
from llmtailor.formats.registry import index_checkpoint
from llmtailor.saving import SaveFailed, SavingOptions
from llmtailor.storage import casts, frames
from llmtailor.verify.inspect import inspect_checkpoint
from llmtailor.verify.verify import verify_checkpoint
from saving.loop import Disk, Loop, check_states, manifests

FILE = "differences-00000-of-00001.zst"
IN_TURN = {"policy": "moments_in_turn:3", "masters": "24bit-zstd"}
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


def test_zstd_reads_the_file(loop):
    """In planes of each block, the differences of the 24 bits, numbered in the order of the values."""
    path = loop.run / "partial/step-00000003"
    content = zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO((path / FILE).read_bytes()), read_across_frames=True
    )
    content, wanted = content.read(), b""
    index = index_checkpoint(path)
    steps = {one["save_id"]: step for step, one in manifests([loop.run]).items()}
    for name, _, place in differences.read_differences(path, FILE, "").masters:
        base = steps[index.partial.differences[name].base]
        for at in range(0, place.cuts[-1], frames.ELEMENTS):
            both = [loop.truth[step][name]["master"].flatten()[at:][: frames.ELEMENTS] for step in (3, base)]
            new, old = (in_24_bits(one).numpy().view("<i4").astype(np.int64) for one in both)
            new, old = (np.where(one < 0, ~(one & 0x7FFFFFFF) >> 8, one >> 8) for one in (new, old))
            off = new - old
            codes = np.where(off < 0, -2 * off - 1, 2 * off).astype("<u4")
            wanted += codes.view(np.uint8).reshape(-1, 4)[:, :3].T.tobytes()
    assert content == wanted


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


# Damage


def test_verify_and_merge_find_damaged_frames(loop, tmp_path):
    path = loop.run / "partial/step-00000005"
    file = differences.read_differences(path, FILE, "")
    _, _, place = file.masters[-1]
    flip(path / FILE, sum(place.frames[0][:2]) // 2)
    assert f"{FILE}: the file is not the one that the save wrote" in call("verify", "--deep", path, code=7).stdout
    wrong = call("merge", "--run", loop.run, tmp_path / "out", code=4).stderr
    assert FILE in wrong and "a frame of zstd is damaged" in wrong and not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("at", [*range(-17, 0)])
def test_a_seek_table_that_is_damaged_is_refused(loop, at):
    path = loop.run / "partial/step-00000005"
    flip(path / FILE, (path / FILE).stat().st_size + at)
    if at != -5:  # the descriptor, which says nothing
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


def test_a_frame_can_not_claim_more_than_a_block():
    """Nothing of its size is allocated."""
    large = zstandard.ZstdCompressor().compress(bytes(3 * frames.ELEMENTS + 3))
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(300))
    hostile = b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little")
    for wrong in (large, unknown, hostile, hostile[:9], b"", zstandard.ZstdCompressor().compress(bytes(4))):
        with pytest.raises(ValueError, match=r".+"):
            frames.codes_of(wrong)


# Without the package


def test_it_is_named_if_the_package_is_missing(loop, tmp_path, monkeypatch):
    monkeypatch.setattr(differences, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="zstandard") as caught:
        SavingOptions(masters="24bit-zstd")
    assert "pip install 'llmtailor[zstd]'" in caught.value.problems[0].fix
    call("inspect", loop.run / "partial/step-00000005")
    with pytest.raises(UnsupportedCheckpoint, match="zstandard is not installed"):
        loop.compose(5, tmp_path / "out")
    call("merge", "--run", loop.run, "--at", 1, tmp_path / "first")


# Any patterns


@pytest.mark.parametrize("by_numba", [True, False])
def test_every_pattern_comes_back(by_numba, monkeypatch):
    """Infinities, NaNs of all kinds, subnormals and both zeros, each given some other one."""
    if not by_numba:
        monkeypatch.setattr(casts, "loops", lambda: None)
    elif casts.loops() is None:
        pytest.skip("numba is not installed")
    every = np.arange(1 << 24, dtype="<u4")
    compressor = frames.Compressor()
    for step in (1, 0x7FFFFF, 0x800000):
        older = np.roll(every, step)
        for begin in range(0, 1 << 24, 41 * frames.ELEMENTS + 7):
            mine, other = every[begin:][: frames.ELEMENTS], older[begin:][: frames.ELEMENTS]
            octets = [one.view(np.uint8).reshape(-1, 4)[:, :3].tobytes() for one in (mine, other)]
            frame = compressor.frame(casts.planes_of(*octets))
            assert len(frame) <= casts.size_of("D24", len(mine))
            assert (casts.add_codes(frames.codes_of(frame), other << 8) >> 8 == mine).all()
    zeros = np.float32([0.0, -0.0]).view("<u4")
    for old in zeros:
        both = [casts.pack(one.view("<f4"), "F24").data for one in (zeros, np.full(2, old))]
        codes = frames.codes_of(compressor.frame(casts.planes_of(*both))).tobytes()
        assert casts.refine(codes, "D24", np.full(2, old).tobytes(), "F32", "F32") == zeros.tobytes()
