"""Runs the command line and kills itself, as kill -9 would: ``killed.py N WORDS..`` before the N-th change of a file.

Python tells its audit hooks of every file that is opened to be written, renamed, linked or removed. With N = 0 nothing
is killed; the number of changes is printed. LLMTAILOR_TEST_NO_EXCHANGE=1 makes it a file system that can't exchange
folders, as NFS.
"""

from __future__ import annotations

import os
import signal
import sys

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}
changes = 0


def watch(event: str, args: tuple[object, ...]) -> None:
    global changes
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    exchanges = event == "ctypes.dlsym" and "renameat2" in args
    if ((event in CHANGES or writes) and "/run-" in str(args)) or exchanges:
        changes += 1
        if changes == limit:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    from llmtailor.cli.main import cli
    from llmtailor.storage import local as rename

    if os.environ.get("LLMTAILOR_TEST_NO_EXCHANGE"):
        rename._renameat2 = lambda source, target, flag: False
    limit = int(sys.argv[1])
    sys.addaudithook(watch)
    cli.main(sys.argv[2:], standalone_mode=False)
    print(changes, file=sys.stderr)
