"""Runs llmtailor in processes that fail on demand: a server that forks, so that a trial takes milliseconds.

    python driver.py          reads requests per line (JSON), runs them at once, answers with a list of exit codes
    torchrun driver.py FILE   runs the request of this rank in a list (JSON); without its fault if it is started again

The child's ``os`` functions are wrapped; the package itself knows nothing of this. A request is a `Request`.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import importlib
import json
import os
import pathlib
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import llmtailor
from helpers.places import ROOT, SUPPORT

NAMES = ("mkdir", "rmdir", "unlink", "rename", "renameat2")
CHANGES = ("open", "write", "ftruncate", "fsync", "fdatasync", *NAMES)
"""What changes the disk; ``open`` counts if it makes a file."""
READS = ("preadv", "readv")
TICK_S, SIGN_S, LEAVING_S = 0.02, 1.0, 0.5
"""How often ranks of a shared merge look at each other, and how long they wait for those that may have died"""


@dataclass(frozen=True)
class Request:
    """A call of the command line, and what goes wrong in it."""

    arguments: list[str]
    cwd: str
    fault: str = ""
    """``kill``, ``SIGTERM``, ``SIGINT``, ``SIGSTOP``, or the name of an errno. Without ``at``: ``short`` (reads
    and writes), ``slow``, ``EINTR`` (a storm of signals), ``trace`` and ``count`` (into ``record``)."""
    at: int = 0
    """At which operation, from 1 on."""
    lasting: bool = False
    """Whether an errno stays from then on."""
    only: tuple[str, ...] = CHANGES
    """What counts as an operation."""
    under: str = ""
    """Only on paths that begin so."""
    no_exchange: bool = False
    """Whether the file system lacks renameat2."""
    small: bool = True
    """Whether buffers and the distance of marks are tiny, so that small files have many of both."""
    said: str = ""
    """File for stdout and stderr."""
    record: str = ""
    """File for the count, or the trace."""


class Injector:
    """Wraps the functions of ``os``."""

    def __init__(self, request: Request):
        self.request = request
        self.count = 0
        self.lock = threading.RLock()
        self.paths: dict[int, str] = {}
        self.trace: list[tuple[Any, ...]] = []
        self.original = {name: getattr(os, name) for name in (*CHANGES, *READS, "link", "close") if hasattr(os, name)}

    def install(self) -> None:
        for name, make in {
            "open": self.open, "close": self.close, "write": self.write, "ftruncate": self.ftruncate,
            "fsync": self.fsync, "fdatasync": self.fsync, "mkdir": self.on_path("mkdir"),
            "rmdir": self.on_path("rmdir"), "unlink": self.on_path("unlink"), "remove": self.on_path("unlink"),
            "rename": self.rename, "replace": self.rename, "preadv": self.on_read("preadv"),
            "readv": self.on_read("readv"), "link": self.link,
        }.items():  # fmt: skip
            setattr(os, name, make)
            accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps functions of its own
            if accessor is not None and hasattr(accessor, name):
                setattr(accessor, name, staticmethod(make))
        real = ctypes.CDLL(None, use_errno=True)

        class Library:
            def __init__(self, *_: object, **__: object) -> None:
                pass

            renameat2 = staticmethod(lambda *arguments: self.renameat2(real, *arguments))

        ctypes.CDLL = Library  # type: ignore[assignment,misc]

    def step(self, name: str, path: str) -> None:
        """Count an operation, and fail if it is the one; the lock is held."""
        request = self.request
        if name not in request.only or not path.startswith(request.under):
            return
        self.count += 1
        if request.fault == "slow":
            time.sleep(0.05)
        if request.fault in ("SIGTERM", "SIGINT", "SIGSTOP") and self.count == request.at:
            os.kill(os.getpid(), getattr(signal, request.fault))
        elif self.count == request.at or (request.lasting and self.count > request.at):
            if request.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif hasattr(errno, request.fault) and request.fault != "EINTR":
                code = getattr(errno, request.fault)
                raise OSError(code, os.strerror(code), path)

    def note(self, *event: Any) -> None:
        if self.request.fault == "trace":
            self.trace.append(event)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = self._path(path, dir_fd)
        if not flags & os.O_CREAT:
            fd = self.original["open"](path, flags, mode, dir_fd=dir_fd)
            self.paths[fd] = name
            return fd
        with self.lock:
            is_new = not os.path.lexists(name)
            if is_new:
                self.step("open", name)
            fd = self.original["open"](path, flags, mode, dir_fd=dir_fd)
            self.paths[fd] = name
            if is_new:
                self.note("create", name, fd)
            else:
                self.note("open", name, fd)
            return fd

    def close(self, fd: int) -> None:
        self.note("close", fd)
        self.original["close"](fd)

    def write(self, fd: int, data: Any) -> int:
        if fd not in self.paths:  # a pipe or a terminal
            return self.original["write"](fd, data)
        with self.lock:
            if self.request.fault == "kill" and self.count + 1 == self.request.at and "write" in self.request.only:
                self.original["write"](fd, memoryview(data)[: len(data) // 2])  # torn
            self.step("write", self.paths[fd])
            if self.request.fault == "short":
                data = memoryview(data)[: max(1, len(data) // 3)]
            at = os.lseek(fd, 0, os.SEEK_CUR)
            count = self.original["write"](fd, data)
            self.note("write", fd, at, bytes(data[:count]))
            return count

    def ftruncate(self, fd: int, length: int) -> None:
        with self.lock:
            self.step("ftruncate", self.paths[fd])
            self.original["ftruncate"](fd, length)
            self.note("truncate", fd, length)

    def fsync(self, fd: int) -> None:
        with self.lock:
            self.step("fsync", self.paths[fd])
            # not done: it takes most of the time, and only a power cut would show the difference
            self.note("fsync", fd, self.paths[fd])

    def rename(self, source: Any, target: Any, **others: Any) -> None:
        with self.lock:
            self.step("rename", os.fspath(source))
            self.original["rename"](source, target, **others)
            self.note("rename", os.path.abspath(source), os.path.abspath(target), False)

    def link(self, source: Any, target: Any, **others: Any) -> None:
        with self.lock:
            self.step("link", os.fspath(target))
            self.original["link"](source, target, **others)

    def renameat2(self, library: Any, _: int, source: bytes, __: int, target: bytes, flag: int) -> int:
        with self.lock:
            if self.request.no_exchange:
                ctypes.set_errno(errno.EINVAL)
                return -1
            try:
                self.step("renameat2", os.fsdecode(source))
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1
            code = int(library.renameat2(_, source, __, target, flag))
            if code == 0:
                self.note("rename", os.fsdecode(source), os.fsdecode(target), flag == 2)
            return code

    def on_path(self, name: str) -> Any:
        def call(path: Any, *arguments: Any, dir_fd: int | None = None) -> None:
            where = self._path(path, dir_fd)
            with self.lock:
                self.step(name, where)
                self.original[name](path, *arguments, dir_fd=dir_fd)
                self.note(name, where)

        return call

    def on_read(self, name: str) -> Any:
        def call(fd: int, buffers: Any, *arguments: Any) -> int:
            with self.lock:
                self.step(name, self.paths.get(fd, ""))
            if self.request.fault == "short":
                buffers = [memoryview(buffer)[: max(1, len(buffer) // 3)] for buffer in buffers]
            return self.original[name](fd, buffers, *arguments)

        return call

    def _path(self, path: Any, dir_fd: int | None) -> str:
        return os.path.abspath(path if dir_fd is None else Path(self.paths[dir_fd]) / path)


def run(request: Request) -> None:
    """Be the child; does not return."""
    injector = Injector(request)
    said = os.open(request.said or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(said, number)
    os.chdir(request.cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["llmtailor", *request.arguments]
    from llmtailor.cli.main import main
    from llmtailor.compose import write as writing
    from llmtailor.copying import copy as runner
    from llmtailor.copying import pool, streams
    from llmtailor.copying import recheck as sources
    from llmtailor.ranks import watch
    from llmtailor.salvage import replace as replacing

    watch.TICK_S, watch.SIGN_S, writing.LEAVING_S = TICK_S, SIGN_S, LEAVING_S
    pool.MAX_WRITERS = 2  # so that what is done at an operation depends less on the machine
    replacing.SETTLED_S = 0.0  # what tests damage has just been written
    if request.small:
        streams.BUFFER_BYTES, runner.MARK_BYTES, sources.CHUNK_BYTES = 2048, 5000, 1000
    if request.fault == "EINTR":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    injector.install()
    code = 1
    try:
        main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    if request.record:
        content = injector.trace if request.fault == "trace" else injector.count
        Path(request.record).write_bytes(pickle.dumps(content))
    os._exit(code)


def ours() -> list[str]:
    """Return all modules that a command may import, whatever they are called; those for trainings import torch."""
    found = [module.name for module in pkgutil.walk_packages(llmtailor.__path__, "llmtailor.")]
    apart = ("saving", "training", "integrations", "__main__")
    return [name for name in found if name.split(".")[1] not in apart and not name.endswith("worker")]


def load() -> None:
    """Load whatever a command needs, once; no thread is started."""
    for name in ("isal.isal_zlib", "numpy", "xxhash", "yaml", *ours()):
        importlib.import_module(name)


def serve() -> None:
    load()
    gc.freeze()  # children share these pages as long as nothing is written to them
    for line in sys.stdin:
        environment, requests = json.loads(line)
        print(json.dumps(run_all(environment, [Request(**request) for request in requests])), flush=True)


def run_all(environment: Mapping[str, str], requests: Sequence[Request]) -> list[int]:
    """Run each request in a child, at once; return exit codes: -9 if killed, -19 if stopped, and killed then."""
    launch = {**environment, **serve_store(len(requests))} if environment else {}
    numbers = {}
    for number, request in enumerate(requests):
        child = os.fork()
        if child == 0:
            if launch:
                os.environ.update(launch, RANK=str(number))
            run(request)
        numbers[child] = number
    codes, stopped = [0] * len(requests), set()
    while len(numbers) > len(stopped):
        child, status = os.waitpid(-1, os.WUNTRACED)
        if child not in numbers:
            continue
        if os.WIFSTOPPED(status):
            stopped.add(child)
        else:
            codes[numbers.pop(child)] = os.waitstatus_to_exitcode(status)
    for child in (*stopped, *([int(launch["STORE"])] if launch else ())):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if child in stopped:
            codes[numbers[child]] = -signal.SIGSTOP
    return codes


def serve_store(world_size: int) -> dict[str, str]:
    """Start what torchrun's agent serves its ranks; return their environment."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    is_ready, ready = os.pipe()
    if (child := os.fork()) == 0:
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        os.write(ready, b"1")
        while store:
            signal.pause()
    os.read(is_ready, 1)
    os.close(is_ready)
    os.close(ready)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "STORE": str(child)}
    return {**agent, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


@cache
def started() -> subprocess.Popen[str]:
    """Start the server; one is enough for all tests of this process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT)))}
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # which ends it; these are called in reverse
    return process


def ask(environment: Mapping[str, str], requests: Sequence[Request]) -> list[int]:
    """Have the server carry them out at once; return the exit codes, -9 if one was killed.

    With an environment they are ranks of one launch.
    """
    process = started()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([dict(environment), list(map(asdict, requests))]) + "\n")
    process.stdin.flush()
    return list(json.loads(process.stdout.readline()))


if __name__ == "__main__":
    if "RANK" in os.environ:
        request = Request(**json.loads(Path(sys.argv[1]).read_text())[int(os.environ["RANK"])])
        run(request if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else replace(request, fault=""))
    serve()
