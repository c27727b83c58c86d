"""Trains small byte-level Llamas and Mixtrals, the same way every time, and copies their states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from study.text import batch, held_out

LENGTH = 64
BATCH = 8
_HELD_OUT = 96


@dataclass(frozen=True)
class Size:
    """Of a Llama, or of a Mixtral if it has experts."""

    hidden: int
    layers: int
    inner: int
    experts: int = 0


@dataclass(frozen=True)
class Setting:
    """A training."""

    name: str
    size: Size
    text: str
    lr: float
    steps: int
    every: int
    """Steps between two saves"""
    crash: int
    """Step after which a training fails and goes on"""
    before: int = 0
    """Steps of training on ``sources`` that come before, at a constant learning rate"""
    bf16: bool = False
    """Whether the weights of each forward pass are masters rounded to bf16"""

    def looks(self) -> list[int]:
        """Return the saves at which composites are evaluated, without going on from them."""
        first, saves = self.steps // self.every // 4, self.steps // self.every
        return [self.every * save for save in range(first, saves, 3)]

    def shorter(self) -> Setting:
        """Return the same training with two saves' steps fewer, and a schedule to match."""
        return replace(self, steps=self.steps - 2 * self.every)


@dataclass(frozen=True)
class State:
    """Masters and moments at a step: param -> [weight, exp_avg, exp_avg_sq]."""

    step: int
    params: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Copies"""
    adam: Mapping[str, float]
    """Param -> Adam's step"""


def new_model(size: Size) -> LlamaForCausalLM | MixtralForCausalLM:
    """Return a new model; torch's seed decides its weights."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
    }
    if not size.experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    experts = {"num_local_experts": size.experts, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**sizes, **experts))


class Training:
    """A model, AdamW, and a schedule with warm-up and cosine."""

    def __init__(self, setting: Setting, seed: int, order: int | None = None) -> None:
        torch.manual_seed(seed)
        self.setting, self.order = setting, seed if order is None else order
        self.model = new_model(setting.size)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=setting.lr, betas=(0.9, 0.999), weight_decay=0.01
        )
        self.names = [name for name, _ in self.model.named_parameters()]
        self.step = 0
        self.is_reversed = False
        """Whether each batch is turned around, which changes nothing but the order of sums"""
        self._held_out = held_out(setting.text, _HELD_OUT, LENGTH)
        for step in range(setting.before):
            self._make("sources", 2e-3 * min(1.0, (step + 1) / 20), 7_000_000 + step)
        if setting.before:  # a new optimizer, as when a published model is trained further
            self.optimizer.state.clear()

    def run_to(self, step: int, at: Callable[[int], None] | None = None) -> None:
        """Train until a step; call ``at`` after each."""
        while self.step < step:
            warm, left = self.step / (0.05 * self.setting.steps), self.step / self.setting.steps
            rate = self.setting.lr * min(1.0, warm + 1e-2) * 0.5 * (1 + math.cos(math.pi * left))
            self._make(self.setting.text, rate, self.step)
            self.step += 1
            if at is not None:
                at(self.step)

    def _make(self, text: str, rate: float, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens = batch(text, BATCH, LENGTH, self.order, number)
        tokens = tokens.flip(0) if self.is_reversed else tokens
        with self._forward_weights():
            self.model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> float:
        """Return the held-out loss in nats per byte."""
        with torch.no_grad(), self._forward_weights():
            parts = self._held_out.split(48)
            return math.fsum(self.model(input_ids=one, labels=one).loss.item() for one in parts) / len(parts)

    def predictions(self) -> torch.Tensor:
        """Return the logarithms of the probabilities of held-out bytes."""
        with torch.no_grad(), self._forward_weights():
            parts = [self.model(input_ids=one).logits[:, :-1].double() for one in self._held_out.split(48)]
            return torch.cat(parts).log_softmax(-1)

    @contextmanager
    def _forward_weights(self) -> Iterator[None]:
        masters = [param.detach().clone() for param in self.model.parameters()] if self.setting.bf16 else []
        for param, master in zip(self.model.parameters(), masters, strict=False):
            param.data.copy_(master.bfloat16())
        yield
        for param, master in zip(self.model.parameters(), masters, strict=False):
            param.data.copy_(master)

    def state(self) -> State:
        """Return a copy of the state."""
        params, adam = {}, {}
        for name, param in self.model.named_parameters():
            kept = self.optimizer.state[param]
            params[name] = (param.detach().clone(), kept["exp_avg"].clone(), kept["exp_avg_sq"].clone())
            adam[name] = float(kept["step"])
        return State(self.step, params, adam)

    def load(self, state: State) -> None:
        """Continue from a state, as after a resume."""
        self.step = state.step
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                weight, mean, square = state.params[name]
                param.copy_(weight)
                self.optimizer.state[param] = {
                    "step": torch.tensor(state.adam[name]),
                    "exp_avg": mean.clone(),
                    "exp_avg_sq": square.clone(),
                }
