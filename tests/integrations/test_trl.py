"""TRL's trainers are Trainers: ``attach`` saves parts, and a stock resume goes on from what is composed of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl: pip install trl")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from llmtailor.saving import attach
from llmtailor.verify.verify import verify_checkpoint
from thin.scene import call
from trainings.models import build, tokenizer

pytestmark = pytest.mark.real


def new_trainer(folder: Path) -> SFTTrainer:
    words = tokenizer()
    words.eos_token = words.pad_token = "w1"
    rows = [{"text": " ".join(f"w{(i + j * (1 + i % 3)) % 60}" for j in range(8))} for i in range(16)]
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        learning_rate=1e-2,
    )
    model = build("llama", 3, tied=False)
    return SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=words)


def losses(trainer: SFTTrainer) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


@pytest.mark.long  # llmtailor has no code of its own for TRL
def test_sft_goes_on_from_partial_checkpoints(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path / "run")
    attach(trainer, "full", save_steps=2)
    trainer.train()
    call("merge", "--run", tmp_path / "run", tmp_path / "out" / "checkpoint-2", "--at", 2)
    assert not verify_checkpoint(tmp_path / "out" / "checkpoint-2", deep=True).findings
    again = new_trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert losses(again) == losses(trainer) and len(losses(again)) == 4
