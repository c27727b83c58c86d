"""The command line in this process: a command takes milliseconds here, and a second in a process of its own."""

from __future__ import annotations

import logging
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from llmtailor.cli.main import main
from llmtailor.storage import remote


def run_here(*words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Do what ``python -m llmtailor WORDS`` does, down to its exit code. ``env`` is added to the environment."""
    command = ["llmtailor", *map(str, words)]
    out, err = (TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = 0
    package = mock.patch.object(sys.modules["__main__"], "__package__", None)  # by which click names the program
    argv = mock.patch.object(sys, "argv", command)
    with redirect_stdout(out), redirect_stderr(err), argv, package, as_it_was(cwd, env):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    told = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return CompletedProcess(command, code, *told)


def call(
    *words: object, code: int = 0, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Do what `run_here` does, and demand the exit code, and no traceback."""
    done = run_here(*words, cwd=cwd, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def on_terminal(*words: object) -> str:
    """Run a command in a process of its own whose stderr is a terminal; return what that shows."""
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "llmtailor", *map(str, words)]
    env = {**os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal, env=env)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # when the other end is closed
        while data := os.read(main_end, 65536):
            shown += data
    assert process.wait() == 0
    return shown.decode()


@contextmanager
def as_it_was(cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Iterator[None]:
    """Put back what a command changes in its process: the folder, the environment, a signal's handler, the log."""
    before, on_sigterm = Path.cwd(), signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("llmtailor")
    level, handlers = logger.level, list(logger.handlers)
    try:
        with mock.patch.dict(os.environ, env or {}):
            if cwd is not None:
                os.chdir(cwd)
            yield
    finally:
        os.chdir(before)
        signal.signal(signal.SIGTERM, on_sigterm)
        logger.setLevel(level)
        logger.handlers[:] = handlers


def forget_urls() -> None:
    """Forget which URLs were opened, as a new process has."""
    remote._opened.clear()
    remote._made = None
