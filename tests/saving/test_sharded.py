"""The saver under FSDP2: composites hold what the ranks held, bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM

from helpers.cases import examples, mostly_long
from helpers.commands import call
from helpers.states import in_24_bits, read
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.containers.safetensors import read_header
from llmtailor.errors import SourceError
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import State
from llmtailor.runs.save_log import LOG, read_log
from saving.loop import check_states, fold, manifests
from saving.sharded import RANKS, model_of, optimizer_for
from trainings.harness import start_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for kind in (*RANKS.keys() - {"fsdp"}, *["fsdp"] * examples(0, 1), "resumed"):
        (folder / kind).mkdir()
    for ranks in sorted({*RANKS.values()}):
        start_ranks("saving.sharded", [folder], ranks, folder)
    return folder


def test_the_trainer_resumes_under_fsdp_from_a_composite(trained):
    """The first save is complete, so every loss is repeated."""
    _, straight = torch.load(trained / "trainer" / "truth.pt")
    _, resumed = torch.load(trained / "resumed" / "truth.pt")
    assert resumed == {step: loss for step, loss in straight.items() if step > 2}
    assert len(resumed) == 4


def check_measured(run, step, truth, part_of):
    """The adaptive policy decides by sums over the ranks, which log what they measured."""
    line = next(save for save in read_log(run / "partial" / LOG).saves if save.step == step)
    if step == 2:
        assert line.expected_loss == {}
        return
    before = read_manifest(run / "partial" / f"step-{step - 2:08}", "").ledger
    last = Ledger.from_json(before, "").steps
    expected = dict.fromkeys(part_of.values(), 0.0)
    for name in part_of:  # the others are frozen
        now = truth[step][name]
        change = now["master"] - truth[last[part_of[name]]][name]["master"]
        expected[part_of[name]] += float((now["exp_avg_sq"].sqrt() * change.abs()).sum()) / (1 - 0.999**step) ** 0.5
    assert line.expected_loss == pytest.approx(expected, rel=1e-4)
    assert 0 < len(line.parts) < len(expected)


@pytest.mark.parametrize("kind", mostly_long(sorted(RANKS.keys() - {"experts"}), "hsdp", "mesh", "partly", "trainer"))
def test_composites_hold_what_the_ranks_held(trained, kind, tmp_path):
    run = trained / kind / "run"
    truth, _ = torch.load(trained / kind / "truth.pt")
    part_of = {name: one["part"] for one in manifests([run])[2]["parts"] for name in one["params"]}
    for step in (2, 4, 6):
        path = run / "partial" / f"step-{step:08}"
        manifest = read_manifest(path, path.name)
        header = [read_header(path, fact.path, fact.path) for fact in manifest.bundles[: RANKS[kind]]]
        saving = [any(name.startswith("master/") for name in one.tensors) for one in header]
        # all ranks have rows, but of replicas only the first saves them: ranks 0 and 1 of HSDP's mesh of 2 x 2, and
        # ranks 0 and 2 of what tensor parallelism does not cut
        few = {"hsdp": [True, True, False, False], "mesh": [True, False, True, False]}
        is_cut = any("mlp" in name for names in manifest.params_of.values() for name in names)
        assert saving == ([True] * 4 if kind == "mesh" and is_cut else few.get(kind, [True] * RANKS[kind]))
        out = tmp_path / f"out-{step}"
        call("merge", "--run", run, "--at", step, "--to", "trainer", out)
        check_states(out, fold(truth, manifests([run], step)))
        frozen = {name for name, wanted in truth[step].items() if len(wanted) == 1}
        weights = load_file(out / "model.safetensors")
        assert all(torch.equal(weights[name], truth[step][name]["master"]) for name in frozen)
        assert bool(frozen) == (kind == "hsdp")
        check_measured(run, step, truth, part_of)
        files = [fact.path for fact in manifest.bundles[RANKS[kind] :]]
        assert files == [f"frozen-{rank:05}-of-00004.safetensors" for rank in range(4)] * (kind == "hsdp")
        assert all((path / file).stat().st_nlink == 3 for file in files), "the same in every save"
        assert AutoModelForCausalLM.from_pretrained(out).config.architectures == ["LlamaForCausalLM"]


def test_boxes_may_be_rounded(trained, tmp_path):
    """Blocks of 8-bit codes are made of each rank's box."""
    truth, _ = torch.load(trained / "mesh" / "truth.pt")
    call("merge", "--run", trained / "mesh" / "rounded", "--to", "dcp", tmp_path / "out")
    index = index_checkpoint(tmp_path / "out")
    for name, wanted in truth[6].items():
        for kind, exact in wanted.items():
            if kind != "step":
                found, root = read(index.root, index.held[State(name, kind)]), kind == "exp_avg_sq"
                error = (found.sqrt() - exact.sqrt() if root else found - exact).abs().max()
                most = exact.sqrt().max() / 255 if root else exact.abs().max() / (127 if kind == "exp_avg" else 1 << 15)
                assert 0 < error <= most, (name, kind)


def test_boxes_may_be_differences(trained, tmp_path):
    run, truth = trained / "mesh" / "compressed", torch.load(trained / "mesh" / "compressed.pt")
    assert {len([*path.glob("*.delta")]) for path in run.glob("partial/step-*")} == {0, RANKS["mesh"]}
    for step in (2, 3):
        call("merge", "--run", run, "--at", step, "--step", "base", "--to", "trainer", out := tmp_path / f"{step}")
        wanted = fold(truth, manifests([run], step))
        check_states(out, {key: in_24_bits(one) if key[1] == "master" else one for key, one in wanted.items()})


def test_boxes_that_leave_something_out_are_refused(trained, tmp_path):
    folder = shutil.copytree(trained / "mesh" / "run" / "partial" / "step-00000002", tmp_path / "step-00000002")
    path = next(path for path in sorted(folder.glob("rank-*")) if b'"sizes\\":' in path.read_bytes())
    data = path.read_bytes()
    at = data.index(b'"offsets\\":[', data.index(b"down_proj")) + len(b'"offsets\\":[')
    path.write_bytes(data[:at] + b"1" + data[at + 1 :])
    with pytest.raises(SourceError, match=r"boxes of .* do not make up the param"):
        index_checkpoint(folder)


def test_torch_loads_modules_under_two_names_and_a_rate_that_is_a_tensor(trained, tmp_path):
    truth, _ = torch.load(trained / "hsdp" / "truth.pt")
    call("merge", "--run", trained / "hsdp" / "run", "--at", 2, "--to", "dcp", tmp_path / "out")
    model = model_of("hsdp")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = optimizer_for(model, "hsdp")
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    optimizer.param_groups[0]["lr"].zero_()
    dcp.load(states, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    assert optimizer.param_groups[0]["lr"] == torch.tensor(1e-2)
    for name, param in model.named_parameters():
        wanted = truth[2][name]
        assert torch.equal(param, wanted["master"]), name
        assert all(torch.equal(value, wanted[kind]) for kind, value in optimizer.state[param].items())


def test_composites_hold_the_newest_of_every_expert(trained, tmp_path):
    """FSDP2 cuts between experts: one rank has two of them, the other one."""
    run = trained / "experts" / "run"
    truth, _ = torch.load(trained / "experts" / "truth.pt")
    seen = set()
    for step in (4, 6):
        made = manifests([run], step)
        call("merge", "--run", run, "--at", step, "--step", "base", "--to", "trainer", out := tmp_path / f"out-{step}")
        check_states(out, fold(truth, made))
        newest = {part["part"]: at for at, one in made.items() for part in one["parts"]}
        seen |= {len({newest[f"layer {layer} expert {expert}"] for expert in range(3)}) for layer in range(3)}
    assert seen == {1, 2}, "some layers have experts of one step, and some of two"
    call("verify", "--deep", run / "partial" / "step-00000006")
