"""Pickles, torch files and safetensors: read byte by byte, and laid out as their own libraries open them."""

from __future__ import annotations

import collections
import json
import os
import pickle
import pickletools
import shutil
import subprocess
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.cases import examples
from helpers.render import render
from helpers.states import raw
from hostile.exploits import Reduced
from llmtailor.checkpoint.layout import Bytes, Copy, FileLayout, Slot, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.safetensors import INDEX, SINGLE, lay_out_index, lay_out_weights, read_weights
from llmtailor.containers.torch_file import ALIGNMENT, lay_out_torch_file, list_records, read_torch_file
from llmtailor.containers.unpickle import MAX_DEPTH, Call, Global, Ordered, as_tensor, make_tensor, read_pickle
from llmtailor.errors import SourceError, UnsafePickle
from llmtailor.formats.partial.json_trees import encode
from llmtailor.model.roles import WEIGHT, State

# --- pickles ----------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(min_size=1)
keys = st.booleans() | st.integers(-(2**59), 2**59) | st.text()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(collections.OrderedDict)
    ),
    max_leaves=30,
)


@given(trees, st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=examples(40, 200))
def test_what_pickle_wrote_comes_back_through_reader_and_writer(tree, protocol):
    decoded = read_pickle(pickle.dumps(tree, protocol), "x")
    data, storages = write_pickle(decoded)
    assert storages == []
    assert pickle.loads(data) == tree
    assert type(pickle.loads(data)) is type(tree)


def test_sharing_survives():
    shared = [1, 2]
    tree = pickle.loads(write_pickle(read_pickle(pickle.dumps({"a": shared, "b": shared}, 2), "x"))[0])
    assert tree["a"] is tree["b"]


def test_attributes_of_an_ordered_dict_survive():
    original = collections.OrderedDict(a=1)
    original._metadata = {"version": 1}
    decoded = read_pickle(pickle.dumps(original, 2), "x")
    assert isinstance(decoded, Ordered) and decoded == {"a": 1}
    again = pickle.loads(write_pickle(decoded)[0])
    assert again == original and again._metadata == {"version": 1}


def test_a_class_is_carried_by_name_without_being_imported():
    data = b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81"
    data += b"}X\x01\x00\x00\x00sG?\xf0\x00\x00\x00\x00\x00\x00sb."
    node = read_pickle(data, "x")
    assert isinstance(node, Call) and node.new
    assert node.func == Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
    assert node.state == {"s": 1.0}
    opcodes = [(op.name, arg) for op, arg, _ in pickletools.genops(write_pickle(node)[0])]
    assert ("GLOBAL", "deepspeed.runtime.fp16.loss_scaler LossScaler") in opcodes
    assert [name for name, _ in opcodes if name in ("NEWOBJ", "BUILD")] == ["NEWOBJ", "BUILD"]


def test_every_unknown_global_is_named():
    data = pickle.dumps([Reduced(os.system, "x"), Reduced(eval, "y")], 2)
    with pytest.raises(UnsafePickle) as caught:
        read_pickle(data, "x")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02}",
        b"\x80\x02h\x05.",  # a memo entry that is not there
        b"\x80\x02u.",  # items without a mark
        b"\x80\x02(K\x01u.",
        b"\x80\x02}(K\x01u.",  # a key without a value
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02X\xff\xff\xff\x7fab.",  # a string longer than the file
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02U\x01a.",  # python 2 strings have no place here
        b"\x80\x02X\x01\x00\x00\x000Q.",  # a persistent id where none is expected
        b"\x80\x02" + b"]" * (MAX_DEPTH + 50) + b"a" * (MAX_DEPTH + 49) + b".",
        b"garbage",
    ],
)
def test_damaged_pickles_are_refused(data):
    with pytest.raises(SourceError) as caught:
        read_pickle(data, "x")
    assert caught.value.problems[0].fix


STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_a_member_of_an_enum_may_be_pickled_as_python_3_11_2_does(module):
    named = b"c%s\ngetattr\nq\x00cdeepspeed.runtime.zero.config\nZeroStageEnum\nq\x01" % module.encode()
    data = b"\x80\x02]q\x05(" + named + b"X\x07\x00\x00\x00weights\x86Rh\x00h\x01X\x09\x00\x00\x00gradients\x86Re."
    tree = read_pickle(data, "x")
    assert [(type(node), node.func, node.args) for node in tree] == [(Call, STAGE, (3,)), (Call, STAGE, (2,))]
    assert b"getattr" not in write_pickle(tree)[0]


@pytest.mark.parametrize(
    "data",
    [
        b"c__builtin__\ngetattr\n.",
        b"]c__builtin__\ngetattr\na.",
        b"c__builtin__\ngetattr\nctorch\nSize\nX\x04\x00\x00\x00load\x86R.",
        b"c__builtin__\ngetattr\ncdeepspeed.runtime.zero.config\nZeroStageEnum\nX\x08\x00\x00\x00__dict__\x86R.",
        b"c__builtin__\ngetattr\ncdeepspeed.runtime.zero.config\nZeroStageEnum\nX\x07\x00\x00\x00weights\x86\x81.",
        b"c__builtin__\ngetattr\n]X\x07\x00\x00\x00weights\x86R.",
    ],
)
def test_getattr_for_anything_else_is_refused(data):
    with pytest.raises(UnsafePickle, match="getattr"):
        read_pickle(b"\x80\x02" + data, "x")


def test_the_saver_writes_a_member_of_an_enum_by_its_value_whatever_the_python(monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    monkeypatch.setattr(config.ZeroStageEnum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    found = encode(config.ZeroStageEnum(2), lambda value: None)
    assert found["func"]["name"] == "ZeroStageEnum" and found["args"] == [2]


# --- torch files ------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def save(folder, tree, name="x.pt"):
    torch.save(tree, folder / name)
    return read_torch_file(folder, name, name)


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
    tree |= {"f8": (codes := shared.to(torch.float8_e4m3fn))[3:7], "all f8": codes}
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
        assert again["f8"].dtype == torch.float8_e4m3fn and torch.equal(again["f8"].float(), shared[3:7])
        assert again["f8"].untyped_storage().data_ptr() == again["all f8"].untyped_storage().data_ptr()
    # torch writes 214 bytes more: the record .data/serialization_id, which nothing needs
    assert 0 < (tmp_path / "x.pt").stat().st_size - out.stat().st_size < 300


@pytest.mark.parametrize("alone", [True, False])
def test_an_untyped_storage_is_refused_unless_it_is_of_a_tensor_with_a_known_dtype(tmp_path, alone):
    tensor = torch.zeros(4, dtype=torch.float8_e4m3fnuz)
    with pytest.raises(SourceError):
        save(tmp_path, {"x": tensor.untyped_storage() if alone else tensor})


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
    starts = {one.name: one.start for one in list_records(tmp_path, "x.pt", "x.pt")}
    assert all(start % ALIGNMENT == 0 for name, start in starts.items() if "/data/" in name)
    with FakeTensorMode():  # torch computes offsets from its own layout rules; ours must obey them
        fake = torch.load(tmp_path / "x.pt")
    assert fake["t"].untyped_storage()._checkpoint_offset == starts["x/data/0"]


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


# --- safetensors ------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("begin", [0, 2])
def test_bytes_of_two_tensors_or_of_none_are_refused(tmp_path, begin):
    places = {"a": [0, 1], "b": [begin, 3]}
    entries = {name: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at} for name, at in places.items()}
    text = json.dumps(entries).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"xyz")
    with pytest.raises(SourceError, match="b does not start where the previous tensor ends"):
        read_weights(tmp_path, "ckpt")
