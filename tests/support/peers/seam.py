"""What the plugins share. They run inside a peer's own test process, or in one of its ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOG = "LLMTAILOR_PEERS_LOG"
"""Names the file that gets a line per conversion, so that the driver sees that the peer's tests went through it"""


def convert(source: Path, out: Path, *hops: tuple[object, ...], tag: str = "") -> None:
    """Convert ``source`` by one set of options after another. ``out``, or ``source`` itself, becomes the last result.

    ``tag`` is the folder inside it that the peer's test asks for; a converted DeepSpeed tag folder is one of these.
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        at = source
        for number, options in enumerate(hops):
            command = ["convert", at, at := Path(folder, f"hop-{number}"), *options]
            words = [sys.executable, "-m", "llmtailor", *map(str, command)]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(words[2:])}: exit code {done.returncode}\n{done.stderr}"
        if out == source:
            shutil.rmtree(source)
        (at / tag).rename(out)
    with Path(os.environ[LOG]).open("a") as log:
        log.write(f"{out}\n")


def name_params(model: Any, optimizer: Any) -> None:
    """Do what ``Adam(model.named_parameters())`` does: without a config.json nothing else states the params' order."""
    names = {id(param): name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(param)] for param in group["params"]]
