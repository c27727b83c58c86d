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
        0: "OUT is complete; with --dry-run: it fits; with --run also if there is nothing to merge",
        7: "the output did not read back as planned and was removed; OUT is absent",
        8: "also with --dry-run, if the output does not fit",
    },
)
@click.argument("config", type=PATH, required=False, metavar="[CONFIG]")
@click.argument("out", type=PATH, required=False)
@target_options
@click.option(
    "--allow-split", is_flag=True, help="Allow a part's weights and optimizer to come from different checkpoints."
)
@click.option("--run", type=PATH, metavar="RUN_DIR", help="Choose the sources in a run's folder, without CONFIG.")
@choosing_options
def command(config: Path | None, out: Path | None, run: Path | None, allow_split: bool, **options: Any) -> None:
    """Compose a checkpoint from a recipe CONFIG, or from the sources that --run chooses, and write it to OUT.

    OUT must be a new folder. It defaults to the recipe's `output`, else to BASE-merged beside the base; if the base is
    a partial checkpoint, to checkpoint-STEP in the run's folder, where a resume looks for it.
    OUT appears only when it is complete; the sources are only read.

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
    """Return the recipe and the output; with --run the only argument is OUT."""
    from llmtailor.cli.options import given, read_choosing

    if run is None:
        if config is None:
            raise UsageError.at("merge", "it needs a recipe", "name a recipe file, or a run's folder with --run")
        if foreign := given(choosing):
            raise UsageError.at(foreign[0], "it needs --run RUN_DIR", "omit it, or put it into the recipe")
        return config, out
    if out is not None:
        raise UsageError.at("--run", "it can't be combined with CONFIG", f"omit {config}")
    from llmtailor.runs.scan import recipe_for_run

    trust = choosing["trust_unrecorded"]
    return recipe_for_run(run, choosing["at"], read_choosing(choosing), trust_unrecorded=trust), config
