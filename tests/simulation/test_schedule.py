"""Simulated saves are those that a saver writes, deletes and reports; sizes are those of the models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cases import every
from llmtailor.errors import UsageError
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.model.parts import EMBED, HEAD, NORM
from llmtailor.policies import make_policy
from llmtailor.simulation.model import newest_of_run, size_of_checkpoint, size_of_config
from llmtailor.simulation.schedule import PARTIAL_BYTES, simulate
from saving.loop import Loop

MODELS = Path(__file__).parents[2] / "configs" / "models"
PAPERS = {"Llama-3.1-8B": 4.28, "Qwen2.5-7B": 4.17}
"""How many times smaller the paper's filter schedule made its checkpoints"""


@pytest.fixture(scope="module", params=PAPERS)
def model(request):
    return size_of_config(MODELS / f"{request.param}.json")


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
    full = simulate(make_policy("full"), llama, 2, None, None)
    assert full.mean == full.largest == llama.total * PARTIAL_BYTES
    assert (full.oldest, full.mean_age) == (0, 0)
    assert full.on_disk == 3 * full.largest  # the newest two, and the one before them until the new one is complete
    parity = simulate(make_policy("parity"), llama, 2, None, None)
    assert parity.mean == llama.total * PARTIAL_BYTES / 2
    assert (parity.oldest, parity.mean_age) == (1, pytest.approx(0.5))
    auxiliary = 2 * 525_336_576 + 4096
    expected = 12 * (4 * 218_112_000 + 14 * 218_112_000 / 5 + auxiliary / 3)
    found = simulate(make_policy("filter"), llama, 2, None, None)
    assert found.mean == pytest.approx(expected)
    assert found.largest == 12 * (18 * 218_112_000 + 525_336_576)
    assert found.oldest == 9


def test_the_default_of_filter_comes_nearest_to_the_paper(model):
    def distance(aux_every: int) -> float:
        found = simulate(make_policy({"name": "filter", "aux_every": aux_every}), model, 1, None, None)
        return abs(model.total * PARTIAL_BYTES / found.mean - PAPERS[model.name])

    assert min(range(2, 5), key=distance) == make_policy("filter").settings()["aux_every"]


@pytest.mark.parametrize("spec", every(2, ["round_robin:3", "parity", "filter:first=1,last=1,every=2"]))
def test_a_saver_does_the_same(spec, tmp_path):
    """What each save holds, and what is on disk at once with ``keep_composable``."""
    loop = Loop(tmp_path / "run", policy=spec, keep_composable=2, background=False).start()
    held: dict[int, int] = {}
    sizes, most = [], 0
    for _ in range(12):
        loop.train()
        loop.save().wait()  # type: ignore[union-attr]
        model = size_of_checkpoint(newest_of_run(tmp_path / "run"))
        manifest = read_manifest(loop.saver.folder.at(loop.step), "the newest")
        sizes.append(sum(model.numels[part] * PARTIAL_BYTES for part in manifest.parts))
        most = max(most, sum(held.values()) + sizes[-1])
        held = {step: size for step, size in (held | {loop.step: sizes[-1]}).items() if step in loop.saves}
    loop.saver.close()
    found = simulate(make_policy(spec), model, 2, None, None)
    assert sizes[0] == model.total * PARTIAL_BYTES
    assert tuple(sizes[1:]) == found.num_bytes[:11]
    assert most == found.on_disk


def test_update_needs_to_know_the_changes(llama):
    policy = make_policy("update:threshold=0.01")
    with pytest.raises(UsageError, match="--drift"):
        simulate(policy, llama, 2, None, None)
    changes = dict.fromkeys(llama.parts, 0.0)
    still = simulate(policy, llama, 2, 4, changes)
    assert still.oldest == 4  # max_staleness saves what does not change
    moving = simulate(policy, llama, 2, 4, changes | {"layer 3": 0.02})
    assert min(moving.num_bytes) >= llama.numels["layer 3"] * PARTIAL_BYTES
    faster = simulate(policy, llama, 2, 4, dict.fromkeys(llama.parts, 0.02))
    assert faster.mean == llama.total * PARTIAL_BYTES


def test_stale_params_set_back_by_their_share(llama):
    """Half of them, one save old; with measurements, by what their changes mean."""
    assert simulate(make_policy("parity"), llama, 2, None, None).setback == pytest.approx(0.5)
    assert simulate(make_policy("full"), llama, 2, None, None).setback == 0
    only_head = {part: float(part == HEAD) for part in llama.parts}
    assert simulate(make_policy("parity"), llama, 2, None, None, only_head).setback == pytest.approx(0.5)
    assert simulate(make_policy("parity:aux_every=1"), llama, 2, None, None, only_head).setback == 0
    assert simulate(make_policy("adaptive"), llama, 2, None, None, only_head).setback < 0.1


def test_adaptive_saves_its_share(llama):
    for share in (0.1, 0.25, 0.5, 0.67):
        found = simulate(make_policy(f"adaptive:{share}"), llama, 2, None, None)
        assert found.mean == pytest.approx(share * llama.total * PARTIAL_BYTES, rel=0.01)
        assert found.largest < 1.3 * found.mean


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
    schedule = simulate(make_policy("parity"), split, 2, None, None)
    assert schedule.num_bytes == simulate(make_policy("parity"), whole, 2, None, None).num_bytes
