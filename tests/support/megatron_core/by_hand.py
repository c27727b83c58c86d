"""A model's states under Hugging Face names, and the folder that Megatron-core would save of them: fused by hand."""

from __future__ import annotations

import argparse
import enum
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import planner

LAYERS, HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, EXPERTS = 3, 4, 2, 2, 6, 5, 3
VOCAB, PADDED = 11, 14
KINDS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    arch: str = "llama"
    is_tied: bool = False
    is_stacked: bool = True
    step: float = 3.0
    seed: int = 0
    rank_files: int = 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As transformers names the params, in its order."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
        rows = {"q": HEADS * HEAD_DIM, "k": GROUPS * HEAD_DIM, "v": GROUPS * HEAD_DIM}
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            for one, size in rows.items():
                shapes[f"{at}self_attn.{one}_proj.weight"] = (size, HIDDEN)
                if self.arch == "qwen2":
                    shapes[f"{at}self_attn.{one}_proj.bias"] = (size,)
            shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
            if self.arch == "qwen3":
                shapes |= {f"{at}self_attn.{one}_norm.weight": (HEAD_DIM,) for one in "qk"}
            if self.arch == "mixtral":
                shapes[f"{at}mlp.gate.weight"] = (EXPERTS, HIDDEN)
                shapes[f"{at}mlp.experts.gate_up_proj"] = (EXPERTS, 2 * FFN, HIDDEN)
                shapes[f"{at}mlp.experts.down_proj"] = (EXPERTS, HIDDEN, FFN)
            else:
                shapes |= {f"{at}mlp.{one}_proj.weight": (FFN, HIDDEN) for one in ("gate", "up")}
                shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, FFN)
            shapes |= {f"{at}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes["model.norm.weight"] = (HIDDEN,)
        return shapes if self.is_tied else shapes | {"lm_head.weight": (VOCAB, HIDDEN)}

    def states(self) -> dict[str, Tensors]:
        """Kind -> param -> values, which differ everywhere."""
        made = torch.Generator().manual_seed(self.seed)
        masters = {name: torch.randn(shape, generator=made) for name, shape in self.shapes().items()}
        moments = {
            kind: {name: torch.rand(one.shape, generator=made) for name, one in masters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        weights = {name: one.bfloat16() for name, one in masters.items()}
        return {"weight": weights, "master": masters, **moments}


def fuse(model: Model, values: Mapping[str, torch.Tensor], padding: float) -> Tensors:
    """Return Megatron's tensors of one kind of state."""
    fill = lambda one: torch.cat([one, one.new_full((PADDED - VOCAB, HIDDEN), padding)])  # noqa: E731
    fused = {
        "embedding.word_embeddings.weight": fill(values["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": values["model.norm.weight"],
    }
    if not model.is_tied:
        fused["output_layer.weight"] = fill(values["lm_head.weight"])
    layers = [dict(_layer(model, values, f"model.layers.{layer}.")) for layer in range(LAYERS)]
    for name in layers[0]:
        if model.is_stacked:
            fused[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            fused |= {f"decoder.layers.{at}.{name}": layer[name] for at, layer in enumerate(layers)}
    return fused


def _layer(model: Model, values: Mapping[str, torch.Tensor], at: str) -> Iterator[tuple[str, torch.Tensor]]:
    for word in ("weight", "bias") if model.arch == "qwen2" else ("weight",):
        q, k, v = (values[f"{at}self_attn.{one}_proj.{word}"].chunk(GROUPS) for one in "qkv")
        yield (
            f"self_attention.linear_qkv.{word}",
            torch.cat([one for each in zip(q, k, v, strict=True) for one in each]),
        )
    yield "self_attention.linear_proj.weight", values[f"{at}self_attn.o_proj.weight"]
    for one in "qk" if model.arch == "qwen3" else "":
        yield f"self_attention.{one}_layernorm.weight", values[f"{at}self_attn.{one}_norm.weight"]
    yield "self_attention.linear_qkv.layer_norm_weight", values[f"{at}input_layernorm.weight"]
    norm = values[f"{at}post_attention_layernorm.weight"]
    if model.arch == "mixtral":
        yield "pre_mlp_layernorm.weight", norm
        yield "mlp.router.weight", values[f"{at}mlp.gate.weight"]
        yield "mlp.experts.experts.linear_fc1.weight", values[f"{at}mlp.experts.gate_up_proj"]
        yield "mlp.experts.experts.linear_fc2.weight", values[f"{at}mlp.experts.down_proj"]
    else:
        yield "mlp.linear_fc1.layer_norm_weight", norm
        halves = [values[f"{at}mlp.{one}_proj.weight"] for one in ("gate", "up")]
        yield "mlp.linear_fc1.weight", torch.cat(halves)
        yield "mlp.linear_fc2.weight", values[f"{at}mlp.down_proj.weight"]


class AttnBackend(enum.Enum):
    """Stands for the classes of Megatron that its args name."""

    auto = 5


def save(model: Model, folder: Path, **args: Any) -> Path:
    """Save what Megatron-core 0.16.1 saves of a model, through torch's own planner and writer."""
    content: dict[str, Any] = {}
    for kind, values in model.states().items():
        prefix = "" if kind == "weight" else f"optimizer.state.{KINDS[kind]}."
        content |= {prefix + key: one for key, one in fuse(model, values, padding=0.5).items()}
    content["rng_state/shard_0.0_1.1"] = [{"random_rng_state": (3, (1, 2), None)}]
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=model.rank_files)
    dcp.save(content, storage_writer=writer, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = None
    metadata.all_local_plans = [
        planner.SavePlan([planner.WriteItem(key, planner.WriteItemType.TENSOR) for key in "ab"])
    ]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    group = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": model.step, "lr_mult": 1.0}
    group |= {"is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 0.01, "min_lr": None, "wd_mult": 1.0}
    known: dict[str, Any] = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "group_query_attention": True}
    known |= {"vocab_size": VOCAB, "world_size": 4, "consumed_train_samples": 24, "attention_backend": AttnBackend.auto}
    common = {
        "args": argparse.Namespace(**{**known, **args}),
        "iteration": int(model.step),
        "optimizer": {
            "optimizer": {"param_groups": [group, {**group, "weight_decay": 0.0, "wd_mult": 0.0}]},
            "param_state_sharding_type": "fully_reshardable",
        },
        "opt_param_scheduler": {"num_steps": 24},
    }
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def load(folder: Path) -> dict[str, Any]:
    """Read all of a folder with torch's own loader."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    content = {
        key: torch.empty(about.size, dtype=about.properties.dtype) if hasattr(about, "size") else None
        for key, about in found.items()
    }
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    return content


def config(model: Model) -> str:
    known = {"model_type": model.arch, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCAB}
    return json.dumps(known)
