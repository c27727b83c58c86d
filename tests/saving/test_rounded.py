"""The default policy: everything at every save, masters exactly, Adam's moments in 8 bits."""

from __future__ import annotations

import logging

import pytest
import torch

from helpers.commands import call
from llmtailor.runs.scan import compose_newest
from saving.loop import Loop, log_of, manifests, rounded


class AdamWithCopies(torch.optim.Adam):
    """Keeps a copy of the weights under the name of a moment."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for param, state in self.state.items():
            state["exp_avg"].copy_(param)


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
    told = [one.getMessage() for one in caplog.records if "8 bits" in one.getMessage()]
    assert len(told) == 1 and 'policy="full" keeps them exact' in told[0] and "1/254" in told[0]
    told = call("merge", "--run", loop.run)
    assert "which is complete: nothing is older" in told.stdout and "moments" not in told.stderr


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (torch.optim.Adamax, {}, "has no state that is rounded"),
        (lambda params: torch.optim.SGD(params, 1e-2, 0.9), {}, "has no state that is rounded"),
        (AdamWithCopies, {}, "is a copy of the weights"),
        (torch.optim.AdamW, {"moments": "fp32"}, ""),
        (torch.optim.AdamW, {"policy": "full"}, ""),
    ],
    ids=["no second moment", "momentum", "copies of the weights", "moments=fp32", "full"],
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
    assert told in caplog.text and ("8 bits" in caplog.text) == (not told and not options)


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
    assert 'by the policy moments_in_turn, the next ones are by rounded; give policy="moments_in_turn"' in caplog.text
    loop.make_saves(1)
    loop.start_again("rounded")
    assert caplog.text.count("give policy=") == 1
    loop.saver.close()
    assert not loop.manifest(4).get("masters")
