"""A run whose checkpoints share data files by hard links, what people do to it, and the truth about each checkpoint.

Every element of every state says which event of the run made it, and where in its tensor it belongs. What a checkpoint
holds when it is made is checked against the sources that were asked for; from then on, unmodified `dcp.load` has to
read the same from it, or `verify` has to say that it is damaged.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from faults.driver import CHANGES, Request, ask
from helpers.commands import run_here
from llmtailor.checkpoint.lineage import Past
from llmtailor.errors import TailorError
from llmtailor.frameworks.trainer_state import CALLBACKS, MARK, make_mark
from llmtailor.saving import DcpSaver
from llmtailor.verify.verify import NOT_RESUMABLE, verify_checkpoint
from saving.dcp_loop import load_whole

LAYERS = 3
PARTS = ("embed_tokens", *(f"layer {number}" for number in range(LAYERS)), "norm", "lm_head")
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weight": lambda one: one,
    "exp_avg": lambda one: -one,
    "exp_avg_sq": lambda one: one + 0.5,
}
PLACES = 32
"""More than any tensor has elements"""

Holding = Mapping[tuple[str, str], int]
"""Param and kind of a state -> the event that made it"""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(3, 2, bias=False)
        self.norm = torch.nn.Parameter(torch.ones(3))


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 3)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(3, bias=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.lm_head = torch.nn.Linear(3, 5, bias=False)


def part_of(param: str) -> str:
    words = param.split(".")
    return f"layer {words[2]}" if words[1] == "layers" else words[-2]


class Training:
    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()

    def be(self, event: int, step: int) -> None:
        for param in self.model.parameters():
            value = (event * PLACES + torch.arange(param.numel(), dtype=torch.float32)).reshape(param.shape)
            state = self.optimizer.state[param]
            for kind, change in KINDS.items():
                (param.data if kind == "weight" else state[kind]).copy_(change(value))
            state["step"].fill_(step)
        self.scheduler.last_epoch, self.scheduler._step_count = step, step + 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


def load(root: Path) -> dict[str, Any]:
    """Return everything that `dcp.load` reads from the DCP folders of a checkpoint, as whole tensors."""
    found: dict[str, Any] = {}
    for metadata in sorted(root.rglob(".metadata")):
        state = load_whole(FileSystemReader(metadata.parent))
        found |= {f"{metadata.parent.relative_to(root)}/{key}": value for key, value in state.items()}
    return found


_STATE = re.compile(r"(?:.*?\.)?state\.(.+)\.(exp_avg|exp_avg_sq)")


def holding_of(loaded: Mapping[str, Any]) -> Holding:
    """Return which event made each state; raises AssertionError for a tensor of several events."""
    found = {}
    for key, tensor in loaded.items():
        name = key.rpartition("/")[2]
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            continue
        match = _STATE.fullmatch(name)
        param, kind = (match[1], match[2]) if match else (re.sub(r"^model\.(?=model\.|lm_head)", "", name), "weight")
        value = {"weight": tensor, "exp_avg": -tensor, "exp_avg_sq": tensor - 0.5}[kind].flatten()
        value = value - torch.arange(len(value), dtype=torch.float32)
        assert value.eq(value[0]).all() and value[0] % PLACES == 0, f"{key} is of several events: {tensor}"
        found[param, kind] = int(value[0]) // PLACES
    return found


def steps_of(loaded: Mapping[str, Any]) -> dict[str, float]:
    """Return Adam's step of each param."""
    found = {key.rpartition("state.")[2]: value for key, value in loaded.items() if key.endswith(".step")}
    return {key.removesuffix(".step"): float(value) for key, value in found.items()}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def equal(mine: Any, its: Any) -> bool:
        return torch.equal(mine, its) if isinstance(mine, torch.Tensor) else bool(mine == its)

    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)


def signature(root: Path) -> list[tuple[Any, ...]]:
    """Return what changes with the bytes of any file."""
    stats = [(str(path.relative_to(root)), path.stat()) for path in sorted(root.rglob("*")) if path.is_file()]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]


def inodes(root: Path) -> set[int]:
    return {path.stat().st_ino for path in root.rglob("*.distcp")}


@dataclass
class Checkpoint:
    """The truth about a checkpoint."""

    loaded: Mapping[str, Any]
    holding: Holding
    is_damaged: bool = False
    """Whether its data has been overwritten through a link, or cut"""
    is_touched: bool = False
    """Whether that happened to any of its files, maybe where it has no data"""
    is_resumable: bool = True
    seen: object = None


@dataclass
class World:
    """``run`` is the folder of a run; ``beside`` is where else people put checkpoints."""

    root: Path
    seed: int
    live: dict[Path, Checkpoint] = field(default_factory=dict)
    partial: dict[int, Holding] = field(default_factory=dict)
    """Step of a partial checkpoint -> what the training held, or the full one that ``thin`` replaced"""
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    event: int = 0
    step: int = 0
    names: int = 0
    linked: dict[Path, Holding] = field(default_factory=dict)
    """Full checkpoint that ``thin --reference`` may replace -> what the new one holds"""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.run, self.beside = self.root / "run", self.root / "beside"
        self.run.mkdir(parents=True)
        self.beside.mkdir()
        self.training = Training()
        self.prefix = self.random.choice(["checkpoint-", "step-"])
        self.policy = self.random.choice(["moments_in_turn:2", "parity", "round_robin:2", "full"])
        self.keep = self.random.choice([None, 1, 2])
        self.trust = self.random.random() < 0.8
        self.saver: Any = None
        self.resumes: dict[str, Any] | None = None
        """Of the saver, once it has been stopped"""
        self.dcp_saver = DcpSaver(self.policy)
        self.newest_of_dcp: Path | None = None

    # --- looking ------------------------------------------------------------------------------------------------------

    def note(self, what: str, more: object = "") -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self.notes.append(f"{what} {more}".rstrip())

    def story(self, *things: object) -> str:
        told = [getattr(thing, "stderr", thing) for thing in things]
        there = [
            f"{path.relative_to(self.root)} {'DAMAGED' if one.is_damaged else ''}" for path, one in self.live.items()
        ]
        return "\n".join(
            [f"seed {self.seed}, {self.policy}, keep {self.keep}", *self.notes, "--", *there, "--", *map(str, told)]
        )

    def add(self, path: Path, *wanted: Holding) -> None:
        """Take a new checkpoint in. What it holds must be one of ``wanted``."""
        loaded = load(path)
        holding = holding_of(loaded)
        assert holding in wanted, self.story(f"{path} holds", differing(holding, wanted[0]))
        self.live[path] = Checkpoint(loaded, holding)

    def look(self, may_change: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Compare every checkpoint with the truth; the data of those files alone may have changed."""
        for path, one in self.live.items():
            assert path.is_dir(), self.story(f"{path} is gone")
            now = signature(path)
            self.counts["states"] = self.counts.get("states", 0) + len(one.holding)
            if now == one.seen:
                continue
            one.is_touched |= not may_change.isdisjoint(inodes(path))
            self.counts["looks"] = self.counts.get("looks", 0) + 1
            try:
                is_same, told = same(load(path), one.loaded), ""
            except (Exception, CheckpointException) as error:  # the latter is none, for torch
                is_same, told = False, repr(error)
            if not is_same and not one.is_damaged:
                assert one.is_touched, self.story(f"{path} has changed: {told}")
                one.is_damaged = True
            verdict = verdict_of(path)
            if one.is_damaged and not is_same:
                assert verdict is None, self.story(f"{path} is damaged, and verify says {verdict}")
                self.counts["damaged"] = self.counts.get("damaged", 0) + 1
            elif one.is_resumable and not one.is_touched:
                assert verdict is not None, self.story(f"{path} is good, and verify says {verdict}", found_in(path))
            one.seen = now

    def good(self) -> list[Path]:
        return [path for path, one in self.live.items() if not one.is_damaged and one.is_resumable]

    def new(self) -> Path:
        self.names += 1
        return self.beside / f"made-{self.names}"

    def full(self) -> list[Path]:
        """Those with a step in their name in the run's folder, oldest first"""
        names = ("checkpoint-", "step-")
        return sorted((one for one in self.live if one.parent == self.run and one.name.startswith(names)), key=step_of)

    def now(self) -> Holding:
        names = [name for name, _ in self.training.model.named_parameters()]
        return {(name, kind): self.event for name in names for kind in KINDS}

    def train(self) -> None:
        self.step += self.random.randint(1, 3)
        self.event += 1
        self.training.be(self.event, self.step)

    def stop(self) -> None:
        """End the training that saves partial checkpoints; the next one goes on from here."""
        if self.saver is not None:
            self.saver.close()
            ledger, self.saver = self.saver.ledger, None
            self.resumes = {CALLBACKS: {MARK: make_mark(Past(self.step, ledger.lineage, ledger.history))}}

    # --- commands -----------------------------------------------------------------------------------------------------

    def call(self, *words: object) -> Any:
        """Run a command; in some cases it is killed somewhere, and everything looked at, and then run again."""
        if self.random.random() < 0.3:
            self.stop()
            said = self.root / "said"
            request = Request(
                [*map(str, words)],
                str(self.root),
                "kill",
                self.random.randint(1, 80),
                only=(*CHANGES, "link"),
                said=str(said),
            )
            (code,) = ask({}, [request])
            self.note("kill" if code < 0 else "ran", f"{words[0]} at {request.at}: {code}")
            if code < 0:
                self.forget_removed(words[0])
                self.look()
                again = run_here(*words)
                was_complete = again.returncode == 6 and "already exists" in again.stderr
                return Done(0 if was_complete else again.returncode, again.stdout + again.stderr, again.stdout)
            else:
                return Done(code, said.read_text())
        result = run_here(*words)
        return Done(result.returncode, result.stdout + result.stderr, result.stdout)

    def forget_removed(self, command: object) -> None:
        """``thin`` makes partial checkpoints of full ones, and ``salvage`` moves damaged ones aside."""
        for path in [*self.live]:
            if command == "thin" and path.parent == self.run:
                self.thinned(path)
            if command == "salvage" and path.parent == self.run:
                for aside in (path.with_name(f"{word}-{path.name}") for word in ("damaged", "replaced")):
                    if aside.exists() and aside not in self.live:
                        self.live[aside] = self.live.pop(path)

    def thinned(self, path: Path) -> None:
        """A full checkpoint that has become a partial one, or weights alone."""
        one = self.live[path]
        if path in self.linked:
            if signature(path) != one.seen and not same(loaded := load(path), one.loaded):
                assert holding_of(loaded) == self.linked[path], self.story(f"{path} was thinned", holding_of(loaded))
                self.live[path] = Checkpoint(loaded, holding_of(loaded))
        elif not path.exists():
            del self.live[path]
            self.partial[step_of(path)] = one.holding
        elif not one.is_damaged and (left := load(path)).keys() < one.loaded.keys():
            weights = {key: value for key, value in one.loaded.items() if key in left}
            assert all("state." not in key for key in left) and same(left, weights), self.story(f"{path} was thinned")
            self.live[path] = Checkpoint(left, holding_of(left), is_resumable=False)


@dataclass
class Done:
    code: int
    stderr: str
    stdout: str = ""


def verdict_of(path: Path) -> str | None:
    """Return what `verify` says of a checkpoint, unless that is an error."""
    with suppress(TailorError):
        level = verify_checkpoint(path).level
        return None if level == NOT_RESUMABLE else level
    return None


def found_in(path: Path) -> object:
    with suppress(TailorError):
        return [one.what for one in verify_checkpoint(path).findings]
    return "no checkpoint"


def differing(one: Holding, other: Holding) -> object:
    return {key: (one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)}


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def killed(action: Callable[[], object], calls: int) -> bool:
    """Do something in a child that is killed at a call of a function; return whether it came to that."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        left = calls

        def count(*_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        with suppress(BaseException):
            action()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0
