"""``llmtailor latest``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import AT, JSON, RUN_DIR, TRUST_UNRECORDED
from llmtailor.errors import VerificationError


@click.command(
    name="latest",
    cls=Command,
    exit_codes={
        0: "a checkpoint's path is printed",
        4: "RUN_DIR does not exist",
        7: "RUN_DIR has no resumable checkpoint; no path is printed",
    },
)
@RUN_DIR
@AT
@click.option("--deep", is_flag=True, help="Also read every tensor; see `llmtailor verify --help`.")
@TRUST_UNRECORDED
@JSON
def command(run: Path, at: int | None, deep: bool, trust_unrecorded: bool, as_json: bool) -> None:
    """Print the newest checkpoint-N in RUN_DIR that verifies as resumable.

    Checkpoints of attempts abandoned by a resume from an earlier step are skipped.
    stdout has only the path; the reasons why newer checkpoints were skipped go to stderr.

    \b
    Examples:
      python train.py --resume_from_checkpoint "$(llmtailor latest runs/x)"
      llmtailor latest runs/x --at 400 --deep
    """
    from llmtailor.cli.running import progress_bar
    from llmtailor.runs.latest import find_latest, latest_to_json
    from llmtailor.verify.report import to_text

    with progress_bar(None, quiet=not deep, label="reading") as on_progress:
        found = find_latest(run, at, deep, on_progress, trust_unrecorded=trust_unrecorded)
    for verdict in (*found.passed_over, *([found.verdict] if found.verdict and found.verdict.findings else ())):
        click.echo(to_text(verdict), err=True)
    if as_json:
        click.echo(json.dumps(latest_to_json(found), indent=2))
    elif found.path is not None:
        click.echo(str(found.path))
    how = f"llmtailor merge --run {run}{f' --at {at}' if at is not None else ''}"
    if found.newer_partial is not None:
        click.echo(f"note: {found.newer_partial} is newer; compose a checkpoint of its step: {how}", err=True)
    if found.path is None:
        until = f" at or before step {at}" if at is not None else ""
        what = f"none of the {len(found.passed_over)} checkpoints{until} is resumable"
        fix = f"compose one: {how if found.newer_partial else f'llmtailor salvage {run}'}; or restart the training"
        raise VerificationError.at(run, what if found.passed_over else f"it has no checkpoint-N{until}", fix)
