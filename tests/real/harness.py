"""Start trainings and find what they left behind."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from real.runs import batch
from real.spec import Spec

HERE = Path(__file__).parent
NEEDED = ("torch", "deepspeed", "transformers", "accelerate", "safetensors")
TIMEOUT_S = 560
TAIL_LINES = 60


@dataclass(frozen=True)
class Run:
    """A finished training."""

    spec: Spec
    folder: Path

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    @cached_property
    def logs(self) -> dict[int, dict[str, float]]:
        """step -> ``loss``, ``grad_norm``, ``learning_rate``, exactly as computed; only steps run in this training."""
        logs = json.loads((self.folder / "result.json").read_text())
        return {int(step): log for step, log in logs.items()}

    @property
    def losses(self) -> dict[int, float]:
        return {step: log["loss"] for step, log in self.logs.items()}

    @cached_property
    def echo(self) -> dict[str, Any]:
        """What DeepSpeed held after the resume: see echo.py."""
        import torch

        return dict(torch.load(self.folder / "echo.pt", weights_only=False))

    @property
    def written_back(self) -> Path:
        """What DeepSpeed saved after the resume of ZeRO-1/2, before the first step."""
        return self.folder / "echo"


Train = Callable[..., dict[str, Run]]
"""What the fixture ``train`` is: specs, number of ranks, and the program if it isn't train.py"""


class Runs:
    """The runs of runs.py by name. The first access to one trains all of the same world size."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._batches: dict[int, dict[str, Run] | str] = {}

    def __getitem__(self, name: str) -> Run:
        ranks = 2 if name in batch(2) else 3
        spec = batch(ranks)[name]
        if spec.optimizer == "cpu_adam" and not compiler():
            pytest.skip("DeepSpeedCPUAdam cannot be built: no C++ compiler or no ninja")
        if ranks not in self._batches:
            try:
                self._batches[ranks] = self._train(ranks)
            except TrainingFailed as error:
                self._batches[ranks] = str(error)
        found = self._batches[ranks]
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
        return found[name]

    def _train(self, ranks: int) -> dict[str, Run]:
        specs = batch(ranks, without=frozenset() if compiler() else frozenset({"cpu_adam"}))
        cache = os.environ.get("LLMTAILOR_TEST_CACHE")
        if not cache:
            return torchrun(specs.values(), ranks, self._make_folder(f"{ranks}-ranks"))
        folder = Path(cache).resolve() / f"{ranks}-ranks-{fingerprint(specs)}"
        if not folder.exists():
            making = folder.with_name(f"{folder.name}.{os.getpid()}")
            making.mkdir(parents=True)
            torchrun(specs.values(), ranks, making)
            try:
                making.rename(folder)
            except OSError:  # another session was faster
                shutil.rmtree(making)
        return {name: Run(spec, folder / name) for name, spec in specs.items()}


class TrainingFailed(Exception):
    """A torchrun died or hung; says what it last said."""


def torchrun(
    specs: Iterable[Spec], ranks: int, folder: Path, timeout_s: float = TIMEOUT_S, program: str | Path = "train.py"
) -> dict[str, Run]:
    """Train one spec after another in one set of processes."""
    specs = list(specs)
    (folder / "specs.json").write_text(json.dumps([spec.to_json() for spec in specs], indent=1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / program), str(folder / "specs.json"), str(folder)]
    log = folder / "torchrun.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
            problem = f"torchrun ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"torchrun hung: not done after {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if problem:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise TrainingFailed(f"{problem}; the end of {log}:\n{tail}")
    return {spec.name: Run(spec, folder / spec.name) for spec in specs}


def environment() -> dict[str, str]:
    """Offline, on the CPU, and with a home for compiled ops that no other version of DeepSpeed shares."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [env.get("PYTHONPATH")])])
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # ninja, when pip installed it
    caches = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    env.setdefault("TORCH_EXTENSIONS_DIR", str(caches / "llmtailor-tests" / digest(versions())))
    return env


def compiler() -> bool:
    path = environment()["PATH"]
    return bool(shutil.which(os.environ.get("CXX", "c++"), path=path) and shutil.which("ninja", path=path))


def missing() -> list[str]:
    """Name the packages that real training needs and does not find."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in NEEDED} | {"python": sys.version}


def fingerprint(specs: Mapping[str, Spec]) -> str:
    """Change whenever the trainings might come out otherwise."""
    code = {name: (HERE / name).read_text() for name in ("train.py", "echo.py", "models.py", "spec.py")}
    return digest({"specs": [spec.to_json() for spec in specs.values()], "code": code, "versions": versions()})


def digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
