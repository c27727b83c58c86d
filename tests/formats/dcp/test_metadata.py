"""Every form of a ``.metadata`` is read as torch reads it, and what llmtailor writes is what torch would."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from llmtailor.containers.dcp import METADATA, lay_out_metadata, read_metadata
from llmtailor.containers.dcp_pickle import MetadataMachine
from llmtailor.errors import SourceError

LARGE = (1 << 8, 1 << 16, 1 << 33, 1 << 40)
"""Sizes whose numbers are pickled in one to six bytes"""


def metadata(shape: tuple[int, ...], ranks: int, *, is_shared: bool) -> Metadata:
    """Return the metadata of a tensor that is cut along dimension 0, an empty chunk, a number and an object.

    With ``is_shared``, places and chunks share objects, as when one process saves everything.
    """
    part = shape[0] // ranks
    tensors: dict[str, object] = {"options": BytesStorageMetadata()}
    places = {MetadataIndex("options"): _StorageInfo("__0_0.distcp", 0, 100)}
    chunks = []
    sizes = torch.Size((part, *shape[1:]))
    for rank in range(ranks):
        offsets = torch.Size((rank * part, *[0] * (len(shape) - 1)))
        chunks.append(ChunkStorageMetadata(offsets, sizes if is_shared else torch.Size([*sizes])))
        index = MetadataIndex("w", offsets if is_shared else torch.Size([*offsets]), rank)
        places[index] = _StorageInfo(f"__{rank % 3}_0.distcp", 1000 + rank * (1 << 33), 1 << 32)
    chunks.append(ChunkStorageMetadata(torch.Size(shape), torch.Size((0, *shape[1:]))))
    properties = TensorProperties(dtype=torch.float32)
    tensors["w"] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    tensors["step"] = TensorStorageMetadata(properties, torch.Size(), [ChunkStorageMetadata(*[torch.Size()] * 2)])
    places[MetadataIndex("step", torch.Size(), 0)] = _StorageInfo("__1_0.distcp", 7, 70)
    return Metadata(tensors, {key: (key,) for key in tensors}, places, version="1.0.0")


def expected(data: bytes) -> dict[str, list[tuple]]:
    """Return offsets, sizes and place of each chunk, as torch reads them."""
    read = pickle.loads(data)
    found: dict[str, list[tuple]] = {}
    for key, about in read.state_dict_metadata.items():
        for one in getattr(about, "chunks", [ChunkStorageMetadata((), ())]):
            offset = one.offsets if hasattr(about, "chunks") else None
            if (at := read.storage_data.get(MetadataIndex(key, offset))) is not None:
                place = at.relative_path, at.offset, at.offset + at.length
                found.setdefault(key, []).append((tuple(one.offsets), tuple(one.sizes), place))
    return found


def decoded(folder, data: bytes) -> dict[str, list[tuple]]:
    (folder / METADATA).write_bytes(data)
    entries = read_metadata(folder, METADATA, "x")
    return {
        key: [(one.offsets, one.sizes, (one.blob.path, one.blob.start, one.blob.stop)) for one in entry.chunks]
        for key, entry in entries.items()
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("shape", [(4,), (64, 3), (LARGE[1], LARGE[0], 5), (LARGE[3],), (LARGE[2], 2, 2, 2)])
def test_it_is_read_as_torch_reads_it(tmp_path, shape, is_shared, protocol):
    data = pickle.dumps(metadata(shape, 4, is_shared=is_shared), protocol)
    assert decoded(tmp_path, data) == expected(data)


def test_frames_and_blocks_end_anywhere(tmp_path):
    data = pickle.dumps(metadata((4000, 2), 4000, is_shared=False))
    assert len(data) > 4 * 64 << 10
    assert decoded(tmp_path, data) == expected(data)


def test_what_is_written_is_what_torch_would_write(tmp_path):
    """Twice: its own form is read too."""
    wanted = metadata((600, 3), 300, is_shared=False)
    (tmp_path / METADATA).write_bytes(pickle.dumps(wanted))
    wanted.state_dict_metadata["w"].chunks.pop()  # the empty one
    for _ in range(2):
        laid_out = lay_out_metadata(METADATA, read_metadata(tmp_path, METADATA, "x"))
        written = b"".join(one.data for one in laid_out.each())
        assert pickle.loads(written) == wanted
        (tmp_path / METADATA).write_bytes(written)


@pytest.mark.parametrize("order", ["reversed", "in turn"])
def test_places_may_be_in_any_order(tmp_path, order):
    wanted = metadata((300, 3), 300, is_shared=False)
    rows = [*wanted.storage_data.items()]
    wanted.storage_data = dict(rows[::-1] if order == "reversed" else [*rows[1::2], *rows[::2]])
    data = pickle.dumps(wanted)
    assert decoded(tmp_path, data) == expected(data)


def test_tensors_that_are_cut_alike_share_their_chunks(tmp_path):
    """As they are written; torch reads that, and so does llmtailor."""
    wanted = metadata((600, 3), 300, is_shared=False)
    about = wanted.state_dict_metadata
    about["w"].chunks.pop()  # the empty one
    uneven = [ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((2, 3))) for at in range(600, 1200, 2)]
    for key, chunks in (("v", about["w"].chunks), ("u", uneven)):
        about[key] = TensorStorageMetadata(about["w"].properties, torch.Size((600, 3)), [*chunks])
        wanted.planner_data[key] = (key,)
        for number, chunk in enumerate(chunks):
            index = MetadataIndex(key, chunk.offsets, number)
            wanted.storage_data[index] = _StorageInfo(f"__{number % 7}_1.distcp", number * 50, 50)
    (tmp_path / METADATA).write_bytes(pickle.dumps(wanted))
    for _ in range(2):
        laid_out = lay_out_metadata(METADATA, read_metadata(tmp_path, METADATA, "x"))
        (tmp_path / METADATA).write_bytes(b"".join(one.data for one in laid_out.each()))
        written = pickle.loads((tmp_path / METADATA).read_bytes())
        assert written == wanted
        lists = {key: written.state_dict_metadata[key].chunks for key in "wvu"}
        assert lists["w"] is lists["v"] is not lists["u"]


@pytest.mark.parametrize("is_written", [False, True])
def test_chunks_are_not_decoded_opcode_by_opcode(tmp_path, monkeypatch, is_written):
    count = 0

    def counted(do):
        def run(machine):
            nonlocal count
            count += 1
            do(machine)

        return run

    monkeypatch.setattr(MetadataMachine, "opcodes", {code: counted(do) for code, do in MetadataMachine.opcodes.items()})
    counts = []
    for ranks in (200, 600):
        data = pickle.dumps(metadata((ranks, 3), ranks, is_shared=False))
        (tmp_path / METADATA).write_bytes(data)
        if is_written:
            laid_out = lay_out_metadata(METADATA, read_metadata(tmp_path, METADATA, "x"))
            (tmp_path / METADATA).write_bytes(b"".join(one.data for one in laid_out.each()))
        count = 0
        read_metadata(tmp_path, METADATA, "x")
        counts.append(count)
    assert counts[1] - counts[0] < 2 * 400, "a chunk and its place take a hundred opcodes"


@pytest.mark.parametrize("rank", [0, 3])
def test_a_place_behind_the_end_of_any_file_is_refused(tmp_path, rank):
    """Whether its place is decoded opcode by opcode, as the first one is, or not."""
    wrong = metadata((8, 2), 4, is_shared=False)
    [at] = [place for index, place in wrong.storage_data.items() if index.fqn == "w" and index.index == rank]
    at.offset = (1 << 63) - 10
    (tmp_path / METADATA).write_bytes(pickle.dumps(wrong))
    with pytest.raises(SourceError, match="places that no tensor has"):
        read_metadata(tmp_path, METADATA, "x")


def test_a_place_elsewhere_is_not_one(tmp_path):
    """torch would not find it there."""
    wrong = metadata((8, 2), 4, is_shared=False)
    places = wrong.storage_data
    wrong.storage_data, wrong.storage_meta = dict([*places.items()][:2]), {"storage_data": places}
    (tmp_path / METADATA).write_bytes(pickle.dumps(wrong))
    with pytest.raises(SourceError, match="stored nowhere"):
        read_metadata(tmp_path, METADATA, "x")


def test_sizes_that_do_not_end_as_they_should_are_refused(tmp_path):
    data = pickle.dumps(metadata((64, 3), 16, is_shared=False))
    at = data.rindex(b"\x86\x94\x85\x94R")
    (tmp_path / METADATA).write_bytes(data[:at] + b"\x85" + data[at + 1 :])  # a tuple of the second number alone
    with pytest.raises(SourceError):
        read_metadata(tmp_path, METADATA, "x")
