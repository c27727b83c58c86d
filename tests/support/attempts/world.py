"""A run's folder, what people do to it, and the truth about it.

Every element of every state is a number that says which attempt of the run made it, and at which step. So the bytes of
a composite tell what it is made of, whatever any record says.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState

from helpers.commands import run_here
from llmtailor.checkpoint.lineage import Past
from llmtailor.frameworks.trainer_state import CALLBACKS, MARK, make_mark
from llmtailor.saving import saver_for
from oracle.states import states_of

CONFIG = LlamaConfig(
    vocab_size=11,
    hidden_size=6,
    intermediate_size=10,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
PARTS = ("embed_tokens", "layer 0", "layer 1", "layer 2", "norm", "lm_head")
MOMENTS = {part: f"{part}, moments" for part in PARTS}
STEPS = 4096
"""More than any attempt has"""

DAMAGE = (OSError, EOFError, KeyError, RuntimeError, ValueError, SafetensorError)
"""What reading a checkpoint raises that is cut short, or has no weights any more"""

Made = tuple[int, int]
"""Attempt and step that made a state"""
Holding = Mapping[str, Made]
"""What a checkpoint holds: part -> who made its masters, and with the name in `MOMENTS`, who made its moments"""


def part_of(param: str) -> str:
    words = param.split(".")
    return f"layer {words[2]}" if words[1] == "layers" else words[-2]


class Training:
    """A model and its optimizer, whose states say who made them."""

    def __init__(self) -> None:
        self.model = LlamaForCausalLM(CONFIG)
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()

    def make(self, made: Made) -> None:
        """Be what the attempt is at the step."""
        value = float(made[0] * STEPS + made[1])
        for param in self.model.parameters():
            param.data.fill_(value)
            state = self.optimizer.state[param]
            state["exp_avg"].fill_(-value)
            state["exp_avg_sq"].fill_(value + 0.5)
            state["step"].fill_(made[1])
        self.scheduler.last_epoch, self.scheduler._step_count = made[1], made[1] + 1


@dataclass
class Attempt:
    """An attempt as it really was."""

    number: int
    parent: Attempt | None
    resumed_at: int
    step: int
    saver: Any = None
    mark: dict[str, Any] | None = None
    """Among the Trainer's state, whether the saver put it there or a resume did; None without one"""

    def owns(self, made: Made) -> bool:
        """Whether a state is of this attempt or of what it continues."""
        number, step = made
        if number == self.number:
            return True
        return self.parent is not None and step <= self.resumed_at and self.parent.owns(made)


@dataclass
class World:
    run: Path
    seed: int
    attempts: list[Attempt] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outputs: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.training = Training()
        self.run.mkdir(parents=True)

    @property
    def present(self) -> Attempt:
        return self.attempts[-1]

    # --- what is there ------------------------------------------------------------------------------------------------

    def holdings(self) -> dict[Path, Holding]:
        """Read what is in place from the bytes alone: every complete checkpoint under a name that is looked for."""
        found = {}
        for path in [*self.run.glob("checkpoint-*"), *self.run.glob("partial/step-*")]:
            is_partial = path.parent != self.run
            if path.name.split("-")[1].isdigit() and (not is_partial or (path / "manifest.json").is_file()):
                with suppress(*DAMAGE):
                    found[path] = read_partial(path) if is_partial else read_full(path)
        return found

    def own(self, at: int | None = None, attempt: Attempt | None = None) -> dict[Path, Holding]:
        """Those that are wholly of an attempt and what it continues; of the present one if none is given."""
        attempt = attempt or self.present
        return {
            path: holding
            for path, holding in self.holdings().items()
            if step_of(path) <= (STEPS if at is None else at) and all(attempt.owns(made) for made in holding.values())
        }

    def expected(self, at: int | None) -> list[Holding]:
        """What a composite may be.

        An attempt without the saver may go unnoticed, but never be mixed with others.
        """
        recorded = max(one.number for one in self.attempts if one.saver is not None)
        made = [newest(self.own(at, attempt)) for attempt in self.attempts[recorded - 1 :]]
        return [one for one in made if one is not None]

    def is_promised(self, at: int | None) -> bool:
        """Whether a step can be composed, or any step, as `gc` says: it has given up others."""
        result = run_here("gc", self.run, "--json")
        steps = json.loads(result.stdout)["composable_after"] if result.returncode == 0 else []
        return bool(steps) if at is None else at in steps

    # --- what people do -----------------------------------------------------------------------------------------------

    def start(self, parent: Attempt | None, step: int, source: Path | None, with_saver: bool = True) -> None:
        """Begin an attempt, from scratch or from a checkpoint."""
        self.stop()
        state = json.loads((source / "trainer_state.json").read_text()) if source else {}
        mark = state.get(CALLBACKS, {}).get(MARK)
        attempt = Attempt(len(self.attempts) + 1, parent, step, step, mark=mark)
        self.attempts.append(attempt)
        self.note("start", f"attempt {attempt.number} at {step} from {source and source.name}, saver {with_saver}")
        self.training.make((attempt.number, step))
        if with_saver:
            parts = {"engine": None, "model": self.training.model, "optimizer": self.training.optimizer}
            attempt.saver = saver_for(self.run, **parts, scheduler=self.training.scheduler, policy=self.policy)
            attempt.saver.start(step, state if source else None)

    def stop(self) -> None:
        if self.attempts and self.present.saver is not None:
            self.present.saver.close()

    def train(self, steps: int) -> None:
        attempt = self.present
        attempt.step += steps
        self.training.make((attempt.number, attempt.step))
        if attempt.saver is not None:
            ledger = attempt.saver.ledger
            attempt.mark = make_mark(Past(attempt.step, ledger.lineage, ledger.history))

    def train_and_save(self, steps: int) -> None:
        self.train(steps)
        self.save()

    def write_state(self, folder: Path) -> None:
        """What the Trainer writes, with the state of a callback that the saver is."""
        step, mark = self.present.step, self.present.mark
        callbacks = {"TrainerControl": TrainerControl().state(), **({MARK: mark} if mark else {})}
        state = TrainerState(
            epoch=step / 100,
            global_step=step,
            max_steps=1000,
            num_train_epochs=10,
            train_batch_size=2,
            stateful_callbacks=callbacks,
        )
        state.save_to_json(str(folder / "trainer_state.json"))

    def save(self) -> None:
        attempt = self.present
        if attempt.saver is None or attempt.step == attempt.resumed_at:
            return
        if (self.run / "partial" / f"step-{attempt.step:08}" / "manifest.json").is_file():
            return
        save = attempt.saver.save(attempt.step, self.write_state if self.random.random() < 0.7 else None)
        report = save.wait()
        self.note("save", f"{attempt.number}@{attempt.step}: {', '.join(report.parts)}")

    def save_full(self) -> None:
        """A checkpoint as the Trainer writes one, over whatever has its name."""
        attempt = self.present
        if attempt.step == attempt.resumed_at:
            return
        folder = self.run / f"checkpoint-{attempt.step}"
        shutil.rmtree(folder, ignore_errors=True)
        self.write_full(folder)
        self.note("save_full", f"{attempt.number}@{attempt.step}")

    def write_full(self, folder: Path) -> None:
        self.training.model.save_pretrained(folder)
        torch.save(self.training.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.training.scheduler.state_dict(), folder / "scheduler.pt")
        self.write_state(folder)

    def tear_a_save(self) -> None:
        """A kill in the middle of a save."""
        attempt = self.present
        folder = self.run / "partial" / f"step-{attempt.step + 1:08}"
        if attempt.saver is not None and not folder.exists():
            folder.mkdir()
            (folder / "rank-00000-of-00001.safetensors").write_bytes(b"half of")
            with (self.run / "partial" / "saves.jsonl").open("a") as log:
                log.write('{"step": 1')
            self.note("tear")

    def compose(self, at: int | None = None) -> Path | None:
        """``merge --run``; check what comes out against the bytes that are in place."""
        words = ["--run", self.run, *(() if at is None else ("--at", at))]
        result = run_here("merge", *words, "--json")
        expected = self.expected(at)
        if not expected or (result.returncode in (3, 4) and not self.is_promised(at)):
            assert result.returncode in (3, 4), self.story(result)
            return None
        assert result.returncode == 0, self.story(result)
        out = Path(json.loads(result.stdout)["out"])
        out = out if out.is_absolute() else Path.cwd() / out
        made = read_full(out)
        assert made in expected, self.story(result, expected, made)
        self.note("compose", f"at {at}: {out.name}")
        self.outputs += 1
        return out

    def resume_from(self, source: Path, at: int, with_saver: bool = True) -> None:
        """Resume from a composite or from a checkpoint of the Trainer's, of whichever attempt it is."""
        holding = read_full(source)
        newest_made = max(holding.values(), key=lambda made: made[1])
        parent = next(one for one in reversed(self.attempts) if all(one.owns(made) for made in holding.values()))
        candidates = [one for one in self.attempts if one.number == newest_made[0]]
        parent = candidates[0] if candidates and self._all_owned(candidates[0], holding) else parent
        self.start(parent, at, source, with_saver)

    def _all_owned(self, attempt: Attempt, holding: Holding) -> bool:
        return all(attempt.owns(made) for made in holding.values())

    # --- bookkeeping --------------------------------------------------------------------------------------------------

    policy: str = "parity"

    def note(self, what: str, more: str = "") -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self.notes.append(f"{what} {more}".rstrip())

    def story(self, *things: object) -> str:
        told = [getattr(thing, "stderr", thing) for thing in things]
        listing = [
            str(path.relative_to(self.run)) for path in sorted(self.run.glob("*")) + sorted(self.run.glob("p*/*"))
        ]
        return "\n".join([f"seed {self.seed}", *self.notes, "--", *listing, "--", *map(str, told)])


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def newest(own: Mapping[Path, Holding]) -> Holding | None:
    """What the newest composite of these is: every part as new as any of them has it; None if there is none."""
    found: dict[str, Made] = {}
    for holding in own.values():
        for part, made in holding.items():
            if part not in found or made[1] > found[part][1]:
                found[part] = made
    return found if found.keys() == {*PARTS, *MOMENTS.values()} else None


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "master": lambda one: one,
    "exp_avg": lambda one: -one,
    "exp_avg_sq": lambda one: one - 0.5,
}


def read_full(path: Path) -> Holding:
    states = states_of(path)
    return holding_of((kind, name, of_param[kind]) for name, of_param in states.items() for kind in KINDS)


def read_partial(path: Path) -> Holding:
    tensors = [item for file in path.glob("rank-*.safetensors") for item in load_file(file).items()]
    named = ((*key.partition("/")[::2], tensor) for key, tensor in tensors)
    return holding_of((kind, name, tensor) for kind, name, tensor in named if kind in KINDS)


def holding_of(states: Iterable[tuple[str, str, torch.Tensor]]) -> Holding:
    found: dict[str, set[Made]] = {}
    for kind, name, tensor in states:
        part = part_of(name)
        found.setdefault(part if kind == "master" else MOMENTS[part], set()).add(decode(KINDS[kind](tensor)))
    return {part: only(made) for part, made in found.items()}


def decode(tensor: torch.Tensor) -> Made:
    value = only(set(tensor.reshape(-1).tolist()))
    return divmod(int(value), STEPS)


def only(values: set[Any]) -> Any:
    assert len(values) == 1, f"made of several: {values}"
    return next(iter(values))
