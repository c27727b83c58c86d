"""The pickle reader decodes what pickle writes, runs nothing, and the writer is its inverse."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cases import examples
from hostile.exploits import Reduced
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.unpickle import MAX_DEPTH, Call, Global, Ordered, read_pickle
from llmtailor.errors import SourceError, UnsafePickle
from llmtailor.formats.partial.json_trees import encode

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


@given(st.binary(max_size=60), st.data())
@settings(max_examples=examples(150, 300))
def test_mutated_pickles_end_in_a_tree_or_a_refusal(noise, data):
    original = pickle.dumps({"a": [1, 2.5, "x" * 20, (None, True)], "b": collections.OrderedDict(c=1)}, 2)
    at = data.draw(st.integers(0, len(original)))
    mutated = original[:at] + noise + original[at + data.draw(st.integers(0, 10)) :]
    try:
        read_pickle(mutated, "x")
    except SourceError as error:
        assert error.problems


def test_shared_lists_are_written_once():
    nested: list = []
    for _ in range(20):
        nested = [nested, nested]
    assert len(write_pickle(read_pickle(pickle.dumps(nested, 2), "x"))[0]) < 1000


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
