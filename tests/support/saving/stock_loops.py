"""What ranks do in the tests of stock checkpoints that are saved in the background.

``start_ranks("saving.stock_loops", [NAME, FOLDER], ...)`` calls the function of that name.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from transformers import default_data_collator

from llmtailor.background.snapshot import Snapshot
from llmtailor.copying import streams
from llmtailor.saving import SavingOptions, attach, attach_engine
from llmtailor.stock_saving.saver import StockSaver
from saving.processes import ended, forked, slowly
from trainings.common import Logs, Tokens, arguments_of, new_model
from trainings.fsdp import FORMS, CpuTrainer
from trainings.fsdp import new_model as fsdp_model
from trainings.spec import Fsdp, Spec
from trainings.trainer import arguments, new_trainer

WIDTH = 64
write_all, copy_piece, wait = streams.write_all, Snapshot._copy, Snapshot.wait


def model() -> torch.nn.Module:
    """Trained and frozen params, tied ones and a buffer"""
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    made[1].weight = made[0].weight
    made[3].requires_grad_(False)
    made.register_buffer("counts", torch.arange(9.0))
    return made


def engine(stage: int, **config: Any) -> Any:
    made = model()
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    zero = {"stage": stage, "sub_group_size": 3 * WIDTH**2}
    given = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, **config}
    if stage != 2:
        given["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=made, model_parameters=[*made.parameters()], config=given)[0]


def steps(trained: Any, begin: int, end: int) -> list[float]:
    losses, dtype = [], next(trained.module.parameters()).dtype
    for step in range(begin, end):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = trained(torch.randn(2, WIDTH, dtype=dtype)).square().mean()
        trained.backward(loss)
        trained.step()
        losses.append(loss.item())
    return losses


@contextmanager
def late() -> Iterator[threading.Event]:
    """Copy no earlier than an optimizer's step demands, and write nothing before the event is set."""
    is_asked, may_write = threading.Event(), threading.Event()
    Snapshot._copy = lambda *given: (is_asked.wait(60), copy_piece(*given))[-1]
    Snapshot.wait = lambda *given: (is_asked.set(), wait(*given))[-1]
    streams.write_all = lambda *given: (may_write.wait(60), write_all(*given))[-1]
    yield may_write
    Snapshot._copy, Snapshot.wait, streams.write_all = copy_piece, wait, write_all


def engines(folder: Path, *stages: str) -> None:
    """Save a step in both ways, go on while it is written, and resume from the second one."""
    found = {}
    for stage in map(int, stages):
        first = engine(stage, llmtailor={"layout": "stock", "host_buffer": 1 << 20})
        needed = attach_engine(first)._needed()[0]  # before there are moments
        first.checkpoint_engine.detach()
        steps(first, 0, 2)
        client = {"numbers": torch.arange(5000.0), "name": "x"}
        first.save_checkpoint(folder / f"{stage}" / "stock", client_state=client)
        saver = attach_engine(first)
        with late() as may_write:
            first.save_checkpoint(folder / f"{stage}" / "lazy", client_state=client)
            client["numbers"].zero_()
            straight = steps(first, 2, 5)
            assert not saver.pending.is_done and not (folder / f"{stage}" / "lazy" / "latest").exists()
            may_write.set()
            saver.pending.wait(60)
        second = engine(stage)
        second.load_checkpoint(folder / f"{stage}" / "lazy")
        found[stage] = [straight, steps(second, 2, 5)]
        own = (folder / f"{stage}" / "lazy").glob(f"*/*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
        assert needed > 0.9 * sum(path.stat().st_size for path in own)
        first.destroy()
        gc.collect()
    (folder / f"losses-{dist.get_rank()}.json").write_text(json.dumps(found))


def killed(folder: Path) -> None:
    """Save twice; die in the second save."""
    trained = engine(3)
    saver = attach_engine(trained)
    for step in range(2):
        steps(trained, step, step + 1)
        trained.save_checkpoint(folder / "run")
        if not step:
            saver.finish()
            streams.write_all = lambda fd, data: (write_all(fd, data[:100]), time.sleep(60))
    while not any(path.stat().st_size for path in folder.glob("run/.*/*/*.pt")):
        time.sleep(0.01)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(folder: Path) -> None:
    """Resume after `killed`, and save the step that was lost."""
    trained = engine(3)
    trained.load_checkpoint(folder / "run")
    assert trained.global_steps == 1
    saver = attach_engine(trained)
    steps(trained, 1, 2)
    trained.save_checkpoint(folder / "run")
    saver.pending.wait(60)


def tags(folder: Path) -> None:
    """Save one step under tags that differ, which DeepSpeed permits with a warning, and load the next one at once."""
    trained = engine(2, checkpoint={"tag_validation": "WARN"})
    attach_engine(trained)
    steps(trained, 0, 1)
    trained.save_checkpoint(folder / "run", tag=f"of-{dist.get_rank()}")
    steps(trained, 1, 2)
    trained.save_checkpoint(folder / "run", tag="same")
    steps(trained, 2, 3)
    trained.load_checkpoint(folder / "run")
    assert trained.global_steps == 2


class Plain:
    """A training of one process that hands over its states itself."""

    def __init__(self, folder: Path, kind: type[torch.optim.AdamW] = torch.optim.AdamW, **options: Any) -> None:
        self.folder, self.model = folder, model()
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.saver = StockSaver(self.model, lambda: [self.optimizer], SavingOptions(**options))
        self.step = 0

    def train(self) -> None:
        torch.manual_seed(self.step)
        self.model(torch.randn(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, name: str = "", value: Any = None) -> Any:
        folder = self.folder / (name or f"step-{self.step}")
        with self.saver.saving(folder, self.step) as is_saving:
            if not is_saving:
                return None
            self.saver.add(value or self.states(), folder / "states.pt")
        return self.saver.pending


def ends(folder: Path) -> None:
    """Save, and let the process end."""

    def work() -> None:
        streams.write_all = slowly
        run = Plain(folder / "run")
        run.train()
        run.save()

    assert ended(forked(work)) == 0


def trainers(folder: Path, *stages: str) -> None:
    """Train with the Trainer and with its checkpoints saved in the background, and continue these."""
    for stage in map(int, stages):
        spec = Spec(f"{stage}", stage=stage, dtype="bf16" if stage else "fp32", layers=1, steps=4, save_steps=2)
        losses = []
        for name, from_step in (("stock", 0), ("lazy", 0), ("again", 2)):
            args = arguments(spec, folder, output_dir=str(folder / f"{stage}" / name))
            trainer, logs = new_trainer(spec, args, new_model(spec)), Logs()
            trainer.add_callback(logs)
            if name == "lazy":
                attach(trainer, layout="stock")
            saved = folder / f"{stage}" / "lazy" / f"checkpoint-{from_step}"
            trainer.train(resume_from_checkpoint=str(saved) if from_step else None)
            losses.append(logs.losses)
            dist.barrier()
        assert losses[0] == losses[1]
        assert losses[2] == {step: loss for step, loss in losses[0].items() if step > 2}
        gc.collect()


def sharded(folder: Path, form: str) -> None:
    """The same under FSDP, whose state dict has a form of `trainings.fsdp.FORMS`."""
    spec = Fsdp(form, kind=form, layers=1, steps=4, save_steps=2)
    losses = []
    for name, from_step in (("stock", 0), ("lazy", 0), ("again", 2)):
        AcceleratorState._reset_state(reset_partial_state=True)
        args, logs = arguments_of(spec, folder, output_dir=str(folder / name), **FORMS[form]), Logs()
        trainer = CpuTrainer(fsdp_model(spec), args, default_data_collator, Tokens(), callbacks=[logs])
        if name == "lazy":
            attach(trainer, layout="stock")
        trainer.train(resume_from_checkpoint=str(folder / "lazy" / f"checkpoint-{from_step}") if from_step else None)
        losses.append(logs.losses)
        dist.barrier()
    assert losses[0] == losses[1]
    assert losses[2] == {step: loss for step, loss in losses[0].items() if step > 2}


def main(what: Path, folder: Path, *more: Path) -> None:
    if what.name == "ends":  # it forks
        ends(folder)
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    globals()[what.name](folder, *(one.name for one in more))
    dist.barrier()
