"""The shapes of models: names and sizes of their params, and what config.json says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What a config.json says of a model's size."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    rope_theta: float

    def params(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes in the order of ``model.named_parameters()``."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for number in range(self.num_layers):
            layer = {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
            }
            if self.model_type == "qwen3":
                layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
            layer |= {
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }
            shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def config(self) -> dict[str, Any]:
        """Return what config.json holds."""
        return {
            "architectures": [self.architecture],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": 2048,
            "model_type": self.model_type,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "transformers_version": "5.23.0",
            "use_cache": False,
            "vocab_size": self.vocab_size,
        }


LLAMA, QWEN3 = ("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")
SHAPES = {
    "tiny": Shape(*LLAMA, 64, 64, 128, 4, 4, 2, 16, tied=False, rope_theta=1e4),  # the model of demo_train.py
    "0.6b": Shape(*QWEN3, 151_936, 1024, 3072, 28, 16, 8, 128, tied=True, rope_theta=1e6),  # Qwen3-0.6B
    "1b": Shape(*LLAMA, 128_256, 2048, 8192, 16, 32, 8, 64, tied=True, rope_theta=5e5),  # Llama-3.2-1B
    "8b": Shape(*LLAMA, 128_256, 4096, 14_336, 32, 32, 8, 128, tied=False, rope_theta=5e5),  # Llama-3.1-8B
    "70b": Shape(*LLAMA, 128_256, 8192, 28_672, 80, 64, 8, 128, tied=False, rope_theta=5e5),  # Llama-3.1-70B
    "405b": Shape(*LLAMA, 128_256, 16_384, 53_248, 126, 128, 8, 128, tied=False, rope_theta=5e5),  # Llama-3.1-405B
}
