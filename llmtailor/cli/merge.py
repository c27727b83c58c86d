"""``llmtailor merge``, ``convert`` and ``recipe``"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtailor.cli.command import command, notify, print_json, progress_bar, show_moved
from llmtailor.cli.options import (
    CHOOSING,
    LOCATION,
    PATH,
    STAGES,
    check_output,
    choose,
    choosing_options,
    given,
    target_options,
)
from llmtailor.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from llmtailor.compose.plan import MergePlan, OpenedSources
    from llmtailor.ranks.team import Ranks
    from llmtailor.recipe import Recipe


_WRITING = {
    7: "the output did not read back as planned and was removed; OUT is absent",
    8: "also with --dry-run, if the output does not fit",
}


@command(
    {
        0: "OUT is complete; with --dry-run: it fits; with --run: also if there is nothing to merge",
        **_WRITING,
    }
)
@click.argument("config", type=LOCATION, required=False, metavar="[CONFIG]")
@click.argument("out", type=LOCATION, required=False)
@target_options
@click.option(
    "--allow-split", is_flag=True, help="Allow a part's weights and optimizer to come from different checkpoints."
)
@click.option("--run", type=LOCATION, metavar="RUN_DIR", help="Choose the sources in a run folder, without CONFIG.")
@choosing_options
def merge(config: Path | None, out: Path | None, run: Path | None, allow_split: bool, **options: Any) -> None:
    """Compose a checkpoint from a recipe CONFIG, or from the sources chosen by --run, and write it to OUT.

    OUT must be a new folder. Default: the recipe's `output`, else BASE-merged next to the base, or for a partial base
    checkpoint-STEP in the run folder, where a resume finds it. OUT appears only when it is complete. The sources are
    not changed.

    \b
    Examples:
      llmtailor merge --run runs/x
      llmtailor merge --run runs/x --at 400 --dry-run
      llmtailor merge recipe.yaml --dry-run
      llmtailor merge recipe.yaml runs/x/checkpoint-400-merged --num-gpu 8
      llmtailor merge recipe.yaml --json | jq '.parts[] | {part, source, step}'
    """
    from llmtailor.runs.guards import explain_deletions

    choosing = {name: options.pop(name) for name in [*options] if name in CHOOSING}
    options["step"] = options["step"] or ("base" if run is None else "auto")
    if run is not None:
        if out is not None:
            raise UsageError.at("--run", "it can't be combined with CONFIG", f"omit {config}")
        from llmtailor.runs.composing import without_damaged

        options |= {"allow_split": allow_split, "reuse": config is None}

        with _ranks_for(options) as ranks, explain_deletions(run, choosing["also"]):
            without_damaged(lambda index: _merge(partial(choose, run, choosing, index=index), config, ranks, **options))
        return
    if config is None:
        raise UsageError.at("merge", "it needs a recipe", "name a recipe file, or a run folder with --run")
    if foreign := given(choosing):
        raise UsageError.at(foreign[0], "it needs --run RUN_DIR", "omit it, or put it into the recipe")
    if config.is_dir():
        fix = f"use llmtailor convert {shlex.quote(str(config))}, or for a run llmtailor merge --run RUN_DIR"
        raise RecipeError.at(config, "it is a folder, not a recipe", fix)
    with _ranks_for(options) as ranks:
        _merge(lambda: (config, None), out, ranks, allow_split=allow_split, **options)


@command(
    {
        0: "OUT is complete; with --dry-run: it fits",
        **_WRITING,
    }
)
@click.argument("checkpoint", type=LOCATION)
@click.argument("out", type=LOCATION, required=False)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Dtype of the weights; with --to deepspeed, of the run. Master weights and moments are unchanged.",
)
@target_options
def convert(checkpoint: Path, out: Path | None, dtype: str | None, **options: Any) -> None:
    """Convert CHECKPOINT to another format, number of GPUs, ZeRO stage or set of param groups, and write it to OUT.

    This is a merge with one source: every state is copied unchanged, in one pass, with constant memory. Default for
    OUT: CHECKPOINT-converted next to CHECKPOINT.

    \b
    Examples:
      llmtailor convert runs/x/checkpoint-400 runs/x-on-4/checkpoint-400 --num-gpu 4
      llmtailor convert runs/x/checkpoint-400 out/checkpoint-400 --stage 2 --num-gpu 16
      llmtailor convert runs/x/checkpoint-400 out/checkpoint-400 --groups layer
      llmtailor convert runs/x/checkpoint-400 out/checkpoint-400 --to fsdp --num-gpu 8
    """
    from llmtailor.model.dtypes import SPELLINGS
    from llmtailor.recipe import Recipe

    base = checkpoint.absolute()
    out = out or base.with_name(f"{base.name}-converted")
    weights = SPELLINGS[dtype] if dtype else None
    recipe = Recipe(name=f"convert {checkpoint}", base=base, dtype=weights)
    options["step"] = options["step"] or "base"
    with _ranks_for(options) as ranks:
        _merge(lambda: (recipe, None), out, ranks, **options)


@contextmanager
def _ranks_for(options: dict[str, Any]) -> Iterator[Ranks]:
    """Yield the ranks that share the command, of which only rank 0 prints; takes ``--distributed`` out of the options.

    A dry run is not shared: the other ranks end at once.
    """
    from llmtailor.ranks.team import Ranks

    if not options.pop("distributed"):
        yield Ranks()
        return
    from llmtailor.ranks.torchrun import find_rank, launched_ranks

    rank, _ = find_rank(os.environ)
    if options["dry_run"]:
        if rank != 0:
            raise click.exceptions.Exit
        yield Ranks()
        return
    with launched_ranks() as ranks, nullcontext() if ranks.is_first else _printing_nothing():
        yield ranks


@contextmanager
def _printing_nothing() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _merge(
    choose: Callable[[], tuple[Recipe | Path, OpenedSources | None]],
    out: Path | None,
    ranks: Ranks,
    *,
    stage: str,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Plan, print the plan, and write the output unless this is a dry run; takes the `target_options`.

    ``choose`` returns the recipe, and its sources if they are open.
    """
    from llmtailor.cli.tables import parts_text, plan_text
    from llmtailor.compose.plan import Options, plan_merge
    from llmtailor.compose.report import to_json
    from llmtailor.compose.resume import choose_output, preview, with_output
    from llmtailor.compose.write import bytes_to_move, check_room, write

    wanted = Options(stage=STAGES[stage], replace=force, **options)
    plans: list[MergePlan] = []

    def plan() -> None:
        recipe, opened = choose()
        plans.append(plan_merge(recipe, out, wanted, opened))

    ranks.run_on_all(plan)  # nothing is returned: plans are large
    composition, there = plans[0], None
    if wanted.reuse:

        def choose_name() -> tuple[Path, str | None]:
            named, there = choose_output(plans[0])
            return named.out, there

        named, there = ranks.run_on_first(choose_name)
        composition = with_output(composition, named)
    report = composition.report

    def print_report(moved: Any = None) -> None:
        # the path to resume from, whether written now or already there
        named = {"out": there, "is_there_already": True} if there else {"is_there_already": False}
        print_json({**to_json(report), **named, "moved": moved})

    if as_json:
        if dry_run or there:
            print_report()
    elif dry_run:
        if not quiet:
            click.echo(plan_text(report))
    elif not quiet and not there:
        click.echo(parts_text(report))
    for notice in report.shown_notices:
        notify(notice)
    if there:
        what = f"{there} is complete and has the newest state of every part: nothing to merge"
        click.echo(what, err=as_json or dry_run)
    elif dry_run:
        if sentence := preview(composition):
            notify(sentence)
        check_room(composition)
        click.echo("dry run: nothing was written", err=True)
    else:
        with progress_bar(bytes_to_move(composition), quiet=quiet) as on_progress:
            moved = write(composition, on_progress, notify, ranks)
        show_moved(moved, quiet)
        click.echo(f"wrote {report.out}", err=as_json)
        if as_json:
            print_report(moved)


@command(
    {
        0: "the recipe is written; a comment in it lists unusable checkpoints",
        4: "no checkpoint in RUN_DIR is usable",
        6: "FILE exists",
    }
)
@click.argument("run", type=LOCATION, required=False, metavar="[RUN_DIR]")
@choosing_options
@click.option("--explain", type=PATH, metavar="CONFIG", help="Write CONFIG in the short form.")
@click.option(
    "--allow-split", is_flag=True, help="--explain: allow different sources for a part's weights and optimizer."
)
@click.option("--output", "-o", type=PATH, metavar="FILE", help="Write to FILE instead of stdout.")
@click.option("--force", is_flag=True, help="Replace FILE.")
def recipe(
    run: Path | None, explain: Path | None, allow_split: bool, output: Path | None, force: bool, **options: Any
) -> None:
    """Write a recipe for the checkpoints in RUN_DIR, or explain one.

    Unusable checkpoints are skipped; a comment at the top of the recipe lists them with the reasons.

    \b
    Examples:
      llmtailor recipe runs/x --strategy parity -o recipe.yaml
      llmtailor recipe runs/x --at 400 --strategy filter --first 2 --last 2 --every 5
      llmtailor recipe runs/x --from-flags flags.jsonl --at 160 --base runs/x/checkpoint-100
      llmtailor recipe --explain configs/llmtailor-original.yaml
    """
    from llmtailor.compose.plan import explain_recipe
    from llmtailor.runs.guards import explain_deletions
    from llmtailor.storage.local import replace_durably

    if (run is None) == (explain is None):
        raise UsageError.at("recipe", "it takes either RUN_DIR or --explain CONFIG", "give one of them")
    if output is not None:
        check_output(output, force)
    folder = output.absolute().parent if output else None
    if explain is not None:
        if foreign := given(options):
            raise UsageError.at(foreign[0], "it can't be combined with --explain", "omit it")
        text = explain_recipe(explain, folder, allow_split=allow_split)
    else:
        assert run is not None
        with explain_deletions(run, options["also"]):
            text = choose(run, options, folder)[0].text
    if output is None:
        click.echo(text, nl=False)
    else:
        replace_durably(output, text.encode())
        click.echo(f"wrote {output}", err=True)
