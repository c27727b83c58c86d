"""The command group, and the one place where errors become text and exit codes."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any

import click

from llmtailor import __version__
from llmtailor.errors import Interrupted, StorageError, TailorError

_COMMANDS = {
    "merge": "compose one resumable checkpoint from several",
    "convert": "write a checkpoint anew for other GPUs or another ZeRO stage",
    "recipe": "write a recipe for a run's checkpoints, or explain one",
    "inspect": "say what a checkpoint is",
    "verify": "say whether a checkpoint will resume to what it claims",
    "latest": "print a run's newest checkpoint that verifies",
    "salvage": "compose what is left of a run whose newest checkpoint is damaged",
    "thin": "free disk space: thin out a run's older full checkpoints",
    "gc": "free disk space: remove partial checkpoints that nothing needs",
}
_EXIT_CODES = """\b
Exit codes: 0 done, 1 unexpected, 2 usage, 3 recipe, 4 source unreadable,
5 sources do not fit together, 6 target exists or is locked, 7 verification
failed, 8 no space or I/O error, 130 interrupted. After 8 and 130 the same
command goes on where it was."""


class _LazyGroup(click.Group):
    """Imports a command only when it runs, so that ``--help`` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"llmtailor.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmtailor")
@click.option("--traceback", is_flag=True, help="Show a Python traceback with every error.")
def cli(traceback: bool) -> None:
    """Cut, compose and resume LLM training checkpoints.

    \b
    Examples:
      llmtailor inspect runs/x/checkpoint-400
      llmtailor verify runs/x/checkpoint-400 --deep
      llmtailor convert runs/x/checkpoint-400 out/checkpoint-400 --num-gpu 4
      llmtailor recipe runs/x --strategy parity -o recipe.yaml
      llmtailor merge recipe.yaml --dry-run
      llmtailor merge recipe.yaml runs/x/checkpoint-400-merged --num-gpu 8
      llmtailor salvage runs/x --dry-run
    """


def main() -> None:
    """Run the command line; every error ends here."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail(Interrupted.at("", "interrupted", "run the same command again"))
    except TailorError as error:
        _fail(error)
    except BrokenPipeError:  # the reader of stdout has gone, as in `llmtailor inspect x | head`
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        _fail(StorageError.at(error.filename or "", error.strerror or str(error), "check the disk and the permissions"))
    except Exception as error:
        _fail(
            TailorError.at(
                "",
                f"unexpected {type(error).__name__}: {error}",
                "this is a bug: report it with the output of --traceback",
            )
        )


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


def _fail(error: TailorError) -> None:
    if "--traceback" in sys.argv[1:]:
        import traceback

        traceback.print_exc()
    for problem in error.problems:
        click.echo(f"error: {problem}", err=True)
    if len(error.problems) > 1:
        click.echo(f"{len(error.problems)} problems; nothing was written", err=True)
    sys.exit(error.exit_code)
