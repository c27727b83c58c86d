"""The fuzzer of tests/support/campaigns for some seconds with the same inputs, and what readers see in them."""

from __future__ import annotations

import collections
import io
import json
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from campaigns import fuzz
from helpers.cases import examples, mostly_long
from llmtailor.containers.safetensors import read_header
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.containers.unpickle import Call, Global, Ordered, Storage, as_tensor, read_pickle
from llmtailor.errors import SourceError
from llmtailor.model.dtypes import ITEMSIZE

# --- parsers refuse or accept -----------------------------------------------------------------------------------------

INPUTS = {
    "checkpoint": 60,
    "partial checkpoint": 70,
    "universal": 30,
    "dcp": 60,
    "trainer_state.json": examples(30, 70),
    "latest": 150,
    "recipe": examples(200, 1000),
}
"""Per parser; those that read a whole checkpoint are slower, and have many seeds, which come first."""
LONG = ("checkpoint", "partial checkpoint", "universal", "dcp", "latest")
"""The short suite damages these on purpose: see fuzz/test_checkpoints.py, verify/damages.py, partial/test_tampered.py,
dcp/test_checkpoints.py and hostile/test_files.py."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return fuzz.make_sound(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("parser", mostly_long(fuzz.PARSERS, *(one for one in fuzz.PARSERS if one not in LONG)))
def test_damaged_input_is_parsed_or_refused(sound, parser):
    wanted = INPUTS.get(parser, examples(120, 600))
    tally = fuzz.fuzz(parser, sound, random.Random(parser), lambda count: count < wanted)
    assert not tally.findings, tally.findings[0]
    assert tally.accepted  # or the seeds were no good
    assert tally.refused > wanted // 10  # or the mutations
    assert tally.outcomes > 3


def test_what_ends_otherwise_is_a_finding(sound):
    def crash(data, folder, sound):
        raise KeyError(data)

    def no_mend(data, folder, sound):
        raise SourceError.at("x", "broken")

    def bare(data, folder, sound):
        return {"a": 1}["b"] if b"x" in data else None

    for parse, told in ((crash, "KeyError"), (no_mend, "no mend: x: broken"), (bare, "KeyError: 'b'")):
        _, finding = fuzz.try_input(fuzz.Parser(lambda sound: [b"x"], parse), b"x", sound)
        assert told in finding
    assert fuzz.try_input(fuzz.Parser(lambda sound: [], bare), b"", sound) == (None, "")


@pytest.mark.long
def test_the_script_runs_and_replays(tmp_path):
    def run(*words):
        script = Path(fuzz.__file__).parent
        command, path = [sys.executable, str(script), *map(str, words)], str(script.parents[1])
        return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": path})

    result = run("--minutes", 0.02, "--parser", "flags", "--seed", 1, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "flags: " in result.stdout and "0 findings" in result.stdout
    (tmp_path / "flags-0").write_bytes(b"nonsense")
    assert "the line is not valid JSON" in run("--replay", tmp_path / "flags-0").stdout


# --- the formats' own readers accept it as well -----------------------------------------------------------------------

# --- pickles, against CPython's own machine --------------------------------------------------------------------------


class Made:
    """Stands for whatever a global would be, and notes what happens to it."""

    def __init__(self, name: str):
        self.name = name
        self.made: list[Any] = []

    def __call__(self, *args):
        return Instance(self, args)


class Instance:
    def __init__(self, func, args):
        self.func, self.args, self.log = func, args, []

    def __setstate__(self, state):
        self.log.append(("state", state))

    def __setitem__(self, key, value):
        self.log.append(("item", key, value))

    def append(self, value):
        self.log.append(("append", value))

    def extend(self, values):
        self.log += [("append", value) for value in values]


def encode(text, codec):
    return text.encode(codec)


def member(enum, name):
    """What ``getattr`` is called for by the pickles of Python 3.11.2."""
    assert enum.name == "deepspeed.runtime.zero.config.ZeroStageEnum"
    return enum(["disabled", "optimizer_states", "gradients", "weights"].index(name))


class Loaded:
    """What a persistent id stands for."""

    def __init__(self, pid):
        self.pid = pid


class CPython(pickle._Unpickler):  # type: ignore[name-defined]
    """The machine of the standard library, with nothing behind the names."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("_codecs", "encode"):
            return encode
        if (module, name) in [("builtins", "getattr"), ("__builtin__", "getattr")]:
            return member
        return Made(f"{module}.{name}")

    def persistent_load(self, pid):
        return Loaded(pid)

    def load_newobj(self):
        args = self.stack.pop()
        self.append(Instance(self.stack.pop(), args))

    dispatch[pickle.NEWOBJ[0]] = load_newobj


def ours(node: Any) -> Any:
    """Spell a tree of ours out, types included."""
    if isinstance(node, Call):
        log = [("append", ours(value)) for value in node.appends]
        log += [("item", key, ours(value)) for key, value in node.items]
        log += [("state", ours(node.state))] if node.has_state else []
        return ("call", str(node.func), ours(node.args), sorted(map(repr, log)))
    if isinstance(node, Global):
        return ("global", str(node))
    if isinstance(node, Storage):
        return ("storage", node.location)
    if isinstance(node, Ordered):
        return ("ordered", [(key, ours(value)) for key, value in node.items()], ours(node.attributes))
    return _plain(node, ours)


def theirs(node: Any) -> Any:
    if isinstance(node, Instance):
        log = [(*entry[:-1], theirs(entry[-1])) for entry in node.log]
        return ("call", node.func.name, theirs(node.args), sorted(map(repr, log)))
    if isinstance(node, Made):
        return ("global", node.name)
    if isinstance(node, Loaded):
        return ("storage", node.pid[3])
    if node is collections.OrderedDict or node is encode:
        return ("global", "_codecs.encode" if node is encode else "collections.OrderedDict")
    if isinstance(node, collections.OrderedDict):
        return ("ordered", [(key, theirs(value)) for key, value in node.items()], theirs(vars(node) or None))
    return _plain(node, theirs)


def _plain(node: Any, spell: Any) -> Any:
    if isinstance(node, dict):
        return ("dict", [(key, spell(value)) for key, value in node.items()])
    if isinstance(node, set):
        return ("set", sorted(map(repr, node)))
    if isinstance(node, (list, tuple)):
        return (type(node).__name__, [spell(item) for item in node])
    return (type(node).__name__, repr(node))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in texts of protocol 0, which are refused
def test_cpython_sees_the_same_in_every_pickle_that_is_accepted(tmp_path):
    sound = fuzz.make_sound(tmp_path)
    seeds = fuzz.PARSERS["pickle"].seeds(sound)
    rng = random.Random(1)
    accepted = 0
    for _ in range(examples(600, 1500)):
        data = fuzz.mutate_bytes(rng.choice(seeds), rng.choice(seeds), rng)
        try:
            tree = read_pickle(data, "x", lambda dtype, key, numel, location: Storage(dtype, numel, (), location))
        except SourceError:
            continue
        accepted += 1
        assert ours(tree) == theirs(CPython(io.BytesIO(data), encoding="utf-8").load())
    assert accepted > 60


# --- safetensors, against the library --------------------------------------------------------------------------------

counts = st.integers(0, 6) | st.sampled_from([-1, 2**53, 2**63, 2**64, True, None, 1.5, "1", []])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*list(ITEMSIZE)[:8], "F31", None, 3]),
        "shape": st.lists(counts, max_size=3) | counts,
        "data_offsets": st.lists(counts, min_size=2, max_size=2) | counts,
    }
)


@st.composite
def tiled(draw: st.DrawFn) -> dict[str, Any]:
    """Entries that follow each other as they should; then perhaps one change."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.text("ab.é\n", min_size=1, max_size=3), unique=True, max_size=4)):
        dtype, shape = (
            draw(st.sampled_from(["F32", "BF16", "I64", "U8"])),
            draw(st.lists(st.integers(0, 3), max_size=3)),
        )
        size = ITEMSIZE[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if header and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(header)))
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        header[name] = {**header[name], key: draw(entries)[key]}
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=2), st.text(max_size=2) | counts, max_size=2))
    return header


@given(
    tiled() | st.dictionaries(st.text("ab", max_size=2), entries, max_size=2), st.integers(0, 80), st.integers(-2, 2)
)
@settings(max_examples=examples(100, 300))
def test_what_is_accepted_the_safetensors_library_accepts(tmp_path_factory, header, size, lie):
    folder = tmp_path_factory.getbasetemp()
    text = json.dumps(header).encode()
    offsets = [entry.get("data_offsets") for entry in header.values()]
    fits = [end for pair in offsets if isinstance(pair, list) for end in pair if type(end) is int and 0 <= end < 1000]
    body = bytes(max(fits, default=0)) if size % 4 else bytes(size)
    (folder / "x.safetensors").write_bytes(
        struct.pack("<Q", max(0, len(text) + (lie if size % 5 == 0 else 0))) + text + body
    )
    try:
        file = read_header(folder, "x.safetensors", "x")
    except SourceError as error:
        assert all(problem.fix for problem in error.problems)
        return
    with safe_open(folder / "x.safetensors", "pt") as theirs:
        assert set(theirs.keys()) == set(file.tensors)
        assert (theirs.metadata() or {}) == file.metadata
        for name, held in file.tensors.items():
            found = theirs.get_slice(name)
            assert (found.get_dtype(), tuple(found.get_shape())) == (held.dtype, held.shape)


# --- torch files, against torch --------------------------------------------------------------------------------------


def test_torch_sees_the_same_in_every_file_that_is_accepted(tmp_path):
    """Tensors are compared by their bytes, wherever the directory says that they lie."""
    tree = {name: torch.arange(at * 7.0, at * 7 + at) for at, name in enumerate("abcdef")}
    torch.save({**tree, "shared": tree["f"][2:], "bytes": torch.arange(5, dtype=torch.uint8)}, tmp_path / "seed.pt")
    seed = (tmp_path / "seed.pt").read_bytes()
    rng = random.Random(2)
    accepted = 0
    for _ in range(examples(500, 1200)):
        data = fuzz.PARSERS["torch zip"].mutate(seed, seed, rng)
        (tmp_path / "x.pt").write_bytes(data)
        try:
            file = read_torch_file(tmp_path, "x.pt", "x")
        except SourceError:
            continue
        if not isinstance(file.tree, dict) or any(as_tensor(node) is None for node in file.tree.values()):
            continue
        views = {name: as_tensor(node) for name, node in file.tree.items()}
        loaded = torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=True)
        accepted += 1
        assert loaded.keys() == views.keys()
        for name, view in views.items():
            if view is None or not view.is_contiguous or view.offset + view.numel > view.storage.numel:
                continue
            (carried,) = view.storage.content
            start = carried.extent.start + view.offset * ITEMSIZE[view.storage.dtype]
            mine = data[start : start + view.numel * ITEMSIZE[view.storage.dtype]]
            assert mine == loaded[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert accepted > 25
