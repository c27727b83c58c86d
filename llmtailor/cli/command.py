"""The base of every command: ``-v``, exit codes in the help, and notes and a progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from llmtailor.errors import UsageError

if TYPE_CHECKING:
    import logging

    from llmtailor.copying.copy import CopyStats

REMOVED = {
    ("salvage", "--fragments"): "omit it: each part comes from the newest checkpoint that has all of it",
    **{(name, "--failure-step"): "use --at" for name in ("merge", "recipe")},
    **{(name, flag): "use --num-gpu" for name in ("merge", "convert") for flag in ("--num-gpus", "--world-size")},
}
"""Command and option -> the fix of the message that refuses it"""
_LEVELS = "_llmtailor_verbosity"


def _be_verbose(ctx: click.Context, _: click.Parameter, times: int) -> None:
    """Show the package's log on stderr; ``llmtailor -v merge -v`` counts as ``-vv``."""
    meta = ctx.find_root().meta
    meta[_LEVELS] = meta.get(_LEVELS, 0) + times
    if meta[_LEVELS]:
        import logging

        logger = logging.getLogger("llmtailor")
        logger.setLevel(logging.INFO if meta[_LEVELS] == 1 else logging.DEBUG)
        if not logger.handlers:
            logger.addHandler(_handler())


def _handler() -> logging.Handler:
    import logging

    from llmtailor.errors import printable

    class ToStderr(logging.Handler):
        """Writes each line to the current stderr, because rich replaces stderr while a progress bar is shown."""

        def emit(self, record: logging.LogRecord) -> None:
            sys.stderr.write(printable(self.format(record)) + "\n")

    handler = ToStderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    return handler


def verbose_option() -> click.Option:
    """Return the option ``-v``, which is not passed to the command."""
    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=_be_verbose,
        help="Log steps, reasons and times to stderr; -vv logs more.",
    )


class Command(click.Command):
    """A command with ``-v`` whose help lists the exit codes that add to the common table."""

    def __init__(self, *args: Any, exit_codes: Mapping[int, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(verbose_option())
        self.exit_codes = exit_codes

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (fix := REMOVED.get((self.name or "", error.option_name))) is None:
                raise
            raise UsageError.at(error.option_name, f"llmtailor {self.name} has no such option", fix) from error

    def invoke(self, ctx: click.Context) -> Any:
        if sys.stderr.isatty() and not ctx.params.get("quiet"):
            import logging

            waiting = logging.getLogger("llmtailor.waiting")
            if not waiting.hasHandlers():
                waiting.setLevel(logging.INFO)
                waiting.addHandler(_handler())
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_exit_codes(formatter, "Exit codes (for the others, see llmtailor --help)", self.exit_codes)


def command(exit_codes: Mapping[int, str]) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command of its name; ``exit_codes`` are its additions to the common ones."""
    return click.command(cls=Command, exit_codes=exit_codes)


def write_exit_codes(formatter: click.HelpFormatter, head: str, codes: Mapping[int, str]) -> None:
    with formatter.section(head):
        formatter.write_dl([(str(code), meaning) for code, meaning in codes.items()])


def notify(what: object) -> None:
    click.echo(f"note: {what}", err=True)


def show_moved(moved: CopyStats, quiet: bool) -> None:
    """Print on stderr how many bytes of an output were cloned or linked instead of copied."""
    from llmtailor.errors import size

    if moved.cloned_bytes and not quiet:
        click.echo(f"cloned {size(moved.cloned_bytes)}, copied {size(moved.copied_bytes)}", err=True)
    if moved.linked_bytes and not quiet:
        click.echo(f"linked {size(moved.linked_bytes)}, wrote {size(moved.copied_bytes)}", err=True)


@contextmanager
def progress_bar(total_bytes: int | None, *, quiet: bool, label: str = "writing") -> Iterator[Callable[[int], None]]:
    """Yield a function that takes numbers of bytes done, from any thread; silent if stderr is not a terminal.

    ``total_bytes`` is None if unknown.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(label, *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def print_json(content: object) -> None:
    import json

    from llmtailor.documents import encode

    click.echo(json.dumps(encode(content), indent=2))
