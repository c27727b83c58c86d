"""The default policy: everything at every save, masters exactly, Adam's moments in 8 bits."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch

from helpers.commands import call
from llmtailor.runs.composing import compose_newest
from llmtailor.saving import SaveFailed
from saving.loop import Loop, log_of, manifests, rounded


class AdamWithCopies(torch.optim.Adam):
    """Keeps a copy of the weights under the name of a moment."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for param, state in self.state.items():
            if self.copied(param):
                state["exp_avg"].copy_(param)

    def copied(self, param):
        return True


class AdamWithSomeCopies(AdamWithCopies):
    """Keeps copies of vectors only."""

    def copied(self, param):
        return param.dim() == 1


class AdamInHalf(torch.optim.Adam):
    """Keeps moments in bf16."""

    @torch.no_grad()
    def step(self, closure=None):
        self.cast(torch.float32)
        super().step(closure)
        self.cast(torch.bfloat16)

    def cast(self, dtype):
        for state in self.state.values():
            state |= {kind: state[kind].to(dtype) for kind in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("background", [True, False])
def test_each_save_is_complete_in_half_of_the_bytes(tmp_path, caplog, background):
    loop = Loop(tmp_path / "run", background=background).trained(3)
    full = Loop(tmp_path / "full", policy="full", background=background).trained(3)
    sizes = [log_of(one.run)[-1]["num_bytes"] for one in (loop, full)]
    assert sizes[0] < 0.56 * sizes[1]
    for step, manifest in manifests([loop.run]).items():
        assert {part["part"] for part in manifest["parts"]} == {*loop.saver.model.parts}
        loop.truth[step] = rounded(loop.truth[step])
        loop.check(step, tmp_path / f"{step}")
    told = [one.getMessage() for one in caplog.records if "8bit" in one.getMessage()]
    assert len(told) == 1 and 'policy="full" keeps everything exact' in told[0] and "1/254" in told[0]
    told = call("merge", "--run", loop.run)
    assert "which is complete: nothing is older" in told.stdout and "moments" not in told.stderr


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (torch.optim.Adamax, {}, "of which none can be rounded"),
        (lambda params: torch.optim.SGD(params, 1e-2, 0.9), {}, "of which none can be rounded"),
        (AdamWithCopies, {}, "is a copy of the weights"),
        (AdamWithSomeCopies, {}, "is a copy of the weights"),
        (AdamInHalf, {}, "of which none can be rounded"),
        (torch.optim.AdamW, {"moments": "fp32"}, ""),
        (torch.optim.AdamW, {"policy": "full"}, ""),
    ],
    ids=["no second moment", "momentum", "copies", "copies of vectors", "bf16", "moments=fp32", "full"],
)
def test_what_is_saved_exactly(tmp_path, caplog, make, options, told):
    caplog.set_level(logging.INFO)
    loop = Loop(tmp_path / "run", make=lambda model: make(model.parameters()), **options).trained(2)
    out = tmp_path / "out"
    call("merge", "--run", loop.run, out)
    tree = torch.load(out / "optimizer.pt", weights_only=True)
    names = [name for group in tree["param_groups"] for name in group["lt_params"]]
    for at, name in enumerate(names):
        for kind, value in tree["state"][at].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(loop.truth[2][name][kind])), (name, kind)
    assert told in caplog.text and "8bit" not in caplog.text


def test_of_amsgrad_the_greatest_second_moments_are_exact(tmp_path):
    loop = Loop(tmp_path / "run", make=lambda model: torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=True)).trained(
        2
    )
    call("merge", "--run", loop.run, tmp_path / "out")
    tree, truth = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True), rounded(loop.truth[2])
    names = [name for group in tree["param_groups"] for name in group["lt_params"]]
    for at, name in enumerate(names):
        for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert torch.equal(tree["state"][at][kind], truth[name][kind]), (name, kind)


def test_if_the_newest_save_is_damaged_the_one_before_is_taken(tmp_path, caplog):
    loop = Loop(tmp_path / "run").trained(3)
    [path] = (loop.run / "partial" / "step-00000003").glob("rank-*")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    newest = compose_newest(loop.run)
    assert (newest.step, newest.path.name) == (2, "checkpoint-2")
    assert "it is not as it was written" in caplog.text
    path.write_bytes(data[:100])
    assert "nothing to merge" in call("merge", "--run", loop.run).stdout


def test_a_run_of_another_policy_says_what_changes(tmp_path, caplog):
    loop = Loop(tmp_path, policy="moments_in_turn:2").start()
    loop.make_saves(3)
    loop.start_again("rounded")
    assert "are by rounded; to keep it, give policy='moments_in_turn:k=2'" in caplog.text
    loop.make_saves(1)
    loop.start_again("rounded")
    assert caplog.text.count("give policy=") == 1, "said once"
    loop.saver.close()
    assert not loop.manifest(4).get("masters")


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("kind", "value"), [("exp_avg_sq", math.inf), ("exp_avg", math.nan), ("exp_avg_sq", -1e-9)], ids=str
)
def test_what_8_bits_cannot_hold_is_saved_exactly_from_the_next_save_on(tmp_path, caplog, background, kind, value):
    """An element that overflows is of no consequence to Adam; its neighbors in a block would be lost with it."""
    loop = Loop(tmp_path / "run", background=background).start()
    loop.make_saves(1)
    loop.train()
    param = next(iter(loop.model.parameters()))
    with torch.no_grad():
        loop.optimizer.state[param][kind].view(-1)[5] = value
    with pytest.raises(SaveFailed, match="which 8 bits can't hold"):
        loop.save().wait(60)
    loop.step += 1
    loop.truth[3] = {
        name: {"master": param.detach().clone(), **copy.deepcopy(loop.optimizer.state[param])}
        for name, param in loop.model.named_parameters()
    }
    loop.save().wait(60)
    loop.saver.close()
    assert loop.saves == [1, 3]
    call("merge", "--run", loop.run, tmp_path / "out")
    tree = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    names = [name for group in tree["param_groups"] for name in group["lt_params"]]
    for at, name in enumerate(names):
        for one in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(tree["state"][at][one], loop.truth[3][name][one], rtol=0, atol=0, equal_nan=True)


def test_a_save_without_its_trainer_state_is_passed_over(tmp_path):
    loop = Loop(tmp_path / "run").trained(3)
    (loop.run / "partial" / "step-00000003" / "trainer_state.json").unlink()
    told = call("merge", "--run", loop.run)
    assert "resumes at step 2" in told.stdout and "trainer_state.json: it is missing" in told.stderr


def test_adams_states_without_any_of_its_options_are_of_another_optimizer(tmp_path):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure=None):
            for param in (param for group in self.param_groups for param in group["params"]):
                zeros = {kind: torch.zeros_like(param) for kind in ("exp_avg", "exp_avg_sq")}
                state = self.state[param] = self.state[param] or {"step": torch.tensor(0.0), **zeros}
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 0.1)
                state["exp_avg_sq"].mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
                param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-1e-3)

    loop = Loop(tmp_path / "run", make=lambda model: Own(model.parameters())).trained(2)
    call("merge", "--run", loop.run, tmp_path / "out")
    call("verify", tmp_path / "out", "--deep")
