"""Ask transformers about models in a fork of this process, which has imported it: a fresh one takes 3 s for that.

That a process of its own is asked, and what happens when it is killed or slow, is shown with `in_a_fresh_process`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from llmtailor.formats import param_names as model


def _run(command: list[str], *, env: dict[str, str], cwd: str, **_: Any) -> CompletedProcess[str]:
    """Do what ``subprocess.run([python, "-c", PROGRAM, *ARGUMENTS])`` does."""
    _, flag, program, *arguments = command
    assert flag == "-c"
    import transformers  # noqa: F401

    paths = [Path(cwd, name) for name in ("stdout", "stderr")]
    child = os.fork()
    if child == 0:
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(path.open("w")) for path in paths)
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            code = 1
            try:
                os.environ.update(env)
                os.chdir(cwd)
                sys.argv = ["-c", *arguments]
                exec(program, {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush()
                err.flush()
                os._exit(code)
    _, status = os.waitpid(child, 0)
    return CompletedProcess(command, os.waitstatus_to_exitcode(status), *(path.read_text() for path in paths))


@pytest.fixture(scope="session", autouse=True)
def answers_from_a_fork() -> Iterator[None]:
    stand_in = SimpleNamespace(**{**vars(subprocess), "run": _run})
    with mock.patch.object(model, "subprocess", stand_in):
        yield


@contextlib.contextmanager
def in_a_fresh_process() -> Iterator[None]:
    """Ask as outside of tests."""
    with mock.patch.object(model, "subprocess", subprocess):
        yield
