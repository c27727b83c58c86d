"""A loop with accelerate: ``saver_for(accelerator=...)``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from safetensors.torch import load_model  # noqa: E402

from llmtailor.errors import UsageError  # noqa: E402
from llmtailor.saving import newest_checkpoint, saver_for  # noqa: E402
from real.models import build  # noqa: E402

STEPS = 6


@pytest.fixture(autouse=True)
def fresh():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(run, until=STEPS):
    """Return the losses of a loop as in docs/integrations.md, which goes on from the newest state."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = build("llama", 3, tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    step, resume = 0, newest_checkpoint(run)
    if resume is not None:
        load_model(model, resume / "model.safetensors")
        optimizer.load_state_dict(torch.load(resume / "optimizer.pt"))
        scheduler.load_state_dict(torch.load(resume / "scheduler.pt"))
        step = scheduler.last_epoch
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    saver = saver_for(run, accelerator=accelerator, policy="full")
    saver.start(step, resumed_from=resume)
    losses = {}
    while step < until:
        for part in range(2):
            torch.manual_seed(10 * step + part)
            tokens = torch.randint(0, 60, (2, 8))
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        step += 1
        losses[step] = loss.item()
        if step % 2 == 0:
            saver.save(step)
    saver.close()
    return losses


def test_a_loop_goes_on_as_if_nothing_had_stopped_it(tmp_path):
    straight = train(tmp_path / "straight")
    first = train(tmp_path / "run", until=4)
    second = train(tmp_path / "run")
    assert [*second] == [5, 6]
    assert {**first, **second} == straight


def test_what_the_accelerator_lacks_is_said():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(UsageError) as caught:
        saver_for("run", accelerator=accelerator)
    assert len(caught.value.problems) == 2
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="has the model already"):
        saver_for("run", accelerator=accelerator, model=model)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UsageError, match="it needs a scheduler"):
        saver_for("run", accelerator=accelerator)
