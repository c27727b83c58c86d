"""``llmtailor inspect``, ``verify`` and ``latest``"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from llmtailor.cli.command import command, notify, print_json, progress_bar
from llmtailor.cli.options import AT, FOR, JSON, LOCATION, RUN, TRUST_UNRECORDED
from llmtailor.errors import UnsupportedCheckpoint, VerificationError


@command(
    {
        0: "it can be read, even if something is missing or unusual",
        4: "it can't be read, or is not a checkpoint",
    }
)
@click.argument("checkpoint", type=LOCATION)
@FOR
@JSON
def inspect(checkpoint: Path, framework: str | None, as_json: bool) -> None:
    """Describe CHECKPOINT: format, world size, step, param groups, parts with their sizes, and anything unusual.

    Only headers are read; no tensor is loaded.

    \b
    Examples:
      llmtailor inspect runs/x/checkpoint-400
      llmtailor inspect runs/x/checkpoint-400 --json | jq .world_size
    """
    from llmtailor.cli.tables import inspection_text
    from llmtailor.verify.inspect import inspect_checkpoint

    content = inspect_checkpoint(checkpoint, framework)
    print_json(content) if as_json else click.echo(inspection_text(content))


@command(
    {
        0: "CHECKPOINT is resumable, or partial and intact, possibly with warnings",
        4: "it is not a checkpoint, or its kind is not supported",
        7: "CHECKPOINT is not resumable, or partial and damaged",
    }
)
@click.argument("checkpoint", type=LOCATION)
@click.option(
    "--deep", is_flag=True, help="Also read every tensor: check values, checksums, and weights against masters."
)
@FOR
@JSON
@click.pass_context
def verify(ctx: click.Context, checkpoint: Path, deep: bool, framework: str | None, as_json: bool) -> None:
    """Check whether an unmodified Trainer, accelerate or DeepSpeed will resume from CHECKPOINT correctly.

    An error means that a resume fails or silently continues from a wrong state; a warning means that it loses
    something. Without --deep, only headers are read, which takes seconds for any size.

    A partial checkpoint can't be resumed from directly. It is intact if it can be a source of a composite.

    Whether your program holds these states once it has loaded them is for `llmtailor attest` to say.

    \b
    Examples:
      llmtailor verify runs/x/checkpoint-400
      llmtailor verify runs/x/checkpoint-400 --deep
      llmtailor verify runs/x/checkpoint-400 --json | jq -r .verdict
    """
    from llmtailor.storage.remote import RemotePath
    from llmtailor.verify.verify import to_json, to_text, verify_checkpoint

    total = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) if deep else 0
    with progress_bar(total, quiet=not deep, label="reading") as on_progress:
        verdict = verify_checkpoint(checkpoint, deep, on_progress, framework=framework)
    if as_json:
        print_json(to_json(verdict))
    else:
        click.echo(to_text(verdict))
        if verdict.is_resumable and not isinstance(checkpoint, RemotePath):  # attesting needs it on this machine
            attest = f"llmtailor attest {shlex.quote(verdict.name)} -- PROGRAM"
            click.echo(f"files only; {attest} compares what your training loads of them")
    ctx.exit(0 if verdict.is_intact else VerificationError.exit_code)


@command(
    {
        0: "a checkpoint's path is printed",
        4: "RUN_DIR does not exist, or its newest checkpoint can't be judged; no path is printed",
        7: "RUN_DIR has no resumable checkpoint; no path is printed",
    }
)
@RUN
@AT
@click.option("--deep", is_flag=True, help="Also read every tensor; see `llmtailor verify --help`.")
@TRUST_UNRECORDED
@FOR
@JSON
def latest(run: Path, at: int | None, deep: bool, trust_unrecorded: bool, framework: str | None, as_json: bool) -> None:
    """Print the newest checkpoint in RUN_DIR that verifies as resumable.

    Checkpoints of abandoned attempts are skipped. Only the path is printed on stdout; the reasons for skipping newer
    checkpoints go to stderr. If it can't be judged whether a checkpoint is resumable, no older one is printed, unless
    you ask for it with --at.

    \b
    Examples:
      newest=$(llmtailor latest runs/x) && python train.py --resume_from_checkpoint "$newest"
      llmtailor latest runs/x --at 400 --deep
    """
    from llmtailor.runs.scan import find_latest, latest_to_json
    from llmtailor.verify.verify import to_text

    with progress_bar(None, quiet=not deep, label="reading") as on_progress:
        newest = find_latest(run, at, deep, on_progress, trust_unrecorded=trust_unrecorded, framework=framework)
    for verdict in (*newest.passed_over, *([newest.verdict] if newest.verdict and newest.verdict.findings else ())):
        click.echo(to_text(verdict), err=True)
    if as_json:
        print_json(latest_to_json(newest))
    elif newest.path is not None:
        click.echo(f"{newest.path}")
    name = shlex.quote(f"{run}")
    how = f"llmtailor merge --run {name}{f' --at {at}' if at is not None else ''}"
    if newest.newer_partial is not None:
        notify(f"{newest.newer_partial} is newer; compose a checkpoint of its step: {how}")
    if newest.unjudged is not None:
        what = "it can't be judged whether it is resumable, so no older checkpoint is printed"
        fix = "if your program can read it, resume from it; for an older one, use --at with an earlier step"
        raise UnsupportedCheckpoint.at(newest.unjudged.name, what, fix)
    if newest.path is None:
        until = f" at or before step {at}" if at is not None else ""
        what = f"none of the {len(newest.passed_over)} checkpoints{until} is resumable"
        fix = f"compose one: {how if newest.newer_partial else f'llmtailor salvage {name}'}; or restart the training"
        raise VerificationError.at(run, what if newest.passed_over else f"it has no checkpoint{until}", fix)
