"""``llmtailor merge``"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import Command
from llmtailor.cli.options import PATH, choosing_options, target_options
from llmtailor.errors import UsageError

if TYPE_CHECKING:
    from llmtailor.recipe.recipe import Recipe


@click.command(
    name="merge",
    cls=Command,
    exit_codes={
        0: "OUT is complete; with --dry-run: it would fit; with --run also if there is nothing to merge",
        7: "what was written does not read back as planned, and was removed; OUT is absent",
        8: "also with --dry-run, if it would not fit",
    },
)
@click.argument("config", type=PATH, required=False, metavar="[CONFIG]")
@click.argument("out", type=PATH, required=False)
@target_options
@click.option(
    "--allow-split", is_flag=True, help="Let weights and optimizer of a part come from different checkpoints."
)
@click.option("--run", type=PATH, metavar="RUN_DIR", help="Choose from a run's folder; no CONFIG.")
@choosing_options
def command(config: Path | None, out: Path | None, run: Path | None, allow_split: bool, **options: Any) -> None:
    """Compose the checkpoint that the recipe CONFIG describes into OUT, or the one that --run chooses.

    OUT is a new folder. Without it, the recipe's `output` is taken, or else BASE-merged beside the base; if the base is
    a partial checkpoint, it is checkpoint-STEP in the run's folder, where a resume looks for it.
    Nothing appears there until it is complete; the sources are only read.

    \b
    Examples:
      llmtailor merge recipe.yaml --dry-run
      llmtailor merge recipe.yaml runs/x/checkpoint-400-merged --num-gpu 8
      llmtailor merge recipe.yaml --json | jq '.parts[] | {part, source, step}'
      llmtailor merge --run runs/x
      llmtailor merge --run runs/x --at 400 --strategy parity out/checkpoint-400
    """
    from llmtailor.cli.running import run_merge, take_target

    target = take_target(options, allow_split=allow_split)
    recipe, out = _recipe(config, out, run, options)
    if run is not None and out is None:
        target = replace(target, options=replace(target.options, reuse=True))
    run_merge(recipe, out, target)


def _recipe(
    config: Path | None, out: Path | None, run: Path | None, choosing: dict[str, Any]
) -> tuple[Path | Recipe, Path | None]:
    """The recipe and the output; with --run the only argument is OUT."""
    from llmtailor.cli.options import given, read_choosing

    if run is None:
        if config is None:
            raise UsageError.at("merge", "it needs a recipe", "name a recipe file, or a run's folder with --run")
        if foreign := given(choosing):
            raise UsageError.at(foreign[0], "it needs --run RUN_DIR", "leave it out, or write it into the recipe")
        return config, out
    if out is not None:
        raise UsageError.at("--run", "it takes the place of CONFIG", f"leave {config} out")
    from llmtailor.runs.scan import recipe_for_run

    trust = choosing["trust_unrecorded"]
    return recipe_for_run(run, choosing["at"], read_choosing(choosing), trust_unrecorded=trust), config
