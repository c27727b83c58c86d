"""optimizer.pt and its names, and ZeRO-3 becomes plain without a bit lost."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_model

from helpers.checkpoints import make
from helpers.composing import convert, merge
from helpers.states import read
from llmtailor.codes import Code
from llmtailor.errors import SourceError, UnsupportedCheckpoint
from llmtailor.formats.param_names import ModelFacts, derived_names
from llmtailor.formats.registry import index_checkpoint
from llmtailor.formats.torch_optimizer import SavedGroup, SavedOptimizer
from llmtailor.model.roles import MASTER, State
from llmtailor.verify.verify import verify_checkpoint
from oracle import zero3
from synthetic import pickled_as_deepspeed
from trainings.alone import NamedGroups, finished, train
from trainings.models import build
from verify.damages import on_json

MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def root(tmp_path):
    return Path(shutil.copytree(finished().checkpoint(2), tmp_path / "checkpoint-2"))


def test_remote_code_is_never_run(root, tmp_path):
    (root / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    names = {"AutoConfig": "modeling_evil.Evil", "AutoModel": "modeling_evil.Evil"}
    on_json("config.json", model_type="evil", auto_map=names)(root, root)
    with pytest.raises(SourceError, match="transformers can't build the model"):
        index_checkpoint(root, "ckpt")
    assert not (tmp_path / "ran").exists()


def saved(*groups):
    shapes = [shape for group in groups for shape in group]
    tensors = {number: {"exp_avg": type("T", (), {"shape": shape})()} for number, shape in enumerate(shapes)}
    made, at = [], 0
    for number, group in enumerate(groups):
        made.append(SavedGroup(tuple(range(at, at + len(group))), None, {"weight_decay": 0.1 * (not number)}))
        at += len(group)
    return SavedOptimizer(tuple(made), tensors, {number: {} for number in tensors}, {}, True)


MODEL = ModelFacts(
    {"embed": (9, 4), "a.q": (4, 4), "a.up": (8, 4), "b.q": (4, 4), "b.up": (8, 4), "head": (9, 4), "norm": (4,)},
    frozenset(("embed", "a.q", "a.up", "b.q", "b.up", "head")),
    {},
    frozenset(),
)


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ([(4, 4), (8, 4), (4, 4), (8, 4), (9, 4)], ("a.q", "a.up", "b.q", "b.up", "head")),
        ([(9, 4), (4, 4), (8, 4), (4, 4), (8, 4)], ("embed", "a.q", "a.up", "b.q", "b.up")),
        ([(9, 4), (4, 4), (4, 4), (8, 4), (9, 4)], ("embed", "a.q", "b.q", "b.up", "head")),
        ([(9, 4), (9, 4)], ("embed", "head")),
        ([(9, 4), (4, 4), (8, 4), (9, 4)], None),
        ([(9, 4)], None),
    ],
)
def test_frozen_params_are_told_only_where_the_shapes_leave_no_doubt(shapes, names):
    optimizer = saved(shapes, [(4,)])
    if names:
        assert derived_names(optimizer, MODEL, "x") == (names, ("norm",))
    else:
        with pytest.raises(SourceError, match="do not show which"):
            derived_names(optimizer, MODEL, "x")


def test_groups_of_ones_own():
    """As many params as the model has, but dealt otherwise: nothing is damaged."""
    optimizer = saved([(4, 4), (8, 4), (4, 4), (8, 4), (9, 4)], [(9, 4), (4,)])
    with pytest.raises(UnsupportedCheckpoint, match="have 5 and 2 params, and the Trainer's have 6 and 1"):
        derived_names(optimizer, MODEL, "x")


class SkipsAtZero(torch.optim.AdamW):
    """Makes no step at a learning rate of 0, where a warmup begins, as Prodigy does."""

    def step(self, closure=None):
        return super().step(closure) if self.param_groups[0]["lr"] else None


def test_an_optimizer_may_lag_behind_the_schedule_as_a_whole(tmp_path):
    class Own(transformers.Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = SkipsAtZero((model or self.model).parameters(), lr=1e-3)
            return self.optimizer

    run = train(tmp_path / "run", kind=Own, warmup_steps=2)
    verdict = verify_checkpoint(run.checkpoint(4))
    assert set(index_checkpoint(run.checkpoint(4)).steps().values()) == {3}
    assert [one.code for one in verdict.of_severity("warning")] == [Code.STEPS_DIFFER] and verdict.is_resumable
    merge(run.checkpoint(4), tmp_path / "out", {1: run.checkpoint(2)})
    assert verify_checkpoint(tmp_path / "out").is_resumable


@pytest.mark.parametrize("is_named", [True, False])
def test_a_tied_model_in_a_file_of_save_model(is_named, tmp_path):
    """It keeps the name that comes first, ``lm_head.weight``, and lists the other in the header."""
    run = train(tmp_path / "run", tied=True, **({"kind": NamedGroups} if is_named else {}))
    root, model = run.checkpoint(4), run.trainer.model
    embed = model.get_input_embeddings().weight.detach().clone()
    save_model(model, str(root / "model.safetensors"), metadata={"format": "pt"})
    assert "model.embed_tokens.weight" not in load_file(root / "model.safetensors")
    assert model.load_state_dict(load_file(root / "model.safetensors"), strict=False).unexpected_keys == []
    verdict = verify_checkpoint(root, deep=True)
    assert verdict.is_resumable and not [one for one in verdict.findings if "embed_tokens" in f"{one}"]
    assert index_checkpoint(root).tied == {"lm_head.weight": "model.embed_tokens.weight"}
    out = convert(root, tmp_path / "zero", stage=3, dtype="F32", world_size=2)
    index = index_checkpoint(out)
    assert torch.equal(read(out, index.held[State("model.embed_tokens.weight", MASTER)]), embed)
    again = convert(root, tmp_path / "again")
    assert verify_checkpoint(again, deep=True).is_resumable
    assert torch.equal(load_file(again / "model.safetensors")["model.embed_tokens.weight"], embed)


def test_a_model_that_a_save_hook_wrote_is_not_judged(tmp_path):
    """As in the scripts of diffusers: another hook reads it back."""

    def save(models, weights, out):
        for one in models:
            one.save_pretrained(f"{out}/transformer")
            weights.pop()

    accelerator = accelerate.Accelerator(cpu=True)
    model = build("llama", 1, tied=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.named_parameters()))
    sum(param.sum() for param in model.parameters()).backward()
    optimizer.step()
    accelerator.save_state(tmp_path / "usual")
    accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(tmp_path / "hooked")
    assert verify_checkpoint(tmp_path / "usual").is_resumable
    with pytest.raises(UnsupportedCheckpoint, match=r"may be in transformer/, as a save hook writes them"):
        verify_checkpoint(tmp_path / "hooked")
    (tmp_path / "usual" / "model.safetensors").unlink()
    assert not verify_checkpoint(tmp_path / "usual").is_resumable


def test_shapes_that_fit_nowhere():
    with pytest.raises(SourceError, match="do not fit"):
        derived_names(saved([(8, 4), (9, 4), (4, 4)], [(4,)]), MODEL, "x")


def test_weights_over_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("llmtailor.formats.safetensors_weights.SHARD_BYTES", 1000)
    base = index_checkpoint(make(tmp_path, 7))
    out = convert(base.root, tmp_path / "plain", stage=0)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and not (out / "model.safetensors").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    with pickled_as_deepspeed():
        masters = zero3.load(base.root).kind(MASTER)
    assert all(not zero3.differ(param.detach(), masters[name]) for name, param in model.named_parameters())
    again = convert(out, tmp_path / "again")
    assert all((again / name).read_bytes() == (out / name).read_bytes() for name in [*files, "optimizer.pt"])


def test_a_base_without_scheduler_cannot_become_plain(tmp_path):
    source = make(tmp_path, 7)
    (source / "scheduler.pt").unlink()
    with pytest.raises(SourceError, match="drops the optimizer"):
        convert(source, tmp_path / "plain", stage=0)


def llava() -> transformers.LlavaForConditionalGeneration:
    """Saved under other names than it has in memory, almost all of it."""
    text = build("llama", 2, tied=False).config
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=60)
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("family", ["mixtral", "llava"])
def test_families_with_other_names_on_disk_get_their_own_names(family, tmp_path):
    """Stock finds the params of its own checkpoint by their names in memory, and loses them without a word."""
    of_family = {"arch": family} if family == "mixtral" else {"prepare": lambda model: llava()}
    run = train(tmp_path / "run", steps=4, **of_family)
    base, source = run.checkpoint(4), run.checkpoint(2)
    model, names = run.trainer.model, dict(run.trainer.model.named_parameters())
    assert not names.keys() <= load_file(base / "model.safetensors").keys()
    verdict = verify_checkpoint(base)
    assert [one.code for one in verdict.of_severity("error")] == [Code.WEIGHTS_NAMES]
    assert f"transformers {transformers.__version__} " in "".join(f"{one}" for one in verdict.findings)
    merge(base, tmp_path / "out", {1: source})
    assert verify_checkpoint(tmp_path / "out", deep=True).is_resumable
    found = load_file(tmp_path / "out" / "model.safetensors")
    missing = model.load_state_dict(found, strict=False).missing_keys
    assert not missing
    for name, param in names.items():
        step = 2 if re.search(r"(?<!vision_model\.encoder)\.layers\.1\.", name) else 4
        assert torch.equal(param, run.truth.at[step][name]["master"] if name in run.truth.at[4] else found[name])
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(param, names[name]) for name, param in loaded.named_parameters())


def test_a_bf16_model_gets_fp32_masters(tmp_path):
    root = train(tmp_path / "run", steps=2, dtype=torch.bfloat16).checkpoint(2)
    base = index_checkpoint(root, "ckpt")
    assert base.precision == "BF16"
    zero = convert(root, tmp_path / "zero", dtype="BF16", stage=3, world_size=2)
    index = index_checkpoint(zero)
    weights = load_file(root / "model.safetensors")
    moments = torch.load(root / "optimizer.pt", weights_only=True)["state"]
    names = [param for group in base.group_params for param in group]
    for number, name in enumerate(names):
        master = read(zero, index.held[State(name, MASTER)])
        assert master.dtype == torch.float32 and torch.equal(master, weights[name].float())
        for moment in MOMENTS:
            assert torch.equal(read(zero, index.held[State(name, moment)]), moments[number][moment].float())
