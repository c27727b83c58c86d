"""A training loop in this process with a saver, and the truth about each step."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from llmtailor.engine import streams
from llmtailor.saving import PendingSave, saver_for


class Loop:
    """Trains a small Llama, or Mixtral if it has `num_experts`; `options` are those of `saver_for`.

    With ``teacher``, a frozen copy of the model follows it; it is updated where a test calls `update_teacher`.
    """

    def __init__(
        self,
        run: Path,
        *,
        hidden: int = 32,
        layers: int = 3,
        num_experts: int = 0,
        seed: int = 0,
        teacher: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        sizes = {
            "vocab_size": 64,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        moe = {"num_local_experts": num_experts, "num_experts_per_tok": 1, "experts_implementation": "eager"}
        self.run = run
        self.model: Any = (
            MixtralForCausalLM(MixtralConfig(**sizes, **moe)) if num_experts else LlamaForCausalLM(LlamaConfig(**sizes))
        )
        if teacher:
            self.model.teacher = copy.deepcopy(self.model.model).requires_grad_(False)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.saver = saver_for(run, model=self.model, optimizer=self.optimizer, scheduler=scheduler, **options)
        self.step = 0
        self.truth: dict[int, dict[str, dict[str, torch.Tensor]]] = {}

    def start(self, step: int = 0) -> Loop:
        self.step = step
        self.saver.start(step)
        return self

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            tokens = torch.randint(0, 64, (2, 8))
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        self.truth[self.step] = {
            name: {"master": param.detach().clone(), **copy.deepcopy(self.optimizer.state.get(param, {}))}
            for name, param in self.model.named_parameters()
        }

    @torch.no_grad()
    def update_teacher(self) -> None:
        """Let the teacher follow, as BYOL and DINO do; through ``.data``, whose writes torch does not count."""
        for mine, other in zip(self.model.teacher.parameters(), self.model.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)

    def teacher(self) -> dict[str, torch.Tensor]:
        return {f"teacher.{name}": one.detach().clone() for name, one in self.model.teacher.named_parameters()}

    def save(self, **more: Any) -> PendingSave | None:
        return self.saver.save(self.step, **more)

    @property
    def saves(self) -> list[int]:
        return [*self.saver.folder.complete()]

    def check(self, step: int, out: Path, held: Callable[[str], int] | None = None) -> None:
        """Compose a step, and demand of each param what it was at the step of its newest save."""
        from safetensors.torch import load_file

        from helpers.composing import compose

        compose(self.run, step, out=out)
        weights, optimizer = load_file(out / "model.safetensors"), torch.load(out / "optimizer.pt")
        names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
        for number, name in enumerate(names):
            truth = self.truth[held(name) if held else step][name]
            found = {"master": weights[name], **optimizer["state"][number]}
            assert found.keys() == truth.keys()
            assert all(torch.equal(found[kind], truth[kind]) for kind in truth if kind != "step"), (step, name)


class Disk:
    """The disk that savers write to, as a test wants it to be."""

    def __init__(self, monkeypatch: Any) -> None:
        self._write_all = streams.write_all
        self.pause_s = 0.0
        self.error: OSError | None = None
        self.is_free = threading.Event()
        self.is_free.set()
        monkeypatch.setattr(streams, "write_all", self.write)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        assert self.is_free.wait(60)
        time.sleep(self.pause_s)
        if self.error is not None:
            raise self.error
        self._write_all(fd, data)

    def hang(self) -> None:
        self.is_free.clear()

    def recover(self) -> None:
        self.error = None
        self.is_free.set()
