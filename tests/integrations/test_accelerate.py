"""A loop with accelerate: ``saver_for(accelerator=...)``."""

from __future__ import annotations

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState

from llmtailor.errors import UsageError
from llmtailor.saving import newest_checkpoint, saver_for
from trainings.models import build

STEPS = 6


class Counter:
    """What a loop registers with accelerate."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, saved):
        self.steps = saved["steps"]


@pytest.fixture(autouse=True)
def fresh():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(run, until=STEPS):
    """Return the losses of a loop as in docs/integrations.md, which goes on from the newest state."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)  # the data are drawn from a state that is saved and restored
    model = build("llama", 3, tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    step, resume = 0, newest_checkpoint(run)
    if resume is not None:
        accelerator.load_state(str(resume))
        step = int(resume.name.split("-")[1])
        assert counter.steps == step
    saver = saver_for(run, accelerator=accelerator, policy="full")
    saver.start(step, resumed_from=resume)
    losses = {}
    while step < until:
        for _ in range(2):
            tokens = torch.randint(0, 60, (2, 8))
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        step += 1
        counter.steps = step
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
    with pytest.raises(UsageError, match="it needs a scheduler"):
        saver_for("run", model=model, optimizer=torch.optim.AdamW(model.parameters()))
