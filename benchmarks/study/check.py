"""Proves that the study's composites are what the saver and ``llmtailor merge --run`` make of the same training."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from llmtailor.policies import make_policy
from llmtailor.runs.composing import compose_newest
from llmtailor.saving import saver_for
from study.composites import ask, composite, parts_of
from study.train import Setting, Size, State, Training

SETTING = Setting("check", Size(16, 4, 32), "sources", 2e-3, 18, 3, crash=15)
EXPERTS = replace(SETTING, size=replace(SETTING.size, experts=4))


def check(policy: str, folder: Path, setting: Setting = SETTING) -> int:
    """Train with the saver, compose both ways after the crash, and compare. Return how many tensors are equal.

    Raises AssertionError for a difference.
    """
    training = Training(setting, seed=0)
    run, states = folder / "run", dict[int, State]()
    scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
    made_for = {"model": training.model, "optimizer": training.optimizer, "scheduler": scheduler}
    experts = "parts" if setting.size.experts else None
    saver = saver_for(run, **made_for, policy=policy, background=False, experts=experts)
    saver.start(0)

    def save(step: int) -> None:
        if step % setting.every == 0:
            states[step] = training.state()
            saver.save(step)

    training.run_to(setting.crash, save)
    saver.close()
    model = parts_of(training)
    left = ask(make_policy(policy), model, states)
    assert len(set(left.held[setting.crash].values())) > 1 or policy == "full"
    mine = composite(left, model, states, setting.crash)
    made = compose_newest(run)
    assert made is not None
    weights, optimizer = load_file(made.path / "model.safetensors"), torch.load(made.path / "optimizer.pt")
    names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
    for number, name in enumerate(names):
        weight, mean, square = mine.params[name]
        state = optimizer["state"][number]
        assert torch.equal(weights[name], weight), name
        assert torch.equal(state["exp_avg"], mean), name
        assert torch.equal(state["exp_avg_sq"], square), name
        assert float(state["step"]) == mine.adam[name], name
    return 3 * len(names)


def main() -> None:
    logging.disable(logging.WARNING)  # the learning rate is not that of the scheduler
    for policy, setting in (("adaptive:0.5", EXPERTS), ("moments_in_turn:3", EXPERTS)):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{policy}, experts: {check(policy, Path(folder), setting)} tensors are the same")
    for policy in ("parity", "filter:first=1,last=1,every=2", "round_robin:3", "moments_in_turn:3", "adaptive:0.5"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{policy}: {check(policy, Path(folder))} tensors are the same")


if __name__ == "__main__":
    main()
