"""real/train.py with DeepSpeed's own loader of universal checkpoints switched on for resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainings import trainer as stock
from trainings.spec import Spec

config_of = stock.deepspeed_config


def deepspeed_config(spec: Spec) -> dict[str, Any]:
    return {**config_of(spec), "checkpoint": {"load_universal": spec.resume_from is not None}}


def main(specs_file: Path, folder: Path) -> None:
    stock.deepspeed_config = deepspeed_config
    stock.main(specs_file, folder)
