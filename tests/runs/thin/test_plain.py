"""The Trainer without DeepSpeed: thinned out, and composed again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.cases import mostly_long
from helpers.checkpoints import copied
from helpers.indexes import make_index
from helpers.same import differences
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.formats.partial.write import check_can_be_partial
from llmtailor.model.parts import Param
from thin.scene import call, compose, sources, thinned
from trainings.alone import train


def freeze(model: Any) -> None:
    model.model.embed_tokens.weight.requires_grad = False


def load(checkpoint: Path) -> dict[str, Any]:
    """Load what a resume would."""
    weights = load_file(checkpoint / "model.safetensors")
    found: dict[str, Any] = {"weights": {name: weights[name] for name in sorted(weights)}}
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        found[name.removesuffix(".pt")] = torch.load(checkpoint / name, weights_only=False)
    return {**found, "state": json.loads((checkpoint / "trainer_state.json").read_text())}


@pytest.mark.parametrize("kind", mostly_long(["tied", "frozen-bf16"], "frozen-bf16"))
def test_every_step_is_composed_as_from_full_checkpoints(kind: str, tmp_path: Path) -> None:
    how = {"tied": True} if kind == "tied" else {"dtype": torch.bfloat16, "prepare": freeze}
    trained = train(tmp_path / "trained", steps=6, **how)
    names = [name for name, param in trained.trainer.model.named_parameters() if param.requires_grad]
    run = copied(trained.folder, tmp_path / "run", (2, 4, 6))
    told = thinned(run, "--strategy", "parity")
    assert told["composable_before"] == told["composable_after"] == [2, 4, 6]
    odd = re.compile(r"\.layers\.1\." + ("" if kind == "tied" else r"|^lm_head\."))
    full = {step: load(trained.checkpoint(step)) for step in (2, 4)}
    for step in (2, 4):
        made, wanted = load(compose(run, step, tmp_path / f"out-{step}")), full[step]
        chosen = {name: full[step if odd.search(name) else 2] for name in names}
        weights = {name: chosen.get(name, wanted)["weights"][name] for name in wanted["weights"]}
        ids = [number for group in wanted["optimizer"]["param_groups"] for number in group["params"]]
        order = [name for group in made["optimizer"]["param_groups"] for name in group.pop("lt_params")]
        assert sorted(order) == sorted(names)
        states = {at: chosen[name]["optimizer"]["state"][at] for at, name in zip(ids, order, strict=True)}
        expected = wanted | {"weights": weights, "optimizer": {**wanted["optimizer"], "state": states}}
        stated = made["state"]["stateful_callbacks"].pop("llmtailor-optimizer", {"attributes": {"step_lags": []}})
        assert not [*differences(made, expected)]
        assert stated["attributes"]["step_lags"] == [2] * (step == 4)
    assert set(sources(tmp_path / "out-4").values()) == {2, 4}


def test_what_only_the_weights_hold_is_composed_again(tmp_path: Path) -> None:
    def add(model: Any) -> None:  # a buffer that the model's class does not know
        model.model.layers[0].mlp.register_buffer("seen", torch.arange(3.0))

    trained = train(tmp_path / "trained", prepare=add, steps=4)
    run = copied(trained.folder, tmp_path / "run", (2, 4))
    told = call("thin", run, "--strategy", "full", "--yes")
    assert [row["becomes"] for row in told["checkpoints"]] == ["partial", "stays"]
    made, wanted = (load_file(folder / "model.safetensors") for folder in (
        compose(run, 2, tmp_path / "out"), trained.checkpoint(2)))  # fmt: skip
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())


def test_weights_that_are_the_only_masters_stay() -> None:
    """transformers saves fused experts by other names than the optimizer knows."""
    index = make_index(Path("run/checkpoint-2"), params={"experts": Param("experts", (2, 3), "trainable")})
    with pytest.raises(UnsupportedCheckpoint, match="its only master weights"):
        check_can_be_partial(index)
