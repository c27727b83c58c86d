"""Trainings with Lightning's Trainer, on CPU ranks. What saves and loads is stock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from llmtailor.integrations.lightning import LightningAttestResume, LightningPartialSaving, newest_checkpoint
from trainings.common import DECAY, RATE, Losses, Tokens, die, train_each
from trainings.models import build
from trainings.optimizers import IN_LOOPS
from trainings.spec import NEWEST, Lightning

EPOCH_STEPS = 2


class OnCpu(CUDAAccelerator):  # type: ignore[misc]
    """Lightning's DeepSpeedStrategy insists on this class; DeepSpeed itself runs on the CPU."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: pl.Trainer) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu", number) for number in range(devices)]

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "cpu"


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, spec: Lightning) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": RATE, "groups": spec.groups})
        self.spec = spec
        self.losses: dict[int, float] = {}
        torch.manual_seed(0)
        self.model = build("llama", spec.layers, tied=not spec.stage)
        if spec.norm:
            self.scale = torch.nn.BatchNorm1d(1)
            self.fixed = torch.nn.Parameter(torch.arange(5.0), requires_grad=False)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        if self.spec.norm:
            loss = loss + 0.1 * (self.scale(batch.float().mean(1, keepdim=True)) - 1).square().mean()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        self.losses[self.global_step + 1] = float(mean / dist.get_world_size())
        return loss

    def configure_optimizers(self) -> Any:
        params: Any = [param for param in self.parameters() if param.requires_grad]
        if self.spec.groups == 2:
            is_vector = lambda param: len(getattr(param, "ds_shape", param.shape)) < 2  # noqa: E731
            vectors = [param for param in params if is_vector(param)]
            params = [{"params": [param for param in params if not is_vector(param)]},
                      {"params": vectors, "weight_decay": 0.0}]  # fmt: skip
        optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)
        if made := IN_LOOPS.get(self.spec.optimizer):
            assert made.make
            optimizer = made.make(self)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Dying(pl.Callback):  # type: ignore[misc]
    def __init__(self, spec: Lightning) -> None:
        self.spec = spec

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.spec.dies_at:
            die()


class Faulty(pl.Callback):  # type: ignore[misc]
    """Spoils what Lightning loads."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.fault == "schedule":
            checkpoint["lr_schedulers"][0]["last_epoch"] = 0
        elif self.fault == "moments":
            for state in checkpoint["optimizer_states"][0]["state"].values():
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        else:  # the weights are loaded already
            for name, param in module.named_parameters():
                if "mlp" in name:
                    param.data += 0.01


def new_strategy(spec: Lightning) -> Any:
    if not spec.stage:
        return DDPStrategy(process_group_backend="gloo")
    config = {
        "zero_optimization": {"stage": spec.stage},
        "train_micro_batch_size_per_gpu": spec.per_device_batch,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return DeepSpeedStrategy(config=config, process_group_backend="gloo")


def run(spec: Lightning, folder: Path) -> Losses:
    world_size, out = dist.get_world_size(), folder / spec.name
    rows = spec.per_device_batch * world_size * EPOCH_STEPS
    data = [Tokens()[at]["input_ids"] for at in range(rows)]
    callbacks: list[Any] = [ModelCheckpoint(dirpath=out, every_n_train_steps=EPOCH_STEPS, save_top_k=-1)]
    if spec.saver:
        callbacks.append(
            LightningPartialSaving(spec.saver, 1, output_dir=out, on_mismatch="warn" if spec.fault else "stop")
        )
    callbacks.append(Faulty(spec.fault) if spec.fault else LightningAttestResume(on_mismatch="stop"))
    if spec.dies_at:
        callbacks.append(Dying(spec))
    module = Module(spec)
    trainer = pl.Trainer(
        accelerator=OnCpu() if spec.stage else "cpu",
        strategy=new_strategy(spec),
        devices=world_size,
        plugins=[LightningEnvironment()],
        max_epochs=spec.steps // EPOCH_STEPS,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=spec.per_device_batch)
    ckpt_path = spec.resume_from
    if ckpt_path == NEWEST:
        ckpt_path = newest_checkpoint(out, world_size if spec.stage else None)
        assert ckpt_path is not None
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    os.environ["WORLD_SIZE"] = str(world_size)  # Lightning has removed it
    return module.losses


def main(specs_file: Path, folder: Path) -> None:
    train_each(specs_file, folder, run)
