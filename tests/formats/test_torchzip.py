"""torch files: what torch.save writes is located byte by byte, what we lay out is what torch.load opens."""

from __future__ import annotations

import collections
import shutil
import subprocess
import zipfile

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.render import render
from llmtailor.checkpoint.layout import Bytes, Copy, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.containers.torch_file import ALIGNMENT, lay_out_torch_file, read_torch_file
from llmtailor.containers.unpickle import as_tensor, make_tensor
from llmtailor.errors import SourceError

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def save(folder, tree, name="x.pt"):
    torch.save(tree, folder / name)
    return read_torch_file(folder, name, name)


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tensor_is_found_where_torch_wrote_it(tmp_path, dtype):
    """The canary: a new torch that lays its files out differently fails here."""
    big = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    tree = {"a": big, "view": big[2:5], "scalar": torch.tensor(3).to(dtype), "empty": torch.empty(0, dtype=dtype)}
    file = save(tmp_path, tree)
    content = (tmp_path / "x.pt").read_bytes()
    for name, tensor in tree.items():
        view = as_tensor(file.tree[name])
        assert view is not None and view.shape == tuple(tensor.shape) and view.is_contiguous
        (carried,) = view.storage.content
        start = carried.extent.start + view.offset * tensor.element_size()
        assert content[start : start + len(raw(tensor))] == raw(tensor)
    assert as_tensor(file.tree["a"]).storage is as_tensor(file.tree["view"]).storage


def test_tensors_with_attributes_and_parameters_are_tensors(tmp_path):
    tagged = torch.arange(6.0).requires_grad_()
    tagged.ds_id = "8_9"
    file = save(tmp_path, [tagged, torch.nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3).t()])
    views = [as_tensor(node) for node in file.tree]
    assert [view.shape for view in views] == [(6,), (2, 3), (3, 2)]
    assert [view.is_contiguous for view in views] == [True, True, False]
    assert as_tensor({"no": "tensor"}) is None


def test_a_file_laid_out_again_loads_alike(tmp_path):
    shared = torch.arange(10.0)
    module = collections.OrderedDict(w=torch.arange(15.0).reshape(3, 5).bfloat16(), b=torch.empty(0))
    module._metadata = {"": {"version": 1}}
    tree = {"module": module, "x": shared[2:], "y": shared[:4], "n": [1, 2**70, -3, 1e-300, None, (True,)], "s": {1, 2}}
    file = save(tmp_path, tree)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "x.pt"
    out.write_bytes(render(lay_out_torch_file("x.pt", file.tree), tmp_path))
    for mmap in (False, True):
        again = torch.load(out, weights_only=False, mmap=mmap)
        assert torch.equal(again["module"]["w"], module["w"]) and again["module"]._metadata == module._metadata
        assert torch.equal(again["x"], shared[2:]) and again["x"].untyped_storage().data_ptr() == (
            again["y"].untyped_storage().data_ptr()
        )
        assert again["n"] == tree["n"] and again["s"] == tree["s"]
    # torch writes 214 bytes more: the record .data/serialization_id, which nothing needs
    assert 0 < (tmp_path / "x.pt").stat().st_size - out.stat().st_size < 300


def test_a_laid_out_file_is_a_sound_zip(tmp_path):
    filled = make_tensor("F32", (5,), (Bytes(b"abcd" * 3, "data"), Zeros(8, "padding")))
    (tmp_path / "x.pt").write_bytes(render(lay_out_torch_file("x.pt", {"t": filled, "u": [filled]}), tmp_path))
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", tmp_path / "x.pt"], check=True, stdout=subprocess.DEVNULL)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert raw(loaded["t"]) == b"abcd" * 3 + bytes(8)
    file = read_torch_file(tmp_path, "x.pt", "x.pt")
    assert all(extent.start % ALIGNMENT == 0 for extent in file.records.values())
    with FakeTensorMode():  # torch computes offsets from its own layout rules; ours must obey them
        fake = torch.load(tmp_path / "x.pt")
    assert fake["t"].untyped_storage()._checkpoint_offset == file.records["0"].start


def test_records_beyond_4_gib(tmp_path):
    """A sparse file: zip64 sizes and offsets, and a record behind the large one."""
    numel = (1 << 30) + 7
    with (tmp_path / "source").open("wb") as file:
        file.truncate(numel * 4)
    large = make_tensor("F32", (numel,), (Copy(Extent("source", 0, numel * 4)),))
    small = make_tensor("I64", (1,), (Bytes(b"\x07" + bytes(7), "seven"),))
    layout = lay_out_torch_file("x.pt", {"large": large, "small": small})
    at = 0
    with (tmp_path / "x.pt").open("wb") as out:
        for segment in layout.pieces:
            if isinstance(segment, Bytes):
                out.seek(at)
                out.write(segment.data)
            at += segment.num_bytes
        out.truncate(at)
    loaded = torch.load(tmp_path / "x.pt", mmap=True)
    assert loaded["large"].shape == (numel,) and loaded["large"][-1] == 0 and loaded["small"].item() == 7
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.getinfo("x/data/0").file_size == numel * 4
        assert archive.read("x/data/1") == b"\x07" + bytes(7)
    view = as_tensor(read_torch_file(tmp_path, "x.pt", "x.pt").tree["large"])
    assert view.numel == numel


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[:-8], "truncated"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: b"\x80\x02" + data[2:], "bare pickle"),
        (lambda data: b"hello" * 100, "not a torch.save file"),
        (lambda data: data.replace(b"littl", b"biggg"), "big-endian"),
        (lambda data: data.replace(b"weight", b"wEight", 1), "CRC"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path, how, told):
    torch.save({"weight": torch.arange(100.0)}, tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(how((tmp_path / "x.pt").read_bytes()))
    with pytest.raises(SourceError) as caught:
        read_torch_file(tmp_path, "x.pt", "ckpt/x.pt")
    (problem,) = caught.value.problems
    assert told in problem.what and problem.where == "ckpt/x.pt" and problem.fix


def test_a_missing_file(tmp_path):
    with pytest.raises(SourceError, match="missing"):
        read_torch_file(tmp_path, "x.pt", "x.pt")
