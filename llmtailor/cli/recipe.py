"""``llmtailor recipe``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import PATH, choosing_options
from llmtailor.errors import TargetError, UsageError


@click.command(
    name="recipe",
    cls=Command,
    exit_codes={
        0: "the recipe is written; a comment in it lists the checkpoints that can't be used",
        4: "no checkpoint of RUN_DIR can be used",
        6: "FILE exists",
    },
)
@click.argument("run", type=PATH, required=False, metavar="[RUN_DIR]")
@choosing_options
@click.option("--explain", type=PATH, metavar="CONFIG", help="Write CONFIG in normal form.")
@click.option("--allow-split", is_flag=True, help="--explain: a part's weights and optimizer may differ in source.")
@click.option("--output", "-o", type=PATH, metavar="FILE", help="Write to FILE instead of stdout.")
@click.option("--force", is_flag=True, help="Replace FILE.")
def command(
    run: Path | None, explain: Path | None, allow_split: bool, output: Path | None, force: bool, **options: Any
) -> None:
    """Write a recipe for the checkpoints in RUN_DIR, or explain one.

    Checkpoints that can't be used are skipped; a comment at the top of the recipe lists them with the reasons.

    \b
    Examples:
      llmtailor recipe runs/x --strategy parity -o recipe.yaml
      llmtailor recipe runs/x --at 400 --strategy filter --first 2 --last 2 --every 5
      llmtailor recipe runs/x --from-flags flags.jsonl --failure-step 160 --base runs/x/checkpoint-100
      llmtailor recipe runs/x --map parts.json
      llmtailor recipe --explain configs/llmtailor-original.yaml
    """
    from llmtailor.cli.options import given, read_choosing
    from llmtailor.compose.plan import explain_recipe
    from llmtailor.runs.scan import recipe_for_run

    if (run is None) == (explain is None):
        raise UsageError.at("recipe", "it takes either RUN_DIR or --explain CONFIG", "give one of them")
    if output is not None and output.exists() and not force:
        raise TargetError.at(output, "the file already exists", "choose another one, or use --force")
    folder = output.absolute().parent if output else None
    if explain is not None:
        if foreign := given(options):
            raise UsageError.at(foreign[0], "it can't be combined with --explain", "omit it")
        text = explain_recipe(explain, folder, allow_split=allow_split)
    else:
        assert run is not None
        trust = options["trust_unrecorded"]
        text = recipe_for_run(run, options["at"], read_choosing(options), folder, trust_unrecorded=trust).text
    if output is None:
        click.echo(text, nl=False)
    else:
        from llmtailor.storage.local import replace_durably

        replace_durably(output, text.encode())
        click.echo(f"wrote {output}", err=True)
