"""Sizes of models, how ZeRO-3 lays them out (param groups, flat ids, slices), and the elements of every state."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch


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


DEFAULT_SUB_GROUP_SIZE = 10**9


@dataclass(frozen=True)
class FlatId:
    """One flat tensor per rank: the slices of these params, one after the other."""

    group: int
    params: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How ZeRO-3 lays out a model over the ranks."""

    shapes: dict[str, tuple[int, ...]]
    world_size: int
    weight_decay: tuple[float, ...]
    """Of each param group."""
    flat_ids: tuple[FlatId, ...]
    sub_group_size: int

    def numel(self, param: str) -> int:
        return math.prod(self.shapes[param])

    def part(self, param: str) -> int:
        """Return the elements of the slice that each rank holds, padding included."""
        return -(-self.numel(param) // self.world_size)

    def flat_numel(self, flat: FlatId) -> int:
        return sum(self.part(param) for param in flat.params)


def lay_out(
    shape: Shape, world_size: int, groups: str = "default", sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
) -> Layout:
    """Group the params as the Trainer does (``default``) or layer by layer (``layer``), and cut into sub-groups."""
    shapes = shape.params()
    grouped: dict[tuple[Any, ...], list[str]] = {}
    for name in shapes:
        decays = "norm" not in name
        if groups == "layer":
            words = name.split(".")
            number = int(words[2]) if words[1] == "layers" else -1
            # No-decay groups first; in each half the modules outside of layers by name, then the layers.
            key: tuple[Any, ...] = (decays, number, "" if number >= 0 else name)
        else:
            key = (not decays,)
        grouped.setdefault(key, []).append(name)
    ordered = [grouped[key] for key in sorted(grouped)]
    layout = Layout(
        shapes, world_size, tuple(0.0 if "norm" in names[0] else 0.1 for names in ordered), (), sub_group_size
    )
    flat_ids = []
    for group, names in enumerate(ordered):
        collected: list[str] = []
        whole = sum(map(layout.part, names)) <= sub_group_size
        for name in names:
            collected.append(name)
            if not whole and sum(map(layout.part, collected)) >= sub_group_size:
                flat_ids.append(FlatId(group, tuple(collected)))
                collected = []
        if collected:
            flat_ids.append(FlatId(group, tuple(collected)))
    return replace(layout, flat_ids=tuple(flat_ids))


class Values:
    """Pseudo-random elements of every state: a block of numbers, read from a place that depends on the state."""

    BLOCK = 1_000_003

    def __init__(self, step: int):
        self.step = step
        normal = np.random.default_rng(0).standard_normal(self.BLOCK).astype(np.float32)
        master = normal * np.float32(0.02)
        weight = torch.from_numpy(master).to(torch.bfloat16).view(torch.int16).numpy()
        # Each block twice in a row, so that any run of BLOCK elements is contiguous.
        self._blocks = {
            "master": np.tile(master, 2),
            "weight": np.tile(weight, 2),
            "exp_avg": np.tile(normal * np.float32(1e-3), 2),
            "exp_avg_sq": np.tile((normal * np.float32(1e-3)) ** 2, 2),
        }

    def stream(self, param: str, kind: str, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of elements ``begin``..``end``. A weight is its master, rounded to bf16."""
        seed = f"{self.step} {param} {'master' if kind == 'weight' else kind}"
        shift = zlib.crc32(seed.encode())
        block = self._blocks[kind]
        while begin < end:
            at = (begin + shift) % self.BLOCK
            num = min(end - begin, self.BLOCK)
            yield memoryview(block[at : at + num]).cast("B")
            begin += num


def flat_bytes(layout: Layout, flat: FlatId, kind: str, rank: int, values: Values) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor of one rank."""
    # DeepSpeed saves uninitialised memory behind the masters, and zeros behind the moments.
    padding = np.float32(1e31 if kind == "master" else 0).tobytes()
    for param in flat.params:
        part, numel = layout.part(param), layout.numel(param)
        begin, end = min(rank * part, numel), min((rank + 1) * part, numel)
        yield from values.stream(param, kind, begin, end)
        if end - begin < part:
            yield memoryview(padding * (part - (end - begin)))
