"""A program for forkserver.py: rank 0 hangs, and rank 1 too, unless there is a file that tells it to kill itself.

Each leaves a file with its process id as name beside that file.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def main(kill: Path) -> None:
    (kill.parent / str(os.getpid())).touch()
    if os.environ["RANK"] == "1" and kill.exists():
        while not (kill.parent / "hangs").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {os.environ['RANK']} hangs", flush=True)
    (kill.parent / "hangs").touch()
    time.sleep(3600)
