#!/usr/bin/env python3
"""What try_programs.py trains with Lightning: an epoch ends with each save, as data begin anew with an epoch."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from llmtailor.integrations.lightning import LightningPartialSaving, newest_checkpoint

WORDS, LENGTH, BATCH = 60, 12, 2
STEP_S = 0.05
"""Time enough to be killed"""


class Model(pl.LightningModule):
    def __init__(self, losses: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.words, self.layers = torch.nn.Embedding(WORDS, 32), torch.nn.TransformerEncoder(layer, 3)
        self.head, self.losses = torch.nn.Linear(32, WORDS), losses

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        scores = self.head(self.layers(self.words(batch[:, :-1])))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        with self.losses.open("a") as file:
            file.write(json.dumps({"step": self.global_step + 1, "loss": loss.item()}) + "\n")
        time.sleep(STEP_S)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-steps", type=int, required=True)
    parser.add_argument("--attached", action="store_true", help="save with llmtailor")
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    rows = [(at + torch.arange(LENGTH) * (1 + at % 3)) % WORDS for at in range(BATCH * told.save_steps)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=told.steps // told.save_steps,
        callbacks=[LightningPartialSaving("full", told.save_steps, output_dir=told.out)] if told.attached else [],
        enable_checkpointing=False,
        logger=False,
    )
    ckpt_path = newest_checkpoint(told.out) if told.attached else None
    trainer.fit(Model(told.out / "losses.jsonl"), torch.utils.data.DataLoader(rows, BATCH), ckpt_path=ckpt_path)


if __name__ == "__main__":
    main()
