"""Simulated saves are those that a saver writes, deletes and reports; sizes are those of the models; the interval that
is called the best is the best."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from helpers.cases import every
from helpers.places import ROOT
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.model.parts import EMBED, HEAD, NORM
from llmtailor.model.roles import ADAM_BYTES
from llmtailor.policies import make_policy
from llmtailor.runs.simulate import MASTER_BYTES, Hardware, SimulatedSaves, cost_of, simulate, size_of_config
from saving.loop import Loop

MODELS = ROOT / "configs" / "models"


@pytest.fixture(scope="module")
def llama():
    return size_of_config(MODELS / "Llama-3.1-8B.json")


def test_params_are_those_of_the_models(llama):
    """As the model cards and ``model.num_parameters()`` give them."""
    assert llama.total == 8_030_261_248
    assert size_of_config(MODELS / "Qwen2.5-7B.json").total == 7_615_616_512
    assert llama.numels[EMBED] == llama.numels[HEAD] == 525_336_576
    assert llama.numels["layer 7"] == 218_112_000
    assert llama.numels[NORM] == 4096


def test_sizes(llama):
    full = simulate(make_policy("full"), llama, 2)
    assert full.mean == full.largest == llama.total * (MASTER_BYTES + ADAM_BYTES)
    assert (full.oldest, full.mean_age) == (0, 0)
    assert full.on_disk == 3 * full.largest  # the newest two, and the one before them until the new one is complete
    lion = simulate(make_policy("full"), replace(llama, state_bytes=4), 2)
    assert lion.mean == llama.total * 8
    parity = simulate(make_policy("parity"), llama, 2)
    assert parity.mean == llama.total * (MASTER_BYTES + ADAM_BYTES) / 2
    assert (parity.oldest, parity.mean_age) == (1, pytest.approx(0.5))
    auxiliary = 2 * 525_336_576 + 4096
    expected = 12 * (4 * 218_112_000 + 14 * 218_112_000 / 5 + auxiliary / 3)
    found = simulate(make_policy("filter"), llama, 2)
    assert found.mean == pytest.approx(expected)
    assert found.largest == 12 * (18 * 218_112_000 + 525_336_576)
    assert found.oldest == 9


@pytest.mark.parametrize("spec", every(3, ["filter:first=1,last=1,every=2", "round_robin:3", "parity"]))
def test_a_saver_does_the_same(spec, tmp_path):
    """What each save holds, and what is on disk at once with ``keep_composable``."""
    loop = Loop(tmp_path / "run", policy=spec, keep_composable=2, background=False).start()
    held: dict[int, int] = {}
    sizes, most = [], 0
    loop.model.config.save_pretrained(tmp_path)
    model = size_of_config(tmp_path)
    for _ in range(12):
        loop.train()
        loop.save().wait()  # type: ignore[union-attr]
        manifest = read_manifest(loop.saver.folder.at(loop.step), "the newest")
        sizes.append(sum(model.numels[part] * (MASTER_BYTES + ADAM_BYTES) for part in manifest.parts))
        most = max(most, sum(held.values()) + sizes[-1])
        held = {step: size for step, size in (held | {loop.step: sizes[-1]}).items() if step in loop.saves}
    loop.saver.close()
    found = simulate(make_policy(spec), model, 2)
    assert sizes[0] == model.total * (MASTER_BYTES + ADAM_BYTES)
    assert tuple(sizes[1:]) == found.num_bytes[:11]
    assert most == found.on_disk


def test_stale_masters_set_back_by_their_share(llama):
    """Half of them, one save old; old moments by nothing."""
    assert simulate(make_policy("parity"), llama, 2).setback == pytest.approx(0.5)
    assert simulate(make_policy("full"), llama, 2).setback == 0
    in_turn = simulate(make_policy("moments_in_turn:4"), llama, 2)
    assert in_turn.setback == 0 < in_turn.mean_age


def test_experts_as_parts(tmp_path):
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole, split = (size_of_config(tmp_path, experts) for experts in (False, True))
    assert split.total == whole.total and len(split.parts) == len(whole.parts) + 2 * 4
    experts = [split.numels[f"layer 1 expert {number}"] for number in range(4)]
    assert experts == [3 * 16 * 24] * 4
    assert sum(experts) + split.numels["layer 1 non-expert"] == whole.numels["layer 1"]
    schedule = simulate(make_policy("parity"), split, 2)
    assert schedule.num_bytes == simulate(make_policy("parity"), whole, 2).num_bytes


GB = 10**9
HALF = SimulatedSaves((40 * GB, 60 * GB), 0.5, 1, 200 * GB, 0.25)


def machine(**others: float) -> Hardware:
    given = {"write_bytes_per_s": 2.0 * GB, "step_s": 5.0, "mtbf_s": 36_000.0, "slowdown": 0.1}
    return Hardware(**{**given, **others})


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "others",
    [{}, {"mtbf_s": 3600.0}, {"step_s": 0.2}, {"write_bytes_per_s": 50.0 * GB, "slowdown": 0.5}, {"slowdown": 0.0}],
)
def test_no_other_interval_loses_less(in_background, others):
    where = machine(**others)
    best = cost_of(HALF, where, in_background=in_background)
    least = 60 * GB / where.write_bytes_per_s / where.step_s if in_background else 0
    lost = {
        steps: cost_of(HALF, where, in_background=in_background, save_steps=steps).time_lost
        for steps in range(max(1, math.ceil(least)), 4 * best.save_steps)
    }
    around = min(lost, key=lost.__getitem__)
    assert abs(best.save_steps - around) <= 1  # of the two whole steps around the optimum, the nearer one
    assert best.save_steps >= least


def test_costs():
    blocking = cost_of(HALF, machine(), in_background=False, save_steps=100)
    assert (blocking.save_s, blocking.publish_s, blocking.period_s) == (25.0, 25.0, 525.0)
    assert blocking.lost_s_per_failure == 262.5 + 0.125 * 525
    assert blocking.time_lost == pytest.approx(25 / 525 + blocking.lost_s_per_failure / 36_000)
    background = cost_of(HALF, machine(), in_background=True, save_steps=100)
    assert background.save_s == 2.5
    assert background.lost_s_per_failure == 502.5 / 2 + 25 + 0.125 * 502.5


def test_failures_more_often_than_saves():
    cost = cost_of(HALF, machine(mtbf_s=5.0), in_background=False)
    assert cost.save_steps == 1
    assert cost.time_lost == 1
