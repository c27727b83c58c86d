"""Synthetic checkpoints of every form, partial ones included, as FSDP and DCP checkpoints, and through any chain of
formats back. (The plain Trainer's is in tests/test_convert.py.)"""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle.any
from campaigns.fuzz import make_sound
from helpers.cases import diagonal, examples
from helpers.checkpoints import make
from helpers.composing import convert
from helpers.states import read, same
from helpers.strategies import shapes
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import MASTER
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from oracle.zero3 import MOMENTS
from synthetic import pickled_as_deepspeed

PARTIAL = ("partial", "partial2", "partial0")


@st.composite
def chains(draw):
    layout = {
        "shape": draw(shapes(max_layers=2)),
        "world_size": draw(st.integers(1, 3)),
        "groups": draw(st.sampled_from(["default", "layer"])),
    }
    hop = st.tuples(st.sampled_from(["fsdp", "dcp", "deepspeed"]), st.integers(1, 5))
    return layout, draw(st.lists(hop, min_size=1, max_size=4))


def load(checkpoint):
    with pickled_as_deepspeed():
        return oracle.any.load(checkpoint)


@given(chains())
@settings(max_examples=examples(3, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_chain_of_formats_leads_back(tmp_path_factory, case):
    layout, hops = case
    root = tmp_path_factory.mktemp("chain")
    source = at = make(root, 100, **layout)
    wanted = index_checkpoint(source)
    for number, (to, ranks) in enumerate([*hops, ("deepspeed", layout["world_size"])]):
        dtype = "BF16" if to == "deepspeed" and not index_checkpoint(at).form.has_masters else None
        out = root / f"hop-{number}"
        convert(at, out, dtype=dtype, to=to, world_size=ranks, stage=3 if to == "deepspeed" else None)
        verdict = verify_checkpoint(out, deep=True)
        assert verdict.level == RESUMABLE or all(one.severity != "error" for one in verdict.findings), verdict.findings
        found = index_checkpoint(out)
        assert (found.params, found.tied, found.steps()) == (wanted.params, wanted.tied, wanted.steps())
        assert found.group_params == wanted.group_params
        at = out
    before, after = load(source), load(at)
    assert after.steps == before.steps
    for state, tensor in before.states.items():
        if state.kind in (MASTER, *MOMENTS):
            assert torch.equal(after.states[state], tensor), state
        elif state.kind == "frozen":
            assert torch.equal(after.states[state], tensor.to(after.states[state].dtype)), state
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_sound(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize(("to", "form"), diagonal(["dcp", "fsdp"], PARTIAL))
def test_every_state_is_there(sound, tmp_path, to, form):
    out = convert(sound[form], tmp_path / "out", to=to, world_size=3)
    before, after = index_checkpoint(sound[form]), index_checkpoint(out)
    assert verify_checkpoint(out, deep=True).level == RESUMABLE
    assert (after.params, after.tied, after.steps()) == (before.params, before.tied, before.steps())
    assert after.group_params == before.group_params and after.world_size == 3
    states = [state for state in before.held if state.kind in (MASTER, *MOMENTS)]
    assert len(states) == 3 * len(before.steps())
    for state in states:
        there = [read(index.root, index.held[state]).flatten() for index in (before, after)]
        assert same(*there), state
