"""safetensors: headers are located and checked, and what we lay out the library opens."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.render import render
from llmtailor.checkpoint.layout import Bytes, FileLayout, Slot
from llmtailor.containers.safetensors import (
    INDEX,
    SINGLE,
    lay_out_index,
    lay_out_weights,
    read_weights,
)
from llmtailor.errors import SourceError
from llmtailor.model.roles import WEIGHT, State

SEEDED = torch.Generator().manual_seed(0)
TENSORS = {
    "b": torch.randn(3, 5, generator=SEEDED).bfloat16(),
    "a": torch.randn(4, generator=SEEDED),
    "half": torch.randn(2, 2, generator=SEEDED).half(),
    "ids": torch.arange(3),
    "mask": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
}


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    return tmp_path


def test_every_tensor_is_found_where_the_library_wrote_it(folder):
    (file,) = read_weights(folder, "x")
    content = (folder / SINGLE).read_bytes()
    assert set(file.tensors) == set(TENSORS) and file.metadata == {"format": "pt"}
    for name, tensor in TENSORS.items():
        held = file.tensors[name]
        extent = held.place.extent
        assert held.shape == tuple(tensor.shape)
        assert content[extent.start : extent.stop] == raw(tensor)


def fill(layout: FileLayout, tensors) -> FileLayout:
    """Turn slots into literal bytes, as the planner and the runner would."""
    filled = []
    for segment in layout.pieces:
        if isinstance(segment, Slot):
            assert segment.state == State(segment.state.param, WEIGHT)
            filled.append(Bytes(raw(tensors[segment.state.param]), "data"))
        else:
            filled.append(segment)
    return FileLayout(layout.path, tuple(filled))


def test_the_same_header_is_laid_out_again(folder):
    (file,) = read_weights(folder, "x")
    content = render(fill(lay_out_weights(file, None), TENSORS), folder)
    assert content == (folder / SINGLE).read_bytes()


def test_another_dtype_is_for_floats_only(folder):
    (file,) = read_weights(folder, "x")
    wanted = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in TENSORS.items()}
    (folder / "cast.safetensors").write_bytes(render(fill(lay_out_weights(file, "F16"), wanted), folder))
    loaded = load_file(folder / "cast.safetensors")
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {n: t.dtype for n, t in wanted.items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())


def sharded(folder, *names_of_files):
    weight_map = {}
    for number, names in enumerate(names_of_files, 1):
        path = f"model-{number:05}-of-{len(names_of_files):05}.safetensors"
        save_file({name: TENSORS[name] for name in names}, folder / path)
        weight_map |= dict.fromkeys(names, path)
    index = {"metadata": {"total_size": sum(len(raw(TENSORS[name])) for name in weight_map)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def test_several_files_with_an_index(tmp_path):
    index = sharded(tmp_path, ["a", "b"], ["ids"])
    files = read_weights(tmp_path, "x")
    assert [list(file.tensors) for file in files] == [["a", "b"], ["ids"]]
    again = json.loads(render(lay_out_index(files, None), tmp_path))
    assert again == index
    assert json.loads(render(lay_out_index(files, "F32"), tmp_path))["metadata"]["total_size"] == 4 * 4 + 15 * 4 + 3 * 8


def test_the_index_is_ignored_beside_a_single_file(folder):
    (folder / INDEX).write_text("{}")
    assert [file.path for file in read_weights(folder, "x")] == [SINGLE]


def test_every_bad_shard_is_named(tmp_path):
    sharded(tmp_path, ["a"], ["b"], ["ids", "mask"])
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    save_file({"ids": TENSORS["ids"]}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(SourceError) as caught:
        read_weights(tmp_path, "ckpt")
    told = {problem.where.removeprefix("ckpt/"): problem.what for problem in caught.value.problems}
    assert "missing" in told["model-00001-of-00003.safetensors"]
    assert "truncated" in told["model-00002-of-00003.safetensors"]
    assert "the file lacks mask" in told["model-00003-of-00003.safetensors"]
