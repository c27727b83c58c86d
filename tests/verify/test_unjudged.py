"""What stock software reads and llmtailor does not is no damage: other forms of files, other optimizers."""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import copied, edit
from helpers.commands import call, run_here
from llmtailor.codes import Code
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.findings import ERROR, NOTE, WARNING
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import State
from llmtailor.verify.verify import NOT_RESUMABLE, RESUMABLE, verify_checkpoint
from trainings.alone import finished, train
from verify.damages import STEP

# --- forms of files ---------------------------------------------------------------------------------------------------

OPTIM = f"global_step{STEP}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = f"global_step{STEP}/zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.fixture
def of_zero3(runs, tmp_path) -> Path:
    return Path(shutil.copytree(runs["llama"].checkpoint(STEP), tmp_path / f"checkpoint-{STEP}"))


def deflate(path: Path) -> None:
    with zipfile.ZipFile(path) as source:
        content = [(info.filename, source.read(info)) for info in source.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in content:
            target.writestr(name, data)
    torch.load(path, weights_only=False)  # stock reads it


def save_as_before_1_6(path: Path) -> None:
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)


FORMS = pytest.mark.parametrize(("form", "code"), [(deflate, Code.COMPRESSED), (save_as_before_1_6, Code.LEGACY)])
"""Those that stock reads, and llmtailor doesn't"""


@FORMS
@pytest.mark.parametrize("path", ["scheduler.pt", "rng_state_0.pth"])
def test_another_form_of_a_file_of_the_trainer_is_no_damage(of_zero3: Path, path: str, form: Any, code: Code):
    form(of_zero3 / path)
    verdict = verify_checkpoint(of_zero3, name="x", deep=True)
    assert [(one.code, one.path, one.severity) for one in verdict.findings] == [(code, path, WARNING)]
    assert verdict.is_resumable and "torch.save" in verdict.findings[0].fix


@FORMS
def test_another_form_of_a_file_that_no_resume_reads_is_not_even_told(of_zero3: Path, form: Any, code: Code):
    form(of_zero3 / "training_args.bin")
    assert not verify_checkpoint(of_zero3, name="x", deep=True).findings


@FORMS
@pytest.mark.parametrize("paths", [[OPTIM], [MODEL], [OPTIM, OPTIM.replace("rank_1", "rank_0")]])
def test_states_in_another_form_can_not_be_judged(of_zero3: Path, paths: list[str], form: Any, code: Code):
    for path in paths:
        form(of_zero3 / path)
    with pytest.raises(UnsupportedCheckpoint) as refused:
        verify_checkpoint(of_zero3, name="x")
    assert {(one.code, one.path) for one in refused.value.problems} == {(code, path) for path in paths}


def test_tensors_that_do_not_lie_in_one_piece_can_not_be_judged(of_zero3: Path):
    def change(tree: Any) -> None:
        masters = tree["optimizer_state_dict"]["fp32_flat_groups"]
        masters[1] = torch.stack([masters[1].detach()] * 2, dim=1)[:, 0]

    edit(of_zero3 / OPTIM, change)
    with pytest.raises(UnsupportedCheckpoint, match="not contiguous") as refused:
        verify_checkpoint(of_zero3, name="x")
    assert {(one.code, one.path) for one in refused.value.problems} == {(Code.STATE_LAYOUT, OPTIM)}


def test_compressed_states_beside_a_damage_are_not_called_damaged(of_zero3: Path):
    deflate(of_zero3 / OPTIM)
    (of_zero3 / "latest").unlink()
    verdict = verify_checkpoint(of_zero3, name="x")
    found = {(one.code, one.severity) for one in verdict.findings}
    assert found == {(Code.COMPRESSED, WARNING), (Code.FILE_NAME, ERROR)}


# --- optimizers; params may lack a gradient ---------------------------------------------------------------------------

pytestmark = pytest.mark.real


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(finished().checkpoint(4), tmp_path / "checkpoint-4")


Make = Callable[[dict[str, Any], pytest.MonkeyPatch], dict[str, Any]]
"""Given Adam's state dict of the finished training"""


def like(change: Callable[[Any], Any], **options: Any) -> Make:
    return lambda tree, patch: changed(without_adams_options(tree), change, **options)


def changed(tree: dict[str, Any], change, **options: Any) -> dict[str, Any]:
    """Return Adam's state dict as another optimizer would have it."""
    states = {number: change(state) for number, state in tree["state"].items()}
    groups = [{**group, **options} for group in tree["param_groups"]]
    return {"state": states, "param_groups": groups}


def without_adams_options(tree: dict[str, Any]) -> dict[str, Any]:
    kept = ("params", "lr", "betas", "eps", "weight_decay", "initial_lr")
    return {**tree, "param_groups": [{key: group[key] for key in kept} for group in tree["param_groups"]]}


class Kept:
    """An object in a state, of a class of another package."""


def of_package(tree: dict[str, Any], monkeypatch, module: str, name: str) -> dict[str, Any]:
    kind = type(name, (Kept,), {"__module__": module})
    words = module.split(".")
    for end in range(1, len(words) + 1):
        path = ".".join(words[:end])
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    setattr(sys.modules[module], name, kind)
    return changed(tree, lambda state: {**state, "projector": kind()})


def by_params(tree: dict[str, Any]) -> dict[str, Any]:
    state = {torch.nn.Parameter(torch.ones(2)): {"step": 4}}
    return {"state": {}, "param_groups": [{**tree["param_groups"][0], "state": state}, *tree["param_groups"][1:]]}


def package(module: str, name: str) -> Make:
    return lambda tree, patch: of_package(tree, patch, module, name)


OTHERS: dict[str, Make] = {
    "GrokAdamW": lambda tree, patch: by_params(tree),
    "GaLore": package("galore_torch.galore_projector", "GaLoreProjector"),
    "of another version of torchao": package("torchao.optim.subclass_2bit", "OptimState2bit"),
    "SOAP": like(lambda state: {**state, "GG": [state["exp_avg"], state["exp_avg_sq"]]}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_refused_once_by_name(name, checkpoint, monkeypatch):
    path = checkpoint / "optimizer.pt"
    torch.save(OTHERS[name](torch.load(path), monkeypatch), path)
    for read in (verify_checkpoint, index_checkpoint):
        with pytest.raises(UnsupportedCheckpoint) as refused:
            read(checkpoint)
        [problem] = refused.value.problems
        assert problem.what.startswith(f"its optimizer is {name}") and problem.path == "optimizer.pt" and problem.fix
    if "torchao" in name:
        done = run_here("convert", checkpoint, checkpoint.with_name("out"))
        assert done.returncode == 4 and "torchao" in done.stderr and "bug" not in done.stderr


def test_an_unknown_class_stays_unsafe(checkpoint, monkeypatch):
    path = checkpoint / "optimizer.pt"
    torch.save(of_package(torch.load(path), monkeypatch, "somebody.else", "Thing"), path)
    verdict = verify_checkpoint(checkpoint)
    assert verdict.level == NOT_RESUMABLE
    assert {finding.code for finding in verdict.findings} == {Code.UNSAFE_PICKLE}


def flat(state):
    return {"step": 4, "state1": state["exp_avg"], "state2": state["exp_avg_sq"]}


def nested(state):
    one = flat(state)
    return {"step": one.pop("step"), "__bnb_optimizer_quant_state__": one}


def test_32_bit_states_of_bitsandbytes_are_read_nested_and_flat(checkpoint):
    """Files nest them, partial checkpoints have them as in memory."""
    path, found = checkpoint / "optimizer.pt", []
    adam = without_adams_options(torch.load(path))
    for form in (flat, nested):
        torch.save(changed(adam, form, betas=(0.99, 0.0), eps=0.0), path)  # its RMSprop has such options
        assert verify_checkpoint(checkpoint, deep=True).level == RESUMABLE
        index = index_checkpoint(checkpoint)
        found.append({state: (held.dtype, held.shape) for state, held in index.held.items()})
    assert found[0] == found[1] and State("model.norm.weight", "state2") in found[0]


def test_a_moment_that_no_param_has_tells_another_optimizer(checkpoint):
    path = checkpoint / "optimizer.pt"
    tree = torch.load(path)
    lion = changed(without_adams_options(tree), lambda state: {"step": state["step"], "exp_avg": state["exp_avg"]})
    torch.save(lion, path)
    assert verify_checkpoint(checkpoint).level == RESUMABLE
    lion["state"][3]["exp_avg_sq"] = tree["state"][3]["exp_avg_sq"]
    torch.save(lion, path)
    assert verify_checkpoint(checkpoint).level == NOT_RESUMABLE


def skip_a_layer(model: Any) -> None:
    """Leave a layer out of the computation: its params never get a gradient."""
    model.model.layers[1].forward = lambda hidden, *args, **kwargs: hidden


@pytest.fixture(scope="module")
def unused(tmp_path_factory):
    return train(tmp_path_factory.mktemp("unused"), prepare=skip_a_layer)


def test_params_without_a_gradient_are_no_damage(unused, tmp_path):
    source, out = unused.checkpoint(2), tmp_path / "checkpoint-2"
    verdict = verify_checkpoint(source, deep=True)
    [finding] = verdict.findings
    assert (verdict.level, finding.severity, finding.code) == (RESUMABLE, NOTE, Code.STATE_MISSING)
    assert "model.layers.1.self_attn.q_proj.weight" in finding.what
    call("convert", source, out, "--to", "trainer")
    assert verify_checkpoint(out, deep=True).level == RESUMABLE
    resumed = train(tmp_path, prepare=skip_a_layer, resume_from=out)
    wanted, have = (load_file(one.checkpoint(4) / "model.safetensors") for one in (unused, resumed))
    assert all(torch.equal(have[name], tensor) for name, tensor in wanted.items())
    assert verify_checkpoint(resumed.checkpoint(4), deep=True).is_resumable


@pytest.mark.parametrize("options", [("--stage", "2"), ("--to", "dcp"), ("--stage", "3", "--num-gpu", "2")])
def test_moments_that_do_not_exist_yet_are_zeros_in_all_formats(unused, options, tmp_path):
    out = tmp_path / "checkpoint-2"
    call("convert", unused.checkpoint(2), out, *options)
    assert verify_checkpoint(out, deep=True).is_resumable
    back = tmp_path / "back" / "checkpoint-2"
    if options[0] == "--stage":  # whose groups have one step for all params
        return
    call("convert", out, back, "--to", "trainer")
    states = torch.load(back / "optimizer.pt")["state"]
    assert {float(state["step"]) for state in states.values()} == {0.0, 2.0}
    assert all(bool(state["exp_avg_sq"].any()) == bool(state["step"]) for state in states.values())


def test_thin_and_diff_know_moments_that_do_not_exist_yet(unused, tmp_path):
    folder = copied(unused.folder, tmp_path / "run", (2, 4))
    before = unused.checkpoint(2)
    call("thin", folder, "--strategy", "parity", "--yes")
    out = tmp_path / "checkpoint-2"
    call("merge", "--run", folder, "--at", "2", out)
    assert "different: 0 of " in run_here("diff", before, out).stdout


def test_a_save_before_the_first_step_is_no_damage(tmp_path):
    """accelerate's ``checkpoint_0``."""
    from accelerate import Accelerator

    from trainings.models import build

    def prepare() -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = build("llama", 2, False)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    accelerator, model, _ = prepare()
    source, out = tmp_path / "checkpoint_0", tmp_path / "out"
    accelerator.save_state(str(source))
    accelerator.unwrap_model(model).config.save_pretrained(source)
    verdict = verify_checkpoint(source)
    assert (verdict.level, [finding.code for finding in verdict.findings]) == (RESUMABLE, [Code.STATE_MISSING])
    call("convert", source, out)
    found = []
    for root in (source, out):
        accelerator, model, optimizer = prepare()
        accelerator.load_state(str(root))
        tokens = torch.arange(12)[None]
        for _ in range(2):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


def test_weights_in_pytorch_model_bin_alone_are_unsupported(checkpoint):
    weights = checkpoint / "model.safetensors"
    torch.save(load_file(weights), checkpoint / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UnsupportedCheckpoint) as refused:
        verify_checkpoint(checkpoint)
    [problem] = refused.value.problems
    assert problem.path == "pytorch_model.bin" and "safetensors" in problem.fix and "remove" not in problem.fix
    call("verify", checkpoint, code=4)


def sgd(states: dict[int, Any], groups: list[dict[str, Any]]) -> None:
    states.clear()
    groups[:] = [{"params": group["params"], "lr": group["lr"], "nesterov": False} for group in groups]


def in_blocks(states: dict[int, Any], groups: list[dict[str, Any]]) -> None:
    for number, state in states.items():
        codes = {"state1": state["exp_avg"].to(torch.uint8), "absmax1": torch.ones(4), "qmap1": torch.ones(256)}
        states[number] = {"step": 4, "__bnb_optimizer_quant_state__": codes}


@pytest.mark.parametrize("name", ["llama", "zero2"])
@pytest.mark.parametrize("change", [sgd, in_blocks])
def test_under_deepspeed_states_are_read_if_they_are_elementwise(name, change, runs, tmp_path):
    root = shutil.copytree(runs[name].checkpoint(4), tmp_path / "checkpoint-4")

    def edit_states(tree: Any) -> None:
        outer = tree["optimizer_state_dict"]
        inner = outer.get("base_optimizer_state") or outer["optimizer_state_dict"]
        change(inner["state"], inner["param_groups"])

    for shard in root.glob("global_step*/*optim_states.pt"):
        edit(shard, edit_states)
    if change is in_blocks:
        with pytest.raises(UnsupportedCheckpoint, match=r"state1 is U8 .* which is not one value for each element"):
            verify_checkpoint(root)
    else:
        assert verify_checkpoint(root).level == RESUMABLE
