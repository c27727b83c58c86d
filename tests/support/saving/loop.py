"""A training loop in this process with a saver, the truth about each step, and what composites must hold of it."""

from __future__ import annotations

import copy
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import llmtailor
from helpers.states import in_8_bits
from llmtailor.copying import streams
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.choose import choose_for_run
from llmtailor.saving import PendingSave, saver_for

KINDS = ("master", "exp_avg", "exp_avg_sq")
Truth = Mapping[int, Mapping[str, Mapping[str, torch.Tensor]]]
"""Step -> param -> kind of state -> what it was"""
States = dict[tuple[str, str], torch.Tensor]
"""By param and kind"""


def build(*, hidden: int = 32, layers: int = 3, num_experts: int = 0, vocab: int = 64, **sizes: Any) -> Any:
    """Make a small Llama, or Mixtral if it has experts."""
    usual = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    usual |= {"num_attention_heads": 2, "num_key_value_heads": 2, **sizes}
    if not num_experts:
        return LlamaForCausalLM(LlamaConfig(**usual))
    moe = {"num_local_experts": num_experts, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**{**moe, **usual}))


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, model.config.vocab_size, (2, 8))
    return model(input_ids=tokens, labels=tokens).loss


class Loop:
    """Trains `model`, or what `build` makes of `sizes`; ``make`` makes the optimizer, if not AdamW; `options` are
    those of `saver_for`.

    A step is the same in every process. With ``teacher``, a frozen copy of the model follows it; it is updated where a
    test calls `update_teacher`.
    """

    def __init__(
        self,
        run: Path,
        *,
        model: Any = None,
        loss: Callable[[Any], torch.Tensor] = loss_of,
        make: Callable[[Any], Any] | None = None,
        rate: Any = 1e-2,
        betas: Any = (0.9, 0.999),
        teacher: bool = False,
        hidden: int = 32,
        layers: int = 3,
        num_experts: int = 0,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.run, self.loss = run, loss
        self.model = model or build(hidden=hidden, layers=layers, num_experts=num_experts)
        if teacher:
            self.model.teacher = copy.deepcopy(self.model.model).requires_grad_(False)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = make(self.model) if make else torch.optim.AdamW(trained, lr=rate, betas=betas)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.saver = self._new_saver(**options)
        self.step = 0
        self.truth: dict[int, dict[str, dict[str, torch.Tensor]]] = {}

    def _new_saver(self, **options: Any) -> Any:
        training = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return saver_for(self.run, **training, **options)

    def start(self, step: int = 0) -> Loop:
        self.step = step
        self.saver.start(step)
        return self

    def trained(self, saves: int, steps: int = 1) -> Loop:
        """Return it after so many saves, with its saver closed."""
        self.start().make_saves(saves, steps)
        self.saver.close()
        return self

    @contextmanager
    def copied(self, run: Path) -> Iterator[Loop]:
        """Itself, with a copy of its run's folder."""
        original, self.run = self.run, Path(shutil.copytree(self.run, run))
        yield self
        self.run = original

    def start_again(self, policy: str, **options: Any) -> None:
        """Let another saver continue with the same training."""
        self.saver.close()
        self.saver = self._new_saver(policy=policy, **options)
        self.saver.start(self.step)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            torch.manual_seed(self.step)
            self.loss(self.model).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
        self.truth[self.step] = {
            name: {"master": param.detach().clone(), **copy.deepcopy(self.optimizer.state.get(param, {}))}
            for name, param in self.model.named_parameters()
        }

    @torch.no_grad()
    def update_teacher(self) -> None:
        """Let the teacher follow, as BYOL and DINO do; through ``.data``, whose writes torch does not count."""
        for mine, other in zip(self.model.teacher.parameters(), self.model.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)

    def teacher(self) -> dict[str, torch.Tensor]:
        return {f"teacher.{name}": one.detach().clone() for name, one in self.model.teacher.named_parameters()}

    def save(self, **more: Any) -> PendingSave | None:
        return self.saver.save(self.step, **more)

    def make_saves(self, saves: int = 1, steps: int = 1) -> Any:
        """Train so many steps and save, so many times; return the report of the last save."""
        for _ in range(saves):
            self.train(steps)
            report = self.save().wait(60)  # type: ignore[union-attr]
        return report

    @property
    def saves(self) -> list[int]:
        return [*self.saver.folder.complete()]

    def manifest(self, step: int) -> dict[str, Any]:
        return manifests([self.run])[step]

    def parts(self, step: int) -> list[str]:
        """What a save holds whole."""
        return [part["part"] for part in self.manifest(step)["parts"]]

    def wanted(self, at: int) -> States:
        """What a composite must hold by what the saves in the run's folder say that they hold."""
        return fold(self.truth, manifests([self.run], at))

    def compose(self, at: int, out: Path, **options: Any) -> Path:
        recipe = choose_for_run(self.run, at, StrategyOptions("latest"))[0]
        llmtailor.merge(recipe, out, llmtailor.Options(**options))
        return out

    def check(self, at: int, out: Path) -> Path:
        """Compose a step, and demand of each element what it was at its newest save."""
        wanted = self.wanted(at)
        check_states(self.compose(at, out), wanted)
        return out


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "partial" / "saves.jsonl").read_text().splitlines()]


def manifests(runs: Iterable[Path], at: int | None = None) -> dict[int, dict[str, Any]]:
    """Read the manifests of published saves in all these folders, up to a step."""
    paths = [path for run in runs for path in run.glob("partial/step-????????/manifest.json")]
    found = {int(path.parent.name[5:]): json.loads(path.read_text()) for path in paths}
    return {step: found[step] for step in sorted(found) if at is None or step <= at}


def rounded(states: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of a step as the policy ``rounded`` saves them, in one process."""
    return {
        name: {kind: in_8_bits(value, kind) if kind in KINDS[1:] else value for kind, value in kinds.items()}
        for name, kinds in states.items()
    }


def fold(truth: Truth, saves: Mapping[int, Mapping[str, Any]], onto: States | None = None) -> States:
    """Return what the newest of some saves held of each element, given their manifests in order."""
    made = {} if onto is None else onto
    for step, manifest in saves.items():
        for kinds, entries in ((KINDS, manifest["parts"]), (KINDS[:1], manifest.get("masters", ()))):
            for entry in entries:
                for name, piece in {**dict.fromkeys(entry["params"]), **entry.get("pieces", {})}.items():
                    for kind in kinds:
                        held = truth[step][name][kind]
                        begin, end = piece or (0, held.numel())
                        whole = made.setdefault((name, kind), torch.full_like(held, math.nan))
                        whole.view(-1)[begin:end] = held.reshape(-1)[begin:end]
    return made


def read_states(out: Path) -> States:
    """Read what a checkpoint of the plain form holds, the steps too."""
    weights, optimizer = load_file(out / "model.safetensors"), torch.load(out / "optimizer.pt")
    names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
    states = {name: {"master": weights[name], **optimizer["state"][at]} for at, name in enumerate(names)}
    return {(name, kind): value for name, kinds in states.items() for kind, value in kinds.items()}


def check_states(out: Path, wanted: States) -> None:
    found = read_states(out)
    assert {key for key in found if key[1] != "step"} == wanted.keys()
    assert not [key for key, value in wanted.items() if not torch.equal(found[key], value)], out


class Disk:
    """The disk that savers write to, as a test wants it to be."""

    def __init__(self, monkeypatch: Any) -> None:
        self._write_all = streams.write_all
        self.pause_s = 0.0
        self.error: OSError | None = None
        self.is_free = threading.Event()
        self.is_free.set()
        monkeypatch.setattr(streams, "write_all", self.write)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        assert self.is_free.wait(60)
        time.sleep(self.pause_s)
        if self.error is not None:
            raise self.error
        self._write_all(fd, data)

    def hang(self) -> None:
        self.is_free.clear()

    def recover(self) -> None:
        self.error = None
        self.is_free.set()
