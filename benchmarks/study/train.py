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
    optimizer: str = "adamw"
    """``adamw``; ``lion``; or ``muon``, for the matrices of layers, with AdamW for the rest"""

    def looks(self) -> list[int]:
        """Return the saves at which composites are evaluated, without going on from them."""
        first, saves = self.steps // self.every // 4, self.steps // self.every
        return [self.every * save for save in range(first, saves, 3)]

    def shorter(self) -> Setting:
        """Return the same training with two saves' steps fewer, and a schedule to match."""
        return replace(self, steps=self.steps - 2 * self.every)


@dataclass(frozen=True)
class State:
    """Masters and moments at a step: param -> [weight, exp_avg or momentum, exp_avg_sq or zeros]."""

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


class Lion(torch.optim.Optimizer):
    """X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, with its default betas."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * 0.01).sub_((0.9 * momentum + 0.1 * param.grad).sign_(), alpha=group["lr"])
                momentum.mul_(0.99).add_(param.grad, alpha=0.01)


def new_optimizers(setting: Setting, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    params = [*model.parameters()]
    if setting.optimizer == "lion":
        return [Lion(params, {"lr": setting.lr})]
    matrices = [one for name, one in model.named_parameters() if ".layers." in name and one.dim() == 2]
    matrices = matrices if setting.optimizer == "muon" else []
    rest = [param for param in params if not any(param is one for one in matrices)]
    adamw = torch.optim.AdamW(rest, lr=setting.lr, betas=(0.9, 0.999), weight_decay=0.01)
    return [adamw, *([torch.optim.Muon(matrices, setting.lr, adjust_lr_fn="match_rms_adamw")] if matrices else [])]


class Training:
    """A model, its optimizers, and a schedule with warm-up and cosine."""

    def __init__(self, setting: Setting, seed: int, order: int | None = None) -> None:
        torch.manual_seed(seed)
        self.setting, self.order = setting, seed if order is None else order
        self.model = new_model(setting.size)
        self.optimizers = new_optimizers(setting, self.model)
        self.optimizer = self.optimizers[0]
        """The only one, but for Muon"""
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
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        tokens = batch(text, BATCH, LENGTH, self.order, number)
        tokens = tokens.flip(0) if self.is_reversed else tokens
        with self._forward_weights():
            self.model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

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
            kept = self._state_of(param)
            mean = kept["momentum_buffer" if "momentum_buffer" in kept else "exp_avg"].clone()
            square = kept["exp_avg_sq"].clone() if "exp_avg_sq" in kept else torch.zeros_like(mean)
            params[name] = (param.detach().clone(), mean, square)
            adam[name] = float(kept.get("step", self.step))
        return State(self.step, params, adam)

    def load(self, state: State) -> None:
        """Continue from a state, as after a resume."""
        self.step = state.step
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                weight, mean, square = state.params[name]
                param.copy_(weight)
                values = {"exp_avg": mean, "momentum_buffer": mean, "exp_avg_sq": square}
                kept = self._state_of(param)
                kept |= {kind: value.clone() for kind, value in values.items() if kind in kept}
                if "step" in kept:
                    kept["step"] = torch.tensor(state.adam[name])

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return next(one.state[param] for one in self.optimizers if param in one.state)
