"""``llmtailor report``"""

from __future__ import annotations

from pathlib import Path

import click

from llmtailor.cli.command import command, progress_bar
from llmtailor.cli.options import PATH, QUIET, RUN_DIR, check_output


@command(
    {
        0: "FILE is written, even if the run is damaged",
        2: "also if jinja2 is not installed",
        4: "RUN_DIR does not exist",
        6: "FILE exists",
    }
)
@RUN_DIR
@click.option(
    "--output", "-o", type=PATH, metavar="FILE", default=Path("report.html"), show_default=True, help="Output file."
)
@click.option(
    "--values",
    is_flag=True,
    help="Also read and compare the newest two saves of every part, in constant memory.",
)
@click.option("--force", is_flag=True, help="Replace FILE.")
@QUIET
def report(run: Path, output: Path, values: bool, force: bool, quiet: bool) -> None:
    """Write a page about a run: saves, ages of parts, the result of a merge, damage.

    FILE is a self-contained HTML file without JavaScript. It shows the times, stalls and sizes of saves, the age and
    change of each part over time, what `merge --run` would compose now, `verify` findings for the newest checkpoints,
    and the loss curve with resumes.

    Without --values, only records and headers are read. Nothing in RUN_DIR is changed.

    \b
    Examples:
      llmtailor report runs/x -o report.html
      llmtailor report runs/x -o report.html --values --force
    """
    from llmtailor.report.gather import gather
    from llmtailor.report.page import page, templates
    from llmtailor.storage.local import replace_durably

    check_output(output, force)
    templates()  # without jinja2, this is refused before anything is read
    with progress_bar(None, quiet=quiet or not values, label="reading") as on_progress:
        facts = gather(run, values, on_progress)
    replace_durably(output, page(facts).encode())
    click.echo(f"wrote {output}", err=True)
