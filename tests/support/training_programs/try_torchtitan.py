#!/usr/bin/env python3
"""A rank of torchtitan's own trainer on a CPU: ``torchrun --nproc-per-node 2 try_torchtitan.py OUT``.

torchtitan knows accelerators only. Here it is told that the CPU is one; everything else is stock, apart from a tiny
model and a data loader that counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
torch.cpu.get_device_name = lambda device: "cpu"  # type: ignore[attr-defined]
torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 30)  # type: ignore[attr-defined]
torch.cpu.memory_stats = lambda device: {}  # type: ignore[attr-defined]
torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 wants a newer torch than 2.13
    torch.distributed.set_timeout = lambda *_: None
for name in ("reset_peak_memory_stats", "empty_cache"):
    setattr(torch.cpu, name, lambda *_: None)

from torchtitan import train  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager as Stock  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from llmtailor.integrations.torchtitan import CheckpointManager  # noqa: E402


def attention(self: Any, *heads: torch.Tensor, scale: float | None, enable_gqa: bool, **_: Any) -> torch.Tensor:
    q, k, v = (one.transpose(1, 2) for one in heads)
    found = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return found.transpose(1, 2)


FlexAttention.forward = attention  # on a CPU, FlexAttention has no backward pass
divide = FSDPModule.set_gradient_divide_factor


def sum_alone(module: Any, factor: float) -> None:
    divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


FSDPModule.set_gradient_divide_factor = sum_alone  # type: ignore[method-assign]
STEP_S = 0.1
"""Time enough to be killed"""


class Words(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.rank, self.shape, self.at = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.at += 1
            time.sleep(STEP_S)
            rows = torch.randint(2000, self.shape, generator=torch.Generator().manual_seed(self.at * 100 + self.rank))
            yield {"input": rows[:, :-1]}, rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def tiny() -> Trainer.Config:
    config = config_registry.llama3_debugmodel()
    config.dataloader, config.tokenizer = Words.Config(), Tokenizer.Config()
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.debug.seed = 0
    config.compile = CompileConfig(enable=False)
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"
    options = {"enable": True, "interval": 5, "keep_latest_k": 2, "last_save_model_only": False}
    config.checkpoint = Stock.Config(**options) if told.stock else CheckpointManager.Config(**options)
    return config


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out")
parser.add_argument("--stock", action="store_true", help="save with torchtitan's own manager")
told, rest = parser.parse_known_args()
sys.modules["try_torchtitan"] = sys.modules[__name__]
sys.argv[1:] = ["--module", "try_torchtitan", "--config", "tiny", "--dump-folder", told.out, *rest]

if __name__ == "__main__":
    train.main()
