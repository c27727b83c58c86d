"""Files and blobs are alike if they differ in their names, or in the elements of tensors, and in nothing else."""

from __future__ import annotations

import io
import struct
import zlib
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtailor.containers import torch_file
from llmtailor.containers.torch_file import AlikeBlobs, Buffered, InMemoryFile, Window, open_torch_file, read_records
from llmtailor.containers.unpickle import as_tensor
from llmtailor.errors import Problems, SourceError
from llmtailor.formats.dcp.folder import read_folder
from llmtailor.storage.local import open_source

# --- files ------------------------------------------------------------------------------------------------------------


def key(folder, tree, name="rank_1.pt"):
    torch.save(tree, folder / name)
    return open_torch_file(folder, name, name).key


def headers(**more):
    """A tree whose file consists of headers, as model states of ZeRO-3 do."""
    return {"module": {f"layer{number}": torch.empty(0) for number in range(40)}, **more}


def tensors(step=3.0, value=1.0, **more):
    """A tree whose file consists of tensors, as optimizer states do."""
    return {"step": torch.tensor(step), "flat": torch.full((50_000,), value), **more}


@pytest.mark.parametrize("make", [headers, tensors])
def test_names_of_one_length_do_not_count(tmp_path, make):
    first = key(tmp_path, make(overflow=False))
    assert first is not None
    assert key(tmp_path, make(overflow=False), "rank_2.pt") == first
    assert key(tmp_path, make(overflow=True)) != first


def test_elements_do_not_count_but_scalars_do(tmp_path):
    first = key(tmp_path, tensors())
    assert key(tmp_path, tensors(value=2.0)) == first
    assert key(tmp_path, tensors(step=4.0)) != first
    assert key(tmp_path, tensors(more=torch.zeros(3))) != first


def test_a_file_that_holds_its_name_elsewhere_is_like_no_other(tmp_path):
    assert key(tmp_path, headers(note="rank_1/")) is None
    assert key(tmp_path, headers(note="rank_2/")) is not None
    assert key(tmp_path, headers(note="rank_2/")) != key(tmp_path, headers(note="rank_3/"), "rank_3.pt")
    assert key(tmp_path, headers(note=torch.full((7,), 255, dtype=torch.uint8))) is None, "what stands for the name"


def test_what_is_decoded_later_is_what_was_there(tmp_path):
    for tree in (headers(), tensors()):
        torch.save(tree, tmp_path / "x.pt")
        opened = open_torch_file(tmp_path, "x.pt", "x")
        (tmp_path / "x.pt").unlink()
        assert opened.archive == "x"
        assert opened.decode().tree.keys() == tree.keys()
    assert as_tensor(opened.decode().tree["flat"]).shape == (50_000,)


def test_a_damaged_file_is_refused_before_or_when_it_is_decoded(tmp_path):
    for tree in (headers(), tensors()):
        torch.save(tree, tmp_path / "x.pt")
        whole = (tmp_path / "x.pt").read_bytes()
        for at in (31, 100, len(whole) - 30):
            (tmp_path / "x.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
            with pytest.raises(SourceError):
                open_torch_file(tmp_path, "x.pt", "x").decode()
        (tmp_path / "x.pt").write_bytes(whole[:-22] + struct.pack("<4s18x", b"PK\x05\x06"))
        with pytest.raises(SourceError):
            open_torch_file(tmp_path, "x.pt", "x").decode()


@given(st.integers(0, 60_000), st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 20_000)), max_size=30))
@settings(max_examples=60)
def test_blocks_return_what_the_file_holds(tmp_path_factory, num_bytes, wanted):
    path = tmp_path_factory.getbasetemp() / "blocks"
    data = bytes(number * 7 % 251 for number in range(num_bytes))
    path.write_bytes(data)
    with open_source(path, "x") as file:
        buffered = Buffered(file)
        for start, length in wanted:
            start = min(start, num_bytes)
            stop = min(start + length, num_bytes)
            assert buffered.read(start, stop) == data[start:stop]


# --- blobs of DCP -----------------------------------------------------------------------------------------------------


def blob_of(*tensors: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensors[0] if len(tensors) == 1 else list(tensors), file)
    return file.getvalue()


def find(alike: AlikeBlobs[str], data: bytes, before: int = 0) -> str | None:
    file = InMemoryFile(bytes(before) + data + b"the next one", "file")
    return alike.find(file, before, before + len(data))


class Within(Window):
    """A window of bytes in memory."""

    def __init__(self, file: InMemoryFile, start: int, stop: int):
        super().__init__(file, start, stop)
        self._file = file

    def read(self, start: int, stop: int) -> bytes:
        return self._file.read(self.start + start, self.start + stop)


def remember(data: bytes) -> AlikeBlobs[str]:
    alike = AlikeBlobs[str]()
    alike.add(Within(InMemoryFile(data, "file"), 0, len(data)), "known")
    return alike


def test_every_byte_but_elements_and_checksums_counts():
    data = blob_of(torch.arange(3, 63, dtype=torch.float32))
    alike = remember(data)
    other = blob_of(torch.arange(60, dtype=torch.float32))
    assert other != data and find(alike, other) == find(alike, other, before=100) == "known"
    records = read_records(InMemoryFile(data, "file"))
    [elements] = [one for name, one in records.items() if name.startswith("archive/data/")]
    where = (elements.stop + 4, elements.crc_at)
    assert all(
        data[at : at + 4] == zlib.crc32(data[elements.start : elements.stop]).to_bytes(4, "little") for at in where
    )
    # the descriptor of the hash says nothing to any reader
    descriptor = records["archive/.data/serialization_id"].stop + 4
    free = {*range(elements.start, elements.stop)}.union(*(range(at, at + 4) for at in (*where, descriptor)))
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
        assert (find(alike, changed) == "known") == (at in free), at


def test_what_has_several_tensors_or_another_size_is_not_alike():
    several = blob_of(torch.ones(3), torch.ones(4))
    assert find(remember(several), several) is None
    alike = remember(blob_of(torch.ones(3)))
    assert find(alike, blob_of(torch.ones(3))) == "known"
    assert find(alike, blob_of(torch.ones(400))) is find(alike, blob_of(torch.ones(3).half())) is None


def test_blobs_of_one_shape_and_dtype_are_decoded_once(tmp_path, monkeypatch):
    state = {f"layers.{number}.weight": torch.full((5, 3 + number % 2), float(number)) for number in range(60)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    decoded = Counter()
    real = torch_file.read_pickle
    monkeypatch.setattr(torch_file, "read_pickle", lambda *args, **more: decoded.update("1") or real(*args, **more))
    problems = Problems()
    folder = read_folder(tmp_path, "", "x", problems)
    assert not problems.errors
    assert decoded.total() == 2
    for key, stored in folder.tensors.items():
        (one,) = stored.held.place.cover(0, stored.held.numel)
        data = (tmp_path / one.extent.path).read_bytes()[one.extent.start : one.extent.stop]
        assert data == state[key].numpy().tobytes()
