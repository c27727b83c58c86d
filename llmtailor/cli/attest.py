"""``llmtailor attest``"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from llmtailor.cli.command import command, print_json
from llmtailor.cli.options import JSON, PATH
from llmtailor.cli.run import PROGRAM, find_program, is_first_launcher, prepare
from llmtailor.containers.json import read_json
from llmtailor.documents import document
from llmtailor.errors import SourceError, StorageError, UsageError, VerificationError
from llmtailor.ranks.errors import from_json


@command(
    {
        0: "PROGRAM holds the states of CHECKPOINT",
        2: "also if PROGRAM is not found, does not resume from CHECKPOINT, or ends before its first step",
        4: "CHECKPOINT does not exist, or can't be compared",
        7: "PROGRAM does not hold the states of CHECKPOINT",
    }
)
@click.option("--full", is_flag=True, help="Compare every byte. Default: a sample of every state.")
@JSON
@click.argument("checkpoint", type=PATH)
@PROGRAM
def attest(checkpoint: Path, program: tuple[str, ...], full: bool, as_json: bool) -> None:
    """Run a training PROGRAM until it has resumed from CHECKPOINT, compare what it holds, and end it.

    PROGRAM needs no change. It loads CHECKPOINT with its own code, on all of its ranks, through a transformers Trainer,
    DeepSpeed's engine.load_checkpoint, accelerate's load_state or Lightning's fit. It ends before its first optimizer
    step and saves nothing; its own output goes to stderr.

    \b
    Examples:
      llmtailor attest runs/x/checkpoint-400 -- python train.py --resume_from_checkpoint runs/x/checkpoint-400
      llmtailor attest runs/x/checkpoint-400 --full -- torchrun --nproc_per_node 8 train.py --resume
    """
    from llmtailor.integrations.attested import ATTESTING, Task

    if not checkpoint.exists():
        raise SourceError.at(checkpoint, "it does not exist", "check the path")
    executable = find_program(program[0])
    with tempfile.TemporaryDirectory(prefix="llmtailor-attest-") as folder:
        result = Path(folder) / "result.json"
        environ = {**os.environ, ATTESTING: Task(str(checkpoint.resolve()), str(result)).to_text()}
        prepare(environ, {"attest": "full" if full else "sample"})
        code = _run([executable, *program[1:]], environ)
        outcome: dict[str, Any] | None = read_json(result, result.name) if result.exists() else None
    if outcome is None:
        what = f"PROGRAM ended with exit code {code} before its first optimizer step"
        fix = "see its output; it must resume with a Trainer, Lightning, engine.load_checkpoint or load_state"
        raise UsageError.at(checkpoint, what, fix)
    _show(outcome, as_json, quiet=not is_first_launcher(environ))


def _run(words: list[str], environ: Mapping[str, str]) -> int:
    try:
        process = subprocess.Popen(words, env=dict(environ), stdout=2)  # stdout is for the result
    except OSError as error:
        raise StorageError.at(words[0], f"it can't be started: {error.strerror}", "check the file") from error
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _show(outcome: Mapping[str, Any], as_json: bool, quiet: bool) -> None:
    if "problems" in outcome:
        raise from_json(outcome)
    if not quiet:
        print_json(document("attest/1", outcome["attested"])) if as_json else click.echo("\n".join(outcome["lines"]))
    if not outcome["is_same"]:
        click.get_current_context().exit(VerificationError.exit_code)
