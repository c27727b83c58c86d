"""What goes through any chain of formats comes back unchanged. (The plain Trainer's is in tests/test_convert.py.)"""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import oracle.any  # noqa: E402
from helpers.cases import examples  # noqa: E402
from helpers.checkpoints import make  # noqa: E402
from helpers.composing import convert  # noqa: E402
from helpers.strategies import shapes  # noqa: E402
from llmtailor.formats.registry import index_checkpoint  # noqa: E402
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint  # noqa: E402
from synthetic import pickled_as_deepspeed  # noqa: E402


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
@settings(max_examples=examples(4, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
        if state.kind in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(after.states[state], tensor), state
        elif state.kind == "frozen":
            assert torch.equal(after.states[state], tensor.to(after.states[state].dtype)), state
    shutil.rmtree(root)
