"""Start trainings and find what they left behind."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from trainings.catalogue import ALL, batch_of
from trainings.spec import Training

HERE = Path(__file__).parent
NEEDED = ("torch", "deepspeed", "transformers", "accelerate", "safetensors")
OPTIMIZERS = {"optimi": "optimi", "bnb": "bitsandbytes"}
"""First word of an optimizer's name -> its package"""
TIMEOUT_S = 560
TAIL_LINES = 60
USED = {"trainer": ("trainer", "echo"), "fsdp": ("fsdp", "fsdp1"), "loops": ("loops", "optimizers")}
"""Program -> its modules, if there are several"""


@dataclass(frozen=True)
class Run:
    """A finished training."""

    spec: Any
    folder: Path

    def checkpoint(self, step: int = 2) -> Path:
        """The full checkpoint of a step, as the program itself names it."""
        name = self.spec.folders.format(step)
        return next(self.folder.glob(name), self.folder / name)

    @cached_property
    def logs(self) -> dict[int, dict[str, float]]:
        """step -> ``loss``, ``grad_norm``, ``learning_rate``, exactly as computed; only steps run in this training."""
        logs = json.loads((self.folder / "result.json").read_text())
        return {int(step): log if isinstance(log, dict) else {"loss": log} for step, log in logs.items()}

    @property
    def losses(self) -> dict[int, float]:
        return {step: log["loss"] for step, log in self.logs.items()}

    def after(self, step: int) -> dict[int, float]:
        """The losses of later steps."""
        return {at: loss for at, loss in self.losses.items() if at > step}

    @cached_property
    def held(self) -> dict[int, Any]:
        """Of an `Fsdp` run: step -> what it held then, see fsdp.py."""
        return dict(load(self.folder / "held.pt"))

    @cached_property
    def echo(self) -> dict[str, Any]:
        """What DeepSpeed held after the resume: see echo.py."""
        return dict(load(self.folder / "echo.pt"))

    @property
    def written_back(self) -> Path:
        """What DeepSpeed saved after the resume of ZeRO-1/2, before the first step."""
        return self.folder / "echo"

    # Of a `Job`

    def partial(self, step: int) -> Path:
        return self.folder / "partial" / f"step-{step:08}"

    def stock(self, step: int) -> Path:
        """The checkpoint that the Trainer itself made at that step."""
        return self.folder / "stock" / f"checkpoint-{step}"

    @cached_property
    def saves(self) -> list[int]:
        found = [path.parent.name for path in self.folder.glob("partial/*/manifest.json")]
        return sorted(int(name.removeprefix("step-")) for name in found if "abandoned" not in name)

    def manifest(self, step: int) -> dict[str, Any]:
        return dict(json.loads((self.partial(step) / "manifest.json").read_text()))

    def result(self, rank: int = 0) -> dict[str, Any]:
        """``log``, that of the Trainer; ``messages`` of the saver"""
        return dict(json.loads((self.folder / f"result-{rank}.json").read_text()))

    @property
    def messages(self) -> list[str]:
        """What the saver said, apart from what it says in each training: at its beginning and at its end."""
        usual = ("WARNING: partial checkpoints go to ", "WARNING: for a full checkpoint of step ")
        return [message for message in self.result()["messages"] if not message.startswith(usual)]

    def truth(self, step: int) -> dict[str, Any]:
        return dict(load(self.folder / "truth" / f"{step}.pt"))


def load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)


Train = Callable[..., dict[str, Run]]
"""What the fixture ``train`` is: specs, and the folder to train in, else a new one"""


class Runs:
    """The runs of catalogue.py by name. The first access to one trains all of its batch, or finds them trained.

    Stock ones are kept between sessions, in ``$LLMTAILOR_TEST_CACHE`` or the user's cache folder, under a name that
    changes with the versions of the packages and with the training programs. Where llmtailor saves, they are kept in
    ``session``, a folder that the processes of one session share.
    """

    def __init__(self, everything: bool, session: Path) -> None:
        self._everything = everything
        self._session = session
        self._found: dict[str, Run | str] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._found:
            assert self._everything or name in batch_of(name, False), f"{name} needs --all: mark this test long"
            without = missing_optimizers()
            specs = batch_of(name, self._everything, without)
            if name not in specs:
                pytest.skip(f"no {ALL[name].optimizer}: its package is missing, or it can't be built")
            if specs[name].program == "lightning":
                pytest.importorskip("lightning")
            specs = {each: self._placed(spec, specs) for each, spec in specs.items()}
            try:
                self._found |= train_once(specs, self._session if ALL[name].has_saver else kept_folder())
            except TrainingFailed as error:
                self._found |= dict.fromkeys(specs, str(error))
        found = self._found[name]
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
        return found

    def _placed(self, spec: Any, batch: Mapping[str, Training]) -> Any:
        """Tell where the job is that this one continues, if another batch has it."""
        goes_on = getattr(spec, "goes_on", None)
        return spec if goes_on is None or goes_on in batch else replace(spec, goes_on=str(self[goes_on].folder))

    def checkpoint(self, name: str, step: int = 2) -> Path:
        return self[name].checkpoint(step)


def kept_folder() -> Path:
    return Path(os.environ.get("LLMTAILOR_TEST_CACHE") or caches() / "runs").resolve()


def train_once(specs: Mapping[str, Training], kept: Path) -> dict[str, Run]:
    """Train, or find what another session or process has trained, or wait for the one that does."""
    kept.mkdir(parents=True, exist_ok=True)
    ranks = next(iter(specs.values())).ranks
    folder = kept / f"{ranks}-ranks-{fingerprint(specs)}"
    with (kept / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            forget_old(kept)
            making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.making-", dir=kept))
            train(specs.values(), making)
            making.rename(folder)
        os.utime(folder)
    return {name: Run(spec, folder / name) for name, spec in specs.items()}


def forget_old(kept: Path) -> None:
    """Remove what no session has used for a month."""
    for path in kept.glob("[0-9]*-ranks-*"):
        if path.stat().st_mtime < time.time() - 30 * 24 * 3600:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


class TrainingFailed(Exception):
    """A rank died or hung; says what the ranks last said."""


def train(specs: Iterable[Training], folder: Path) -> dict[str, Run]:
    """Train one spec after another, those of the same program and number of ranks in one set of processes."""
    specs = list(specs)
    groups: dict[tuple[str, int], list[Training]] = {}
    for spec in specs:
        groups.setdefault((spec.program, spec.ranks), []).append(spec)
    for (program, ranks), group in groups.items():
        listed = folder / f"{program}-{ranks}.json"
        listed.write_text(json.dumps([spec.to_json() for spec in group], indent=1))
        start_ranks(f"trainings.{program}", [listed, folder], ranks, folder)
    return {spec.name: Run(spec, folder / spec.name) for spec in specs}


def start_ranks(
    module: str, arguments: Iterable[object], ranks: int, folder: Path, timeout_s: float = TIMEOUT_S
) -> None:
    """Call ``main(*arguments)`` of a module, with paths as arguments, in so many ranks at once."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one for its ranks
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    common["TORCHELASTIC_USE_AGENT_STORE"] = True
    environments = [{key: str(value) for key, value in {**common, "RANK": at, "LOCAL_RANK": at}.items()}
                    for at in range(ranks)]  # fmt: skip
    log = folder / "ranks.log"
    failed = SERVER.answer(
        {
            "module": module,
            "arguments": [str(each) for each in arguments],
            "environments": environments,
            "folder": str(folder),
            "log": str(log),
            "timeout_s": timeout_s,
        }
    )
    if failed:
        rank, code = failed
        problem = f"not done after {timeout_s:.0f} s" if rank < 0 else f"rank {rank} ended with code {code}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]) if log.exists() else ""
        raise TrainingFailed(f"{problem}; the end of {log}:\n{tail}")


class Server:
    """A fork server (forkserver.py), started when it is first needed, and again after it had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the session)

    def answer(self, order: Mapping[str, object]) -> tuple[int, int] | None:
        """Have an order carried out; return the first rank that failed and its exit code."""
        answered = False
        try:
            process = self._process or self._start()
            assert process.stdin
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            failed = self._reply(process)
            answered = True
        finally:
            if not answered:  # Ctrl-C, or a test's timeout
                self.stop()
        return failed

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainings.forkserver"],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        atexit.register(self.stop)
        self._reply(self._process)  # it is ready
        return self._process

    def _reply(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout
        if line := process.stdout.readline():
            return json.loads(line)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").splitlines()
        raise TrainingFailed("\n".join(["the fork server ended:", *said[-TAIL_LINES:]]))

    def stop(self) -> None:
        """Kill the server and all of its ranks."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


SERVER = Server()


def environment() -> dict[str, str]:
    """Offline, on the CPU, and with a home for compiled ops that no other version of DeepSpeed shares."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [env.get("PYTHONPATH")])])
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # ninja, when pip installed it
    env.setdefault("TORCH_EXTENSIONS_DIR", str(caches() / digest(versions())))
    return env


def caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmtailor-tests"


def compiler() -> bool:
    path = environment()["PATH"]
    return bool(shutil.which(os.environ.get("CXX", "c++"), path=path) and shutil.which("ninja", path=path))


def missing() -> list[str]:
    """Name the packages that real training needs and does not find."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def missing_optimizers() -> list[str]:
    """Name the optimizers of trainings whose package is missing, or that need a compiler where there is none."""
    lacking = [first for first, package in OPTIMIZERS.items() if importlib.util.find_spec(package) is None]
    if importlib.util.find_spec("triton"):  # a build of torch for GPUs: optimi would use it, also without a GPU
        lacking.append("optimi")
    named = {str(getattr(spec, "optimizer", "")) for spec in ALL.values()}
    found = [name for name in named if name.partition(" ")[0] in lacking]
    return [*found, *(() if compiler() else ("cpu_adam",))]


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in NEEDED} | {"python": sys.version}


def fingerprint(specs: Mapping[str, Training]) -> str:
    """Change whenever the trainings might come out otherwise."""
    program = next(iter(specs.values())).program
    used = ("spec", "models", "common", *USED.get(program, (program,)))
    code = {name: (HERE / f"{name}.py").read_text() for name in used}
    return digest({"specs": [spec.to_json() for spec in specs.values()], "code": code, "versions": versions()})


def digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
