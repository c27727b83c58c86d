"""``llmtailor inspect``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import JSON, PATH


@click.command(
    name="inspect",
    cls=Command,
    exit_codes={
        0: "it can be read, even if something is missing or unusual",
        4: "it can't be read, or is not a checkpoint",
    },
)
@click.argument("checkpoint", type=PATH)
@JSON
def command(checkpoint: Path, as_json: bool) -> None:
    """Describe CHECKPOINT: format, world size, step, param groups, parts with their sizes, and anything unusual.

    Only headers are read; no tensor is loaded.

    \b
    Examples:
      llmtailor inspect runs/x/checkpoint-400
      llmtailor inspect runs/x/checkpoint-400 --json | jq .world_size
    """
    from llmtailor.cli.tables import inspection_text
    from llmtailor.verify.inspect import inspect_checkpoint

    content = inspect_checkpoint(checkpoint)
    click.echo(json.dumps(content, indent=2) if as_json else inspection_text(content))
