"""How much a process grows during a save in the background."""

from __future__ import annotations

import json
from pathlib import Path

from saving.loop import Loop


def resident(key: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) << 10


def main(folder: Path) -> None:
    run = Loop(folder / "run", hidden=1024, layers=2, policy="full", host_buffer=8 << 20).start()
    run.train(2)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    num_bytes = run.save().wait().num_bytes
    (folder / "found.json").write_text(json.dumps([num_bytes, resident("VmHWM") - before]))
