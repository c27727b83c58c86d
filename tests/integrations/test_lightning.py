"""The callback of Lightning, on one device in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from llmtailor.errors import UnsupportedCheckpoint  # noqa: E402
from llmtailor.formats.provenance import stated_attempt  # noqa: E402
from llmtailor.integrations.lightning import LightningPartialSaving, _is_first, newest_checkpoint  # noqa: E402
from llmtailor.runs.folder import RunFolder  # noqa: E402
from trainings.models import build  # noqa: E402

pytestmark = pytest.mark.real
EPOCH_STEPS = 2


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.fails_at = build("llama", 3, tied=True), fails_at

    def training_step(self, batch: Any, number: int) -> Any:
        if self.fails_at and self.global_step >= self.fails_at:
            raise ZeroDivisionError
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> Any:
    return torch.utils.data.DataLoader([torch.arange(8) + at for at in range(2 * EPOCH_STEPS)], batch_size=2)


def new_trainer(run: Path, epochs: int, *callbacks: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[LightningPartialSaving("full", 1, output_dir=run), *callbacks],
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def saves(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "partial").iterdir() if path.name.startswith("step-"))


def test_an_optimizer_that_can_not_be_saved_is_refused_at_the_first_step(tmp_path: Path) -> None:
    class Lists(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["GG"] = [torch.zeros_like(param)]
            return loss

    class Descent(Module):
        def configure_optimizers(self) -> Any:
            return Lists(self.parameters(), lr=1e-3)

    trainer = new_trainer(tmp_path, 2)
    trainer.callbacks[0].save_steps = 3
    with pytest.raises(UnsupportedCheckpoint, match=r"the optimizer Lists: its state GG of .* is neither"):
        trainer.fit(Descent(), loader())
    assert trainer.global_step == 1


@pytest.mark.parametrize("fails_at", [0, 3])
def test_what_lightning_saves_after_the_training_states_its_attempt(fails_at: int, tmp_path: Path) -> None:
    own = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_on_exception=True, every_n_epochs=9, save_top_k=1)
    trainer = new_trainer(tmp_path, 2, own)
    if fails_at:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(Module(fails_at), loader())
    else:
        trainer.fit(Module(), loader())
    stated = stated_attempt(tmp_path / "last.ckpt")
    newest = stated_attempt(RunFolder(tmp_path).at(fails_at or 4))
    assert stated is not None and stated == newest


def test_a_second_fit_goes_on_with_the_attempt(tmp_path: Path) -> None:
    new_trainer(tmp_path, 1).fit(Module(), loader())
    trainer = new_trainer(tmp_path, 2)
    trainer.fit(Module(), loader(), ckpt_path=newest_checkpoint(tmp_path))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(trainer.lightning_module, loader())
    assert trainer.global_step == 6 and saves(tmp_path) == [f"step-{step:08}" for step in range(1, 7)]
    assert [past.step for past in RunFolder(tmp_path).attempts()] == [0, 2, 4]
    (again := new_trainer(tmp_path, 4)).fit(Module(), loader(), ckpt_path=tmp_path / "checkpoint-2" / "checkpoint.ckpt")
    assert again.global_step == 8 and "step-00000003.abandoned" in saves(tmp_path)


@pytest.mark.parametrize(
    ("environ", "is_first"),
    [
        ({}, True),
        ({"NODE_RANK": "0"}, True),
        ({"NODE_RANK": "1"}, False),
        ({"GROUP_RANK": "2"}, False),
        ({"RANK": "0", "NODE_RANK": "1"}, True),  # torchrun's ranks need not follow those of the nodes
        ({"SLURM_PROCID": "0", "NODE_RANK": "1"}, True),
    ],
)
def test_only_the_first_node_composes(environ: dict[str, str], is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _is_first() == is_first


def test_several_batches_of_one_step_are_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(LightningPartialSaving, "_save", lambda self, step: steps.append(step))
    trainer = new_trainer(tmp_path / "run", 2)
    trainer.accumulate_grad_batches = 2
    trainer.fit(Module(), loader())
    assert steps == [1, 2]
