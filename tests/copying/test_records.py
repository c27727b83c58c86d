"""What a merge reads is compared with llmtailor's own records of the sources: damage is refused, not copied."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from faults.driver import Request, ask
from helpers.checkpoints import make_run
from helpers.commands import call
from helpers.composing import convert
from llmtailor.checkpoint.layout import Bytes, Copy, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.formats.partial.manifest import ranges_of, read_manifest, read_ranges
from llmtailor.storage.checksums import Taken, crc32
from thin.scene import SHORT


@pytest.fixture(scope="module")
def thinned(tmp_path_factory):
    """A run of which the steps 100 and 200 are partial, each of half of the parts."""
    run = make_run(tmp_path_factory.mktemp("records") / "run", shape=SHORT)
    call("thin", run, "--strategy", "parity", "--yes")
    return run


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """The same with 24-bit masters and 8-bit moments, which a merge converts."""
    run = make_run(tmp_path_factory.mktemp("rounded") / "run", shape=SHORT)
    call("thin", run, "--strategy", "parity", "--masters", "24bit", "--moments", "8bit", "--yes")
    return run


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def tensors(path: Path) -> dict[str, tuple[int, int]]:
    """Return where the tensors of a safetensors file are."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return {
        key: (8 + size + entry["data_offsets"][0], 8 + size + entry["data_offsets"][1])
        for key, entry in header.items()
        if key != "__metadata__"
    }


@pytest.mark.parametrize("form", ["thinned", "rounded"])
@pytest.mark.parametrize("kind", ["master", "exp_avg"])
@pytest.mark.parametrize("words", [(), ("--num-gpu", 3), ("--to", "trainer")], ids=["as it is", "3 ranks", "plain"])
def test_a_flipped_bit_of_a_partial_save_is_not_laundered(tmp_path, request, form, kind, words):
    run = Path(shutil.copytree(request.getfixturevalue(form), tmp_path / "run"))
    call("merge", "--run", run, "--at", 200, tmp_path / "sound", *words)
    path = next((run / "partial" / "step-00000200").glob("rank-00001*"))
    key, (start, _) = next(
        (key, at) for key, at in tensors(path).items() if key.startswith(f"{kind}/") and at[0] < at[1]
    )
    flip(path, start + 1)
    told = call("merge", "--run", run, "--at", 200, tmp_path / "out", *words).stderr
    assert path.name in told and "it is not as it was written" in told
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 100, key
    call("recipe", run, "--at", 200, "-o", tmp_path / "recipe.yaml")
    told = call("merge", tmp_path / "recipe.yaml", tmp_path / "named", *words, code=4).stderr
    assert path.name in told and "it is not as it was written" in told
    assert not (tmp_path / "named").exists(), "what a recipe names is not replaced"


@pytest.mark.parametrize("number", range(2))
def test_what_any_rank_converts_is_compared_and_all_take_an_older_save(tmp_path, rounded, number):
    run, out = Path(shutil.copytree(rounded, tmp_path / "run")), tmp_path / "out"
    path = next((run / "partial" / "step-00000200").glob(f"rank-{number:05}*"))
    flip(path, next(at for key, at in tensors(path).items() if key.startswith("exp_avg/") and at[0] < at[1])[0] + 1)
    words = ["merge", "--run", str(run), "--at", "200", str(out), "--distributed"]
    said = [tmp_path / f"said-{rank}" for rank in range(2)]
    assert ask({"LLMTAILOR_TIMEOUT": "60"}, [Request(words, str(tmp_path), said=str(file)) for file in said]) == [0, 0]
    assert path.name in said[0].read_text() and "it is not as it was written" in said[0].read_text()
    assert not said[1].read_text()
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 100


@pytest.mark.parametrize("name", ["trainer_state.json", "config.json"])
def test_carried_files_are_compared(tmp_path, thinned, name):
    run = Path(shutil.copytree(thinned, tmp_path / "run"))
    path = run / "partial" / "step-00000200" / name
    path.write_bytes(path.read_bytes() + b"\n")
    told = call("merge", "--run", run, "--at", 200, tmp_path / "out", code=4).stderr
    assert name in told and "remove it from `carried` in manifest.json" in told
    content = json.loads((path.parent / "manifest.json").read_text())
    content["carried"] = [one for one in content["carried"] if one["path"] != name]
    (path.parent / "manifest.json").write_text(json.dumps(content))
    call("merge", "--run", run, "--at", 200, tmp_path / "out")


def test_a_flipped_bit_of_a_composite_is_not_laundered(tmp_path, thinned):
    """Its file is read in parts, but for the little between them."""
    composite = tmp_path / "composite"
    call("merge", "--run", thinned, "--at", 200, composite)
    convert(composite, tmp_path / "sound", world_size=3)
    [path, *_] = sorted(composite.glob("global_step*/*rank_1*optim_states.pt"))
    flip(path, path.stat().st_size // 2)
    told = call("convert", composite, tmp_path / "out", "--num-gpu", 3, code=4).stderr
    assert path.name in told and "it is not as it was written" in told


def test_older_saves_have_no_such_records(tmp_path, thinned):
    run = Path(shutil.copytree(thinned, tmp_path / "run"))
    for path in run.glob("partial/*/manifest.json"):
        content = json.loads(path.read_text())
        del content["carried"]
        for one in content["bundles"]:
            del one["ranges"]
        path.write_text(json.dumps(content))
        assert read_manifest(path.parent, "").carried == {}
    call("merge", "--run", run, "--at", 200, tmp_path / "out")


@pytest.mark.parametrize("text", ["0+8=1", "x+8=00000000", "0-8=00000000", "0+8=0000000g", "1" * 15 + "+1=00000000"])
def test_damaged_records_are_refused(text):
    with pytest.raises(ValueError, match="not a range"):
        read_ranges(text)


def test_ranges_are_those_of_the_states():
    pieces = [
        (Bytes(b"head", "header"), 1),
        (Copy(Extent("f", 0, 16)), 2),
        (Zeros(4, "gap"), 3),
        (Copy(Extent("f", 9, 12)), 255),
    ]
    assert ranges_of(pieces) == "4+10=00000002 18+3=000000ff"
    assert read_ranges(ranges_of(pieces)) == [(4, 20, 2), (24, 27, 255)]


def test_what_can_be_compared():
    data = bytes(range(256)) * 4096
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> int:
        reads.append((start, stop))
        return crc32(data[start:stop])

    def wrong(pieces: list[tuple[int, int]], stated: list[tuple[int, int]], damage: int = 0, **options: bool):
        reads.clear()
        taken = Taken(["file"])
        for start, stop in pieces:
            taken.add("file", start, stop, crc32(data[start:stop]))
        options = {"is_partly": False, **options}
        return taken.wrong("file", [(a, b, crc32(data[a:b]) ^ damage) for a, b in stated], read, **options)

    whole, size = [(0, len(data))], len(data)
    assert wrong([(0, 500_000), (500_000, size)], whole) == [] and reads == []
    assert wrong([(500_000, size), (0, 500_000), (0, 1000)], whole, 1) == whole and reads == []
    assert wrong([(64, size - 8)], whole, 1) == whole and reads == [(0, 64), (size - 8, size)]
    assert wrong([(0, 500_000)], whole, 1) == [] and reads == []
    assert wrong([(0, 500_000)], whole, 1, is_partly=True) == whole and reads == [(500_000, size)]
    assert wrong([], whole, 1, is_partly=True) == [] and reads == []
    assert wrong([(0, 300_000)], [(100_000, 200_000)], 1) == [] and reads == []
    assert wrong([(0, 100_000), (100_000, 200_000)], [(0, 100_000), (100_000, 200_000)], 1) == [
        (0, 100_000),
        (100_000, 200_000),
    ]
