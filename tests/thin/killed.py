"""Runs the command line and kills itself, as kill -9 would, before the N-th change of a file.

Python tells its audit hooks of every file that is opened to be written, renamed, linked or removed. With N = 0 nothing
is killed; the number of changes is printed. LLMTAILOR_TEST_NO_EXCHANGE=1 makes it a file system that can't exchange
folders, as NFS.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from llmtailor.cli.main import cli
from llmtailor.storage import local as rename

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}


def run_and_die(limit: int, words: list[str], said: Path) -> NoReturn:
    """Run the command line in this process, which ends with it; what it says on stderr goes to a file."""
    changes = 0

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal changes
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        exchanges = event == "ctypes.dlsym" and "renameat2" in args
        if ((event in CHANGES or writes) and "/run-" in str(args)) or exchanges:
            changes += 1
            if changes == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    if os.environ.get("LLMTAILOR_TEST_NO_EXCHANGE"):
        rename._renameat2 = lambda source, target, flag: False
    sys.addaudithook(watch)
    code = 1
    try:
        cli.main(words, standalone_mode=False)
        print(changes, file=sys.stderr)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        said.write_text(sys.stderr.getvalue())
        os._exit(code)
