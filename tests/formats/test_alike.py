"""Files are alike if they differ in their names, or in the elements of tensors, and in nothing else."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtailor.containers.torch_file import Buffered, open_torch_file
from llmtailor.containers.unpickle import as_tensor
from llmtailor.errors import SourceError
from llmtailor.storage.local import open_source


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
