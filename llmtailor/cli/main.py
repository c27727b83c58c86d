"""The command group, and the only place where errors become text and exit codes."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import click

from llmtailor import __version__
from llmtailor.cli.command import verbose_option, write_exit_codes
from llmtailor.errors import BRANCHES, Interrupted, StorageError, TailorError, masked

_COMMANDS = {
    "merge": ("merge", "compose one resumable checkpoint from several"),
    "convert": ("merge", "convert a checkpoint to another format, number of GPUs or ZeRO stage"),
    "run": ("run", "run a training program with a saver"),
    "attest": ("attest", "prove that a training program resumes a checkpoint correctly, and end it"),
    "recipe": ("merge", "write a recipe for a run's checkpoints, or explain one"),
    "inspect": ("verify", "describe a checkpoint"),
    "diff": ("diff", "show how two checkpoints differ"),
    "verify": ("verify", "check whether a checkpoint resumes correctly"),
    "latest": ("verify", "print a run's newest resumable checkpoint"),
    "salvage": ("salvage", "recover a run whose newest checkpoint is damaged"),
    "thin": ("thin", "free disk space: reduce a run's older full checkpoints"),
    "gc": ("thin", "free disk space: remove unneeded partial checkpoints"),
    "report": ("report", "write an HTML page about a run"),
    "policy": ("policy", "compare policies before training: bytes, intervals, cost"),
}
"""The file of each command in `llmtailor.cli`, and what it does"""
DIFFERENT = 10
BROKEN_PIPE = 141
_ALLOCATIONS = 50_000
"""After so many, garbage is collected: plans have millions of objects, of which hardly any lie in cycles"""
EXIT_CODES = {
    0: "done",
    **{error.exit_code: error.meaning for error in BRANCHES if error.exit_code < DIFFERENT},
    DIFFERENT: "the two checkpoints compared by `llmtailor diff` differ",
    Interrupted.exit_code: Interrupted.meaning,
    BROKEN_PIPE: "the output pipe was closed, as by `head`",
}
"""The exit codes of every command; each command lists its additions to them"""
DEBUG = "LLMTAILOR_DEBUG"
"""The environment variable that adds a traceback to every error, unless empty or 0"""


class _LazyGroup(click.Group):
    """Imports a command only when it runs, so that ``--help`` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        file, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"llmtailor.cli.{file}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            if close := difflib.get_close_matches(args[0], _COMMANDS, n=1):
                raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in _COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_exit_codes(formatter, "Exit codes", EXIT_CODES)
        formatter.write_paragraph()
        formatter.write_text(
            "After exit codes 8, 9 and 130, rerun the same command to resume. "
            f"{DEBUG}=1 in the environment adds a Python traceback to every error."
        )


@click.group(cls=_LazyGroup, params=[verbose_option()], context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmtailor")
def cli() -> None:
    """Cut, compose and resume LLM training checkpoints.

    \b
    Examples:
      llmtailor merge --run runs/x
      llmtailor merge recipe.yaml runs/x/checkpoint-400-merged --num-gpu 8
      llmtailor convert runs/x/checkpoint-400 out/checkpoint-400 --num-gpu 4
      llmtailor verify runs/x/checkpoint-400 --deep
      llmtailor inspect runs/x/checkpoint-400
      llmtailor diff runs/x/checkpoint-300 runs/x/checkpoint-400
      llmtailor salvage runs/x --dry-run
    """


def main() -> None:
    """Run the command line, and turn every error into a message and an exit code."""
    _open_streams()
    signal.signal(signal.SIGTERM, _terminate)
    gc.set_threshold(_ALLOCATIONS)
    try:
        code = cli.main(standalone_mode=False)
    except SystemExit as end:  # click exits with 1 when the output's reader is gone: `llmtailor inspect x | head -1`
        sys.exit(BROKEN_PIPE if end.code == 1 else end.code)
    except click.ClickException as error:
        text = StringIO()
        error.show(text)
        _say(text.getvalue().rstrip("\n"))
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail(Interrupted.at("", "interrupted", "rerun the same command"))
    except TailorError as error:
        _fail(error)
    except OSError as error:
        _fail(StorageError.at(error.filename or "", error.strerror or str(error), "check the disk and permissions"))
    except Exception as error:
        fix = f"this is a bug in llmtailor: please report it with the output of {DEBUG}=1"
        _fail(TailorError.at("", f"unexpected {type(error).__name__}: {error}", fix))
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Give closed standard streams to the null device: else files would get their numbers, and be written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    with suppress(OSError):  # the exit code says it, too
        click.echo(masked(text), err=True)


def _fail(error: TailorError) -> None:
    from llmtailor.findings import folded

    if os.environ.get(DEBUG, "") not in ("", "0"):
        import traceback

        traceback.print_exc()
    if error.is_reported:
        sys.exit(error.exit_code)
    for problem in folded(error.problems):
        _say(f"error: {problem}")
    if len(error.problems) > 1:
        _say(f"{len(error.problems)} problems" + ("" if error.came_late else "; nothing was written"))
    sys.exit(error.exit_code)
