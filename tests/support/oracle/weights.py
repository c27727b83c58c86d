"""What transformers makes of a model's params when it writes them to safetensors.

Since version 5, some architectures have other names in memory (and so in DeepSpeed's files) than on disk, and
MoE models keep the experts of a layer as one tensor in memory, but one by one on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State
from oracle.zero3 import Snapshot

FUSED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
EXPERTS = {
    "mixtral": ("{}.block_sparse_moe.experts.{}.{}.weight", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("{}.mlp.experts.{}.{}.weight", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
RENAMED = {"mixtral": (r"\.mlp\.gate\.", ".block_sparse_moe.gate."), "gpt_neox": (r"^lm_head\.", "embed_out.")}


def as_saved(params: Mapping[str, torch.Tensor], arch: str) -> dict[str, torch.Tensor]:
    """Return params under the names, and cut to the pieces, that the safetensors files have."""
    return {saved: tensor for name, param in params.items() for saved, tensor in _pieces(name, param, arch)}


def with_weights(snapshot: Snapshot, dtype: torch.dtype, arch: str) -> Snapshot:
    """Add what a ZeRO-3 run saves to safetensors, where it was told not to: the rounded masters, and all else."""
    params = {name: master.to(dtype) for name, master in snapshot.kind(MASTER).items()} | snapshot.kind(FROZEN)
    params |= {name: copies[0] for name, copies in snapshot.kind(BUFFER).items()}
    weights = {State(name, WEIGHT): tensor for name, tensor in as_saved(params, arch).items()}
    return Snapshot(snapshot.states | weights, snapshot.steps, snapshot.flat_ids, snapshot.rest)


def _pieces(name: str, param: torch.Tensor, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    fused = FUSED.fullmatch(name)
    if not fused or arch not in EXPERTS:
        yield re.sub(*RENAMED[arch], name) if arch in RENAMED else name, param
        return
    form, names = EXPERTS[arch]
    for number, expert in enumerate(param):
        parts = {"down": expert}
        if fused[2] == "gate_up_proj":
            parts = dict(zip(("gate", "up"), expert.chunk(2), strict=True))
        for part, tensor in parts.items():
            yield form.format(fused[1], number, names[part]), tensor
