"""``llmtailor verify``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import JSON, PATH
from llmtailor.errors import VerificationError


@click.command(
    name="verify",
    cls=Command,
    exit_codes={
        0: "CHECKPOINT is resumable, or partial and intact, possibly with warnings",
        2: "also if --resume-smoke can't be done here",
        4: "it is not a checkpoint, or of an unsupported kind",
        7: "CHECKPOINT is not resumable, or partial and damaged",
    },
)
@click.argument("checkpoint", type=PATH)
@click.option("--deep", is_flag=True, help="Also read every tensor: values, checksums, weights against masters.")
@click.option("--resume-smoke", is_flag=True, help="Make a trial resume on CPU ranks with the stock engine.")
@JSON
@click.pass_context
def command(ctx: click.Context, checkpoint: Path, deep: bool, resume_smoke: bool, as_json: bool) -> None:
    """Check whether an unmodified Trainer or DeepSpeed will resume from CHECKPOINT correctly.

    An error means that a resume fails or silently continues from a different state; a warning means that it loses
    something. Without --deep, only headers are read, which takes seconds for any size.

    A partial checkpoint never resumes by itself. It is intact if a composite can be made with it.

    --resume-smoke builds the model from config.json, loads CHECKPOINT with the stock engine in one CPU process per
    rank, and compares the state of the engine with the files.

    \b
    Examples:
      llmtailor verify runs/x/checkpoint-400
      llmtailor verify runs/x/checkpoint-400 --deep
      llmtailor verify runs/x/checkpoint-400 --json | jq -r .verdict
    """
    from llmtailor.cli.running import progress_bar
    from llmtailor.verify.report import to_json, to_text
    from llmtailor.verify.verify import verify_checkpoint

    total = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) if deep else 0
    with progress_bar(total, quiet=not deep, label="reading") as on_progress:
        verdict = verify_checkpoint(checkpoint, deep, on_progress)
    if resume_smoke:
        from llmtailor.verify.smoke import try_resume

        verdict = try_resume(verdict)
    click.echo(json.dumps(to_json(verdict), indent=2) if as_json else to_text(verdict))
    ctx.exit(0 if verdict.is_intact else VerificationError.exit_code)
