"""Parts of models that transformers itself builds and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers

from llmtailor.model.find_parts import find_parts_by_name
from llmtailor.model.parts import ModelStructure

TEXT: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CLIP: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]}


def names_of(model: Any) -> tuple[list[str], dict[str, str]]:
    first: dict[int, str] = {}
    tied = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in first:
            tied[name] = first[id(param)]
        first.setdefault(id(param), name)
    return [*first.values(), *(name for name, _ in model.named_buffers())], tied


def anatomy_of(model: Any, on_disk: list[str] | None = None) -> ModelStructure:
    names, tied = names_of(model)
    numels = {name: param.numel() for name, param in model.named_parameters()}
    return find_parts_by_name([*names, *(on_disk or [])], tied, numels)


# architecture, config, its arguments, tied, stack in memory
SAVED: list[tuple[str, str, dict[str, Any], bool, str]] = [
    ("MixtralForCausalLM", "MixtralConfig", {**TEXT, "num_local_experts": 2}, False, "model.layers"),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**TEXT, "num_experts": 2, "moe_intermediate_size": 8}, False,
     "model.layers"),
    ("Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
     {"text_config": {**TEXT, "rope_scaling": MROPE}, "vision_config": VISION}, False, "model.language_model.layers"),
    ("Gemma3ForConditionalGeneration", "Gemma3Config",
     {"text_config": TEXT, "vision_config": CLIP, "mm_tokens_per_image": 4}, True, "model.language_model.layers"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "config", "arguments", "tied", "stack"), SAVED, ids=[row[0] for row in SAVED])
def test_weights_on_disk_belong_to_the_parts_of_their_params(
    architecture: str, config: str, arguments: dict[str, Any], tied: bool, stack: str, tmp_path: Path
) -> None:
    """transformers saves fused experts one by one, and vision-language models under their older names."""
    model = getattr(transformers, architecture)(getattr(transformers, config)(**arguments))
    model.save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        on_disk = list(file.keys())
        numel_on_disk = {name: file.get_slice(name).get_shape() for name in on_disk}

    in_memory = names_of(model)[0]
    assert set(on_disk) - set(in_memory), "nothing is renamed any more: this case proves nothing"
    found = anatomy_of(model, on_disk)
    assert found.num_layers == 3
    assert found.tied is tied

    params = {name: param.numel() for name, param in model.named_parameters()}
    for part in found.parts:
        disk = sum(torch.Size(numel_on_disk[name]).numel() for name in found.names(part) if name in numel_on_disk)
        memory = sum(params[name] for name in found.names(part) if name in params)
        buffers_only = memory == 0 and disk == 0
        assert buffers_only or disk == memory, part
    assert {found.part_of[name] for name in params if name.startswith(f"{stack}.2.")} == {"layer 2"}
