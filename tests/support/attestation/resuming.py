"""Resumes with a fault, and what attest finds."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from transformers import Trainer

from llmtailor.saving import AttestResume
from trainings.alone import Alone

STEP = 2
ATTACHED = {"policy": "full", "save_steps": 4, "on_mismatch": "warn"}


class Keeping(AttestResume):
    """Keeps what was found."""

    found = None

    def _say(self, found, *_):
        self.found = found


def found_by(checkpoint, change=lambda trainer: None, how="sample", kind=Trainer, **made):
    """Resume, change what was loaded, and return what is found."""

    class Changed(kind):
        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            change(self)

    keeping = Keeping(how)
    Alone(checkpoint.parents[1] / "again", kind=Changed, callbacks=(keeping,), **made).train(checkpoint)
    assert keeping.found is not None
    return keeping.found


class NoOptimizer(Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint):
        pass


class NoRandom(Trainer):
    def _load_rng_state(self, checkpoint):
        torch.rand(3)


class Two(torch.nn.Module):
    def __init__(self, rows=16, columns=8):
        super().__init__()
        self.one = torch.nn.Linear(columns, rows, bias=False)
        self.other = torch.nn.Linear(4, 4)


def loop(model, kind=torch.optim.AdamW):
    """Return what accelerate has prepared: model, optimizer, scheduler and accelerator."""
    optimizer = kind(model.parameters(), lr=1e-2)
    accelerator = Accelerator(cpu=True)
    return *accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ), accelerator  # fmt: skip


def step(model, optimizer, scale=1.0):
    for param in model.parameters():
        param.grad = torch.randn_like(param) * scale
    optimizer.step()
