"""Tiny models of many kinds. Sizes are odd on purpose: nothing divides by 2 or 3, so every rank has padding."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GQA = {
    **COMMON,
    "hidden_size": 25,
    "intermediate_size": 35,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
EAGER = {"experts_implementation": "eager"}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA),
    # its matrices have at least 4096 elements, from where optimizers with 8-bit states quantize them
    "wide": (
        "Llama",
        {**COMMON, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    # tensor parallelism of two ranks deals it unevenly: 4 and 2 heads
    "heads": (
        "Llama",
        {
            **COMMON,
            "hidden_size": 24,
            "intermediate_size": 26,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "attention_bias": True,
        },
    ),
    # gate and up are one weight, and so are queries, keys and values
    "phi3": (
        "Phi3",
        {**COMMON, "hidden_size": 24, "intermediate_size": 26, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", GQA),
    "mistral": ("Mistral", GQA),
    "gemma": ("Gemma", GQA),
    "gpt2": ("GPT2", {**COMMON, "n_embd": 25, "n_head": 5, "n_inner": 35, "n_positions": 32}),
    "gpt_neox": (
        "GPTNeoX",
        {**COMMON, "hidden_size": 25, "intermediate_size": 35, "num_attention_heads": 5, "rotary_pct": 0.8},
    ),
    "mixtral": ("Mixtral", {**GQA, **EAGER, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **GQA,
            **EAGER,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7,
            "mlp_only_layers": [0],
        },
    ),
}
"""arch -> class prefix, config values"""

HEADLESS = {"gpt2": "GPT2LMHeadModel"}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout")


def build(arch: str, layers: int, tied: bool) -> Any:
    prefix, values = CONFIGS[arch]
    config = getattr(transformers, f"{prefix}Config")(
        **values, **{"n_layer" if arch == "gpt2" else "num_hidden_layers": layers}, tie_word_embeddings=tied
    )
    for dropout in DROPOUTS:
        if getattr(config, dropout, None):
            setattr(config, dropout, 0.0)
    return getattr(transformers, HEADLESS.get(arch, f"{prefix}ForCausalLM"))(config)


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(VOCAB)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0", pad_token="w2"
    )


def add_extras(model: nn.Module) -> None:
    """Give every MLP a param smaller than any world size, and persistent buffers that count forward passes."""

    def use(mlp: Any, _args: object, output: torch.Tensor) -> Any:
        if mlp.training:
            mlp.seen += 1
            mlp.mean += output.detach().mean().to(mlp.mean.dtype)
        return output * mlp.gate

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.gate = nn.Parameter(torch.ones(1))
            module.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            module.register_buffer("mean", torch.zeros(5))
            module.register_forward_hook(use)


def layer_groups(model: nn.Module, decayed: set[str], weight_decay: float) -> list[dict[str, Any]]:
    """LLMTailor's groups: without decay first; in each half what is outside the layers by name, then the layers."""
    groups: dict[tuple[bool, int, str], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
            key = (name in decayed, int(layer[1]) if layer else -1, "" if layer else name)
            groups.setdefault(key, []).append(param)
    return [
        {"params": groups[key], "weight_decay": weight_decay if key[0] else 0.0, "layer": key[1]}
        for key in sorted(groups)
    ]
