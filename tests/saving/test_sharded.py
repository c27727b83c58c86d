"""The saver under FSDP2: composites hold what the ranks held, bit for bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from helpers.commands import run_here  # noqa: E402
from llmtailor.checkpoint.lineage import Ledger  # noqa: E402
from llmtailor.containers.safetensors import read_header  # noqa: E402
from llmtailor.formats.partial.manifest import read_manifest  # noqa: E402
from real.harness import start_ranks  # noqa: E402
from saving.sharded import RANKS  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for kind, ranks in RANKS.items():
        (folder / kind).mkdir()
        start_ranks("saving.sharded", [folder / kind], ranks, folder / kind)
    (folder / "resumed").mkdir()
    composite = folder / "resumed" / "composite"
    done = run_here("merge", "--run", folder / "trainer" / "run", "--at", 2, composite)
    assert done.returncode == 0, done.stderr
    start_ranks("saving.sharded", [folder / "resumed"], 2, folder / "resumed")
    return folder


def test_the_trainer_resumes_under_fsdp_from_a_composite(trained):
    """The first save is complete, so every loss is repeated."""
    _, straight = torch.load(trained / "trainer" / "truth.pt")
    _, resumed = torch.load(trained / "resumed" / "truth.pt")
    assert resumed == {step: loss for step, loss in straight.items() if step > 2}
    assert len(resumed) == 4


@pytest.mark.parametrize("kind", RANKS)
def test_composites_hold_what_the_ranks_held(trained, kind, tmp_path):
    run = trained / kind / "run"
    truth, _ = torch.load(trained / kind / "truth.pt")
    for step in (2, 4, 6):
        path = run / "partial" / f"step-{step:08}"
        manifest = read_manifest(path, path.name)
        step_of = Ledger.from_json(manifest.ledger, path.name).steps
        header = [read_header(path, fact.path, fact.path) for fact in manifest.bundles]
        saving = [any(name.startswith("master/") for name in one.tensors) for one in header]
        # all ranks have rows, but of HSDP's replicas only the first saves them: ranks 0 and 1 of a mesh of 2 x 2
        assert saving == ([True, True, False, False] if kind == "hsdp" else [True] * RANKS[kind])
        part_of = {
            name: part
            for at in sorted(step_of.values())
            for part, names in read_manifest(run / "partial" / f"step-{at:08}", "").params_of.items()
            for name in names
        }
        out = tmp_path / f"out-{step}"
        done = run_here("merge", "--run", run, "--at", step, "--to", "trainer", out)
        assert done.returncode == 0, done.stderr
        weights, optimizer = load_file(out / "model.safetensors"), torch.load(out / "optimizer.pt")
        names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
        assert sorted(names) == sorted(truth[step])
        for number, name in enumerate(names):
            wanted = truth[step_of[part_of[name]]][name]
            found = {"master": weights[name], **optimizer["state"][number]}
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted if key != "step"), (step, name)
        assert AutoModelForCausalLM.from_pretrained(out).config.architectures == ["LlamaForCausalLM"]
