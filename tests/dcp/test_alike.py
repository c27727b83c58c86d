"""Blobs count as alike only if nothing differs but elements and their checksums."""

from __future__ import annotations

import io
import zlib
from collections import Counter

import torch
import torch.distributed.checkpoint as dcp

from llmtailor.containers import torch_file
from llmtailor.containers.torch_file import AlikeBlobs, Held, Window, read_records
from llmtailor.errors import Problems
from llmtailor.formats.dcp.folder import read_folder


def blob_of(*tensors: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensors[0] if len(tensors) == 1 else list(tensors), file)
    return file.getvalue()


def find(alike: AlikeBlobs[str], data: bytes, before: int = 0) -> str | None:
    file = Held(bytes(before) + data + b"the next one", "file")
    return alike.find(Within(file, before, before + len(data)), file)


class Within(Window):
    """A window of bytes in memory."""

    def __init__(self, file: Held, start: int, stop: int):
        super().__init__(file, start, stop)
        self._file = file

    def read(self, start: int, stop: int) -> bytes:
        return self._file.read(self.start + start, self.start + stop)


def remember(data: bytes) -> AlikeBlobs[str]:
    alike = AlikeBlobs[str]()
    alike.add(Within(Held(data, "file"), 0, len(data)), "known")
    return alike


def test_every_byte_but_elements_and_checksums_counts():
    data = blob_of(torch.arange(3, 63, dtype=torch.float32))
    alike = remember(data)
    other = blob_of(torch.arange(60, dtype=torch.float32))
    assert other != data and find(alike, other) == find(alike, other, before=100) == "known"
    records = read_records(Held(data, "file"))
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
    monkeypatch.setattr(torch_file, "read_pickle", lambda *args: decoded.update("1") or real(*args))
    problems = Problems()
    folder = read_folder(tmp_path, "", "x", problems)
    assert not problems.errors
    assert decoded.total() == 2
    for key, stored in folder.tensors.items():
        (one,) = stored.held.place.cover(0, stored.held.numel)
        data = (tmp_path / one.extent.path).read_bytes()[one.extent.start : one.extent.stop]
        assert data == state[key].numpy().tobytes()
