"""``llmtailor inspect``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmtailor.cli.command import Command


@click.command(
    name="inspect",
    cls=Command,
    exit_codes={
        0: "it can be read, also if something is missing or odd",
        4: "it can't be read, or is no checkpoint",
    },
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON on stdout.")
def command(checkpoint: Path, as_json: bool) -> None:
    """Say what CHECKPOINT is: format, world size, step, param groups, parts and their bytes, what is odd.

    Only headers are read, no tensor is loaded.

    \b
    Examples:
      llmtailor inspect runs/x/checkpoint-400
      llmtailor inspect runs/x/checkpoint-400 --json | jq .world_size
    """
    from llmtailor.cli.tables import inspection_text
    from llmtailor.verify.inspect import inspect_checkpoint

    content = inspect_checkpoint(checkpoint)
    click.echo(json.dumps(content, indent=2) if as_json else inspection_text(content))
