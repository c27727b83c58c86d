"""Reading finds what structure can't show; each byte is read once, and padding never."""

from __future__ import annotations

import shutil
import struct
import zipfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cases import every, examples
from helpers.checkpoints import edit, make, optim_states
from helpers.files import flip
from helpers.indexes import make_index
from helpers.states import DTYPES, raw
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.parts import Param, SavedAs
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, FROZEN, MASTER, MODULE, WEIGHT, State
from llmtailor.storage.checksums import Intervals, crc32
from llmtailor.verify import values as reading
from llmtailor.verify.values import DIFFERS, NEGATIVE, NOT_A_NUMBER, NOT_FINITE, BadValues, differing, find
from llmtailor.verify.verify import NOT_RESUMABLE, RESUMABLE, verify_checkpoint

COPIES = {WEIGHT, MODULE, MASTER, FROZEN}


# --- values ----------------------------------------------------------------------------------------------------------

FLOATS = st.floats(width=16, allow_nan=True, allow_infinity=True)


def mask(found, numel):
    return np.zeros(numel, bool) if found is None else found


@given(values=st.lists(FLOATS, min_size=1, max_size=20), dtype=st.sampled_from(["BF16", "F16", "F32", "F64"]))
def test_checks_of_values_are_those_of_torch(values, dtype):
    tensor = torch.tensor(values, dtype=DTYPES[dtype])
    data, numel = raw(tensor), len(values)
    assert (mask(find(NOT_FINITE, data, dtype), numel) == ~tensor.isfinite().numpy()).all()
    assert (mask(find(NOT_A_NUMBER, data, dtype), numel) == tensor.isnan().numpy()).all()
    found = mask(find(NEGATIVE, data, dtype), numel)
    assert (found == (tensor < 0).numpy())[~tensor.isnan().numpy()].all()


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    precision=st.sampled_from(["BF16", "F16", "F32"]),
    saved=st.sampled_from(["BF16", "F16", "F32"]),
    by_way=st.booleans(),
    at=st.integers(0, 19),
)
def test_copies_are_compared_as_torch_rounds(values, precision, saved, by_way, at):
    master = torch.tensor(values)
    copy = (master.to(DTYPES[precision]) if by_way else master).to(DTYPES[saved])
    assert differing(raw(master), "F32", raw(copy), saved, precision) is None
    other = copy.clone()
    other[at % len(values)] = 1.5 if copy[at % len(values)] != 1.5 else 2.5
    found = differing(raw(master), "F32", raw(other), saved, precision)
    assert found is not None and found.nonzero()[0].tolist() == [at % len(values)]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=12), st.randoms())
def test_checksums_of_ranges_join_in_any_order(data, cuts, random):
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    ranges = list(pairwise(bounds))
    random.shuffle(ranges)
    known, asked = Intervals(), []
    for start, stop in ranges[: len(ranges) // 2 + 1] * 2:
        known.add("x", start, stop, crc32(data[start:stop]))

    def read(start, stop):
        asked.append((start, stop))
        return crc32(data[start:stop])

    assert known.crc_of("x", 0, len(data), read) == crc32(data)
    assert not {one for one in asked if one in ranges[: len(ranges) // 2 + 1]}


# --- bytes -----------------------------------------------------------------------------------------------------------


def mend_checksums(path):
    """Write right CRCs into a zip, so that they don't give a change away."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.start_dir
        for info in archive.infolist():
            header = struct.unpack("<4sHHHHHIIIHH", data[info.header_offset : info.header_offset + 30])
            start = info.header_offset + 30 + header[9] + header[10]
            crc = struct.pack("<I", crc32(bytes(data[start : start + info.file_size])))
            data[at + 16 : at + 20] = crc
            lengths = struct.unpack("<HHH", data[at + 28 : at + 34])
            at += 46 + sum(lengths)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", every(2, ["llama-frozen", "llama", "zero2-rr", "llama-fp16", "zero1-bf16opt", "mixtral"])
)
def test_any_flipped_bit_of_a_state_is_seen(runs, name, tmp_path):
    """The zip's checksums see any; without them a copy that is not the rounded master gives it away."""
    source = runs[name].checkpoint(4)
    index = index_checkpoint(source)
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(source, checkpoint)
    states = [(state, held) for state, held in index.all_held().items() if held.numel and state.kind != "buffer"]

    @settings(max_examples=examples(8, 25))
    @given(st.data())
    def flips(data):
        state, held = data.draw(st.sampled_from(states))
        element = data.draw(st.integers(0, held.numel - 1))
        (fragment,) = held.place.cover(element, element + 1)
        extent = fragment.extent
        at, bit = data.draw(st.integers(extent.start, extent.stop - 1)), data.draw(st.integers(0, 7))
        original = (checkpoint / extent.path).read_bytes()
        try:
            flip(checkpoint / extent.path, at, bit)
            verdict = verify_checkpoint(checkpoint, deep=True)
            assert verdict.level == NOT_RESUMABLE
            assert any(low <= element < high for low, high in verdict.damage.states[state])
            assert extent.path in verdict.damage.files or state.kind == WEIGHT
            if extent.path.endswith(".pt"):
                mend_checksums(checkpoint / extent.path)
                verdict = verify_checkpoint(checkpoint, deep=True)
                rounds_away = state.kind == MASTER and at < extent.stop - 2  # below what bf16 or fp16 keep
                if state.kind in COPIES and not rounds_away:
                    assert verdict.level == NOT_RESUMABLE
                    assert any(low <= element < high for low, high in verdict.damage.states[state])
        finally:
            (checkpoint / extent.path).write_bytes(original)

    flips()
    assert verify_checkpoint(checkpoint, deep=True).level == RESUMABLE


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_mismatch_names_state_element_and_count(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(reading, "CHUNK_ELEMENTS", chunk)
    checkpoint = make(tmp_path, 100)
    index = index_checkpoint(checkpoint)
    state = State("model.layers.1.mlp.up_proj.weight", WEIGHT)
    (fragment,) = index.held[state].place.cover(7, 10)
    with (checkpoint / fragment.extent.path).open("r+b") as file:
        file.seek(fragment.extent.start)
        file.write(b"\x12\x34" * 3)
    verdict = verify_checkpoint(checkpoint, deep=True, name="x")
    (finding,) = verdict.findings
    columns = index.params[state.param].shape[1]
    assert finding.where == "x/model.safetensors"
    first = f"the first at [{7 // columns}, {7 % columns}] of {state.param}"
    assert finding.what == f"weight of {state.param} is not the rounded master: 3 of 60 elements, {first}"
    assert verdict.damage.states == {state: ((7, 10),), State(state.param, MASTER): ((7, 10),)}


def test_padding_is_not_looked_at(tmp_path):
    """In the masters it is uninitialised memory."""
    checkpoint = make(tmp_path, 100, world_size=4)
    last = [one.params[-1] for one in index_checkpoint(checkpoint).sub_groups]

    def spoil(tree):
        for master in tree["optimizer_state_dict"]["fp32_flat_groups"]:
            master.detach()[-1] = float("nan")

    edit(optim_states(checkpoint, 3), spoil)
    verdict = verify_checkpoint(checkpoint, deep=True)
    assert all(verdict.index.params[param].numel % 4 for param in last)
    assert verdict.level == RESUMABLE
    edit(optim_states(checkpoint, 0), spoil)
    assert {state.param for state in verify_checkpoint(checkpoint, deep=True).damage.states} == set(last)


def test_fragments_of_a_lost_rank_are_told_and_the_others_read(tmp_path):
    checkpoint = make(tmp_path, 100)
    optim_states(checkpoint, 1).unlink()
    for deep in (False, True):
        verdict = verify_checkpoint(checkpoint, deep=deep)
        assert verdict.level == NOT_RESUMABLE
        assert list(verdict.damage.files) == [str(optim_states_path(1))]
        for state, runs in verdict.damage.states.items():
            numel = verdict.index.held[state].numel
            assert state.kind in (MASTER, EXP_AVG, EXP_AVG_SQ)
            assert runs == ((-(-numel // 2), numel),)
        assert len(verdict.damage.states) == 3 * len(verdict.index.params)


def optim_states_path(rank):
    return f"global_step100/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path, monkeypatch):
    checkpoint = make(tmp_path, 100)
    from llmtailor.verify import values as deep

    read = deep.read_everything

    def shrink_then_read(*arguments):
        path = optim_states(checkpoint, 0)
        path.write_bytes(path.read_bytes()[:2000])
        return read(*arguments)

    monkeypatch.setattr(deep, "read_everything", shrink_then_read)
    verdict = verify_checkpoint(checkpoint, deep=True)
    assert verdict.level == NOT_RESUMABLE
    assert any("can't be read: it ends before byte" in finding.what for finding in verdict.findings)
    assert optim_states_path(0) in verdict.damage.files


def test_many_tensors_make_one_finding(runs, tmp_path):
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(runs["llama"].checkpoint(4), checkpoint)
    shutil.copy(runs["llama"].checkpoint(6) / "model.safetensors", checkpoint / "model.safetensors")
    verdict = verify_checkpoint(checkpoint, deep=True)
    (finding,) = verdict.findings
    assert " more is not the rounded master: " in finding.what and " tensors, the first at [" in finding.what


def test_a_piece_on_disk_casts_doubt_on_its_elements_of_the_master():
    index = make_index(params={"fused": Param("fused", (2, 4), "trainable")})
    saved_as = {"fused": (SavedAs("0", (4,)), SavedAs("1", (4,), 4))}
    found = reading.damaged_elements(index, {(State("1", WEIGHT), DIFFERS): BadValues(1, [(1, 3)])}, saved_as, False)
    assert [*found] == [(State("1", WEIGHT), (1, 3)), (State("fused", MASTER), (5, 7))]
