"""Sizes of models, how ZeRO-3 lays them out (param groups, flat ids, slices), and the elements of every state."""

from __future__ import annotations

import math
import re
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


@dataclass(frozen=True)
class DeepSeek(Shape):
    """A model with latent attention (MLA) whose layers have experts, but for the first ones."""

    q_rank: int
    kv_rank: int
    rope_dim: int
    num_experts: int
    expert_size: int
    first_experts: int
    """The first layer with experts"""

    def params(self) -> dict[str, tuple[int, ...]]:
        hidden, heads = self.hidden_size, self.num_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for number in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "self_attn.q_a_proj.weight": (self.q_rank, hidden),
                "self_attn.q_a_layernorm.weight": (self.q_rank,),
                "self_attn.q_b_proj.weight": (heads * (self.head_dim + self.rope_dim), self.q_rank),
                "self_attn.kv_a_proj_with_mqa.weight": (self.kv_rank + self.rope_dim, hidden),
                "self_attn.kv_a_layernorm.weight": (self.kv_rank,),
                "self_attn.kv_b_proj.weight": (2 * heads * self.head_dim, self.kv_rank),
                "self_attn.o_proj.weight": (hidden, heads * self.head_dim),
            }
            inside, inner = "mlp", self.intermediate_size
            if number >= self.first_experts:
                inside, inner = "mlp.shared_experts", self.expert_size
                layer |= {
                    "mlp.experts.gate_up_proj": (self.num_experts, 2 * inner, hidden),
                    "mlp.experts.down_proj": (self.num_experts, hidden, inner),
                    "mlp.gate.weight": (self.num_experts, hidden),
                }
            layer |= {
                f"{inside}.gate_proj.weight": (inner, hidden),
                f"{inside}.up_proj.weight": (inner, hidden),
                f"{inside}.down_proj.weight": (hidden, inner),
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
            }
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (self.vocab_size, hidden)}

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "first_k_dense_replace": self.first_experts,
            "kv_lora_rank": self.kv_rank,
            "moe_intermediate_size": self.expert_size,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "q_lora_rank": self.q_rank,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.head_dim,
        }


LLAMA, QWEN3 = ("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")
SHAPES: dict[str, Shape] = {
    "tiny": Shape(*LLAMA, 64, 64, 128, 4, 4, 2, 16, tied=False, rope_theta=1e4),  # the model of demo_train.py
    "0.6b": Shape(*QWEN3, 151_936, 1024, 3072, 28, 16, 8, 128, tied=True, rope_theta=1e6),  # Qwen3-0.6B
    "1b": Shape(*LLAMA, 128_256, 2048, 8192, 16, 32, 8, 64, tied=True, rope_theta=5e5),  # Llama-3.2-1B
    "8b": Shape(*LLAMA, 128_256, 4096, 14_336, 32, 32, 8, 128, tied=False, rope_theta=5e5),  # Llama-3.1-8B
    "70b": Shape(*LLAMA, 128_256, 8192, 28_672, 80, 64, 8, 128, tied=False, rope_theta=5e5),  # Llama-3.1-70B
    "405b": Shape(*LLAMA, 128_256, 16_384, 53_248, 126, 128, 8, 128, tied=False, rope_theta=5e5),  # Llama-3.1-405B
    "671b": DeepSeek(  # DeepSeek-V3, without the buffers of its routers
        *("deepseek_v3", "DeepseekV3ForCausalLM"),
        *(129_280, 7168, 18_432, 61, 128, 128, 128),
        tied=False,
        rope_theta=1e4,
        q_rank=1536,
        kv_rank=512,
        rope_dim=64,
        num_experts=256,
        expert_size=2048,
        first_experts=3,
    ),
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
    tp: int = 1
    """Tensor-parallel ranks; they share ``world_size``"""

    def of_tp_rank(self, rank: int) -> Layout:
        """Return the layout of one tensor-parallel rank's files."""
        shapes = {name: shard_of(name, shape, self.tp, rank)[0] for name, shape in self.shapes.items()}
        return replace(self, shapes=shapes, world_size=self.world_size // self.tp, tp=1)

    def numel(self, param: str) -> int:
        return math.prod(self.shapes[param])

    def part(self, param: str) -> int:
        """Return the elements of the slice that each rank holds, padding included."""
        return -(-self.numel(param) // self.world_size)

    def flat_numel(self, flat: FlatId) -> int:
        return sum(self.part(param) for param in flat.params)


_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj")
_COLUMNS = ("o_proj", "down_proj")
Pieces = list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def shard_of(name: str, shape: tuple[int, ...], tp: int, rank: int) -> tuple[tuple[int, ...], Pieces]:
    """Return the shape of a tensor-parallel rank's shard, and its boxes: where each begins in the full tensor and in
    the shard, and its sizes. AutoTP cuts linear layers, so fused experts are whole."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    none = (0,) * len(shape)
    if tp == 1 or module not in (*_ROWS, *_COLUMNS) or len(shape) != 2:
        return shape, [(none, none, shape)]
    at = int(module in _COLUMNS)
    sizes = (*shape[:at], shape[at] // tp, *shape[at + 1 :])
    return sizes, [((*none[:at], sizes[at] * rank, *none[at + 1 :]), none, sizes)]


def affine_map(layout: Layout) -> dict[str, Any]:
    """Return DeepSpeed's map of the shards of all tensor-parallel ranks."""

    def view(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        return sum(map(math.prod, zip(offsets, strides, strict=True))), strides

    params = {}
    for name, shape in layout.shapes.items():
        ranks = {}
        for rank in range(layout.tp):
            own, pieces = shard_of(name, shape, layout.tp, rank)
            locations = [*range(layout.tp)] if own == shape else [rank]
            listed = [
                {"shape": sizes, "source": view(there, shape), "dest": view(here, own), "locations": locations}
                for there, here, sizes in pieces
            ]
            ranks[rank] = {"shard_shape": own, "pieces": listed}
        params[f"^{re.escape(name)}$"] = {"logical_shape": shape, "ranks": ranks}
    return params


def lay_out(
    shape: Shape, world_size: int, groups: str = "default", sub_group_size: int = DEFAULT_SUB_GROUP_SIZE, tp: int = 1
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
    decay = tuple(0.0 if "norm" in names[0] else 0.1 for names in ordered)
    full = Layout(shapes, world_size, decay, (), sub_group_size, tp)
    layout = full.of_tp_rank(0)
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
    return replace(full, flat_ids=tuple(flat_ids))


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
