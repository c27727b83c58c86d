"""mergekit's architecture data: every causal language model that it knows is taken apart rightly."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmtailor.model import mergekit_data
from llmtailor.model.find_parts import find_parts, find_parts_by_name
from llmtailor.model.mergekit_data import architecture_hints
from llmtailor.model.parts import ModelStructure

SPEC = importlib.util.find_spec("mergekit")
FOLDER = Path(SPEC.submodule_search_locations[0], "_data", "architectures") if SPEC else Path()  # type: ignore[index]
pytestmark = pytest.mark.skipif(SPEC is None, reason="mergekit is not installed")

WRITES_TEXT = re.compile(r"CausalLM|LMHead|ConditionalGeneration|ChatGLM")
TEXT = ("default", "text_decoder", "decoder")
UNDECIDED_BY_NAMES = {"mixformer-sequential", "phi-msft"}
"""Model types whose parts names alone get wrong. For all other causal models they suffice."""
NORM = re.compile(r"norm|(^|[._])ln(_f)?[._]")


def definitions() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("*.json")):
        definition = json.loads(path.read_text(encoding="utf-8"))
        if WRITES_TEXT.search(definition["architectures"][0]):
            yield pytest.param(definition, id=path.stem)


def numbered(template: str, layer: int = 0) -> str:
    return template.replace("${layer_index}", str(layer)).replace("${num_layers}", "2")


def expected_parts(definition: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the names of a model with two layers, and the parts of those in its text model."""
    modules = definition.get("modules") or {"default": {"architecture": definition}}
    (text,) = (name for name in TEXT if name in modules)
    found: dict[str, str | None] = {}
    for name, module in modules.items():
        prefix = module.get("weight_prefix") or ""
        prefix += "." if prefix and not prefix.endswith(".") else ""  # mergekit forgot it for Whisper
        architecture = module["architecture"]
        for weight in architecture["pre_weights"]:
            embeds = name == text and "vocabulary_axis" in weight
            found[prefix + numbered(weight["name"])] = "embed_tokens" if embeds else None
        for layer in range(2):
            for weight in architecture["layer_templates"]["weights"]:
                found[prefix + numbered(weight["name"], layer)] = f"layer {layer}" if name == text else None
        for weight in architecture["post_weights"]:
            part = None
            if "vocabulary_axis" in weight:
                part = "lm_head"
            elif name == text and NORM.search(weight["name"]):
                part = "norm"
            found[prefix + numbered(weight["name"])] = part
    found.update({name: "norm" for name in found if name == "model.embedding_norm.weight"})  # LFM2 lists it in front
    return found


def right(found: ModelStructure, expected: Mapping[str, str | None]) -> bool:
    usual = ("embed_tokens", "norm", "lm_head")
    for name, part in expected.items():
        have = found.part_of[name]
        if part is not None and have != part:
            return False
        if part is None and (have in usual or have.startswith("layer ")):
            return False
    return found.num_layers == 2


@pytest.mark.parametrize("definition", list(definitions()))
def test_every_causal_model_is_taken_apart_rightly(definition: dict[str, Any]) -> None:
    expected = expected_parts(definition)
    assert list(expected.values()).count(None) < len(expected)
    assert right(find_parts([*expected], {}, {}, definition), expected)
    by_names = right(find_parts_by_name([*expected], {}, {}), expected)
    assert by_names is (definition["model_type"] not in UNDECIDED_BY_NAMES)


def test_phi2_before_its_renaming() -> None:
    """Both are called PhiForCausalLM; the model type tells them apart."""
    inside = ("ln.weight", "mixer.Wqkv.weight", "mlp.fc1.weight")
    names = ["transformer.embd.wte.weight", *(f"transformer.h.{at}.{tail}" for at in range(3) for tail in inside)]
    names += ["lm_head.ln.weight", "lm_head.ln.bias", "lm_head.linear.weight", "lm_head.linear.bias"]
    alone = find_parts_by_name(names, {}, {})
    assert "norm" not in alone.parts
    assert "lm_head" not in alone.parts
    config = {"architectures": ["PhiForCausalLM"], "model_type": "phi-msft"}
    found = find_parts(names, {}, {}, config)
    assert found.parts == ("embed_tokens", "layer 0", "layer 1", "layer 2", "norm", "lm_head")
    assert found.names("norm") == ["lm_head.ln.weight", "lm_head.ln.bias"]
    assert find_parts(names, {}, {}, config | {"model_type": "phi-3000"}) == alone


def test_berts_embeddings() -> None:
    names = ["bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight",
             "bert.embeddings.LayerNorm.weight", "bert.embeddings.position_ids",
             "bert.encoder.layer.0.attention.self.query.weight", "cls.predictions.bias",
             "cls.predictions.decoder.weight"]  # fmt: skip
    assert find_parts_by_name(names, {}, {}).names("embed_tokens") == ["bert.embeddings.position_ids"]
    tied = {"cls.predictions.decoder.weight": names[0]}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    assert set(find_parts(names, tied, {}, config).names("embed_tokens")) == {names[0], *names[-2:]}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_submodels_of_a_vision_language_model(prefix: str) -> None:
    """The data has the names on disk; in memory transformers puts model. in front."""
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"{prefix}visual.{tail}.weight" for tail in ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.attn.qkv",
                                                         "merger.ln_q", "merger.mlp.0", "merger.mlp.2")]  # fmt: skip
    config = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    assert find_parts(names, {}, {}, config).modules == {
        "text_decoder": ("embed_tokens", "layer 0", "norm", "lm_head"),
        "multi_modal_projector": ("visual.merger.ln_q", "visual.merger.mlp.0", "visual.merger.mlp.2"),
        "vision_tower": ("visual.patch_embed.proj", "visual.blocks.0", "visual.blocks.1"),
    }


LLAMA = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]


def test_nothing_is_read_when_names_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mergekit_data, "_files", lambda: pytest.fail("mergekit's files were looked up"))
    assert find_parts(LLAMA, {}, {}, {"architectures": ["LlamaForCausalLM"]}) == find_parts_by_name(LLAMA, {}, {})
    assert find_parts(LLAMA[:-1], {}, {}, None) == find_parts_by_name(LLAMA[:-1], {}, {})


def test_mergekit_is_not_imported() -> None:
    code = (
        "import sys; from llmtailor.model.mergekit_data import architecture_hints as hints\n"
        "assert hints({'architectures': ['LlamaForCausalLM'], 'model_type': 'llama'})\n"
        "assert not any(name.split('.')[0] in ('mergekit', 'torch', 'pydantic') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "config",
    [{}, {"architectures": None}, {"architectures": []}, {"architectures": [3]}, {"architectures": "LlamaForCausalLM"},
     {"architectures": ["NobodyKnowsThis"]}, {"architectures": ["PhiForCausalLM"]}],
)  # fmt: skip
def test_unknown_models(config: dict[str, Any]) -> None:
    assert architecture_hints(config) is None
    assert find_parts(LLAMA[1:], {}, {}, config) == find_parts_by_name(LLAMA[1:], {}, {})


def test_without_mergekit_names_have_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert architecture_hints({"architectures": ["LlamaForCausalLM"]}) is None


@pytest.mark.parametrize(
    "text",
    ['{"architectures": ["X"]', '["X"]', '{"architectures": ["X"], "pre_weights": [{}]}',
     '{"architectures": ["X"], "pre_weights": 3}', '{"architectures": ["X"], "kind": "modular", "modules": ["X"]}'],
)  # fmt: skip
def test_data_of_another_kind_is_as_good_as_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "y.json").write_bytes(b'"X" \xff')
    monkeypatch.setattr(mergekit_data, "_files", lambda: [tmp_path / "x.json", tmp_path / "y.json", tmp_path / "gone"])
    assert architecture_hints({"architectures": ["X"]}) is None


def test_the_older_spelling_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = {
        "model_type": "x",
        "architectures": ["X"],
        "pre_weights": [
            {"name": "tok.weight", "is_embed": True, "aliases": ["old.tok.weight"]},
            {"name": "pos.weight"},
        ],
        "layer_templates": {"weights": [{"name": "blocks.${layer_index}.attn.weight"}]},
        "post_weights": [{"name": "end_ln.weight"}, {"name": "out.weight", "is_embed": True}],
    }
    (tmp_path / "x.json").write_text(json.dumps(definition))
    monkeypatch.setattr(mergekit_data, "_files", lambda: [tmp_path / "x.json"])
    hints = architecture_hints({"architectures": ["X"]})
    assert hints is not None
    assert (hints.stack, hints.embed, hints.norm, hints.head) == (
        "blocks", ("tok.weight", "old.tok.weight"), ("end_ln.weight",), ("out.weight",)
    )  # fmt: skip
    assert hints.modules == {}
