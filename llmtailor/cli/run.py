"""``llmtailor run``"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import click

from llmtailor.cli.command import command, notify
from llmtailor.cli.options import COUNT, PATH
from llmtailor.errors import StorageError, UsageError

_STARTUP = Path(__file__).parents[1] / "integrations" / "startup"
_OF_NODE = ("NODE_RANK", "SLURM_NODEID")
"""These identify the launcher of a node among those of one job."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""The ranks of processes, by torchrun, Slurm, Open MPI and MPICH"""
_UNASKED = "LLMTAILOR_UNASKED"
"""The variable with a file that `integrations.startup` removes once a process looks for the Trainer"""
_NEVER = (
    "note: llmtailor run: no Python process on this machine imported transformers' Trainer, so no saver was added.\n"
    "  fix: call attach or saver_for in the program, see docs/saving.md; python -I, -S and -E disable llmtailor run"
)
_NEVER_ATTESTED = (
    "note: llmtailor run: no Python process on this machine imported transformers' Trainer, DeepSpeed or accelerate, "
    "so nothing was attested.\n"
    "  fix: call llmtailor.attest in the program, see docs/attest.md; python -I, -S and -E disable llmtailor run"
)
PROGRAM = click.argument(
    "program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENTS]..."
)


@command(
    {
        0: "PROGRAM ended with 0; once it has started, the other codes are also PROGRAM's",
        2: "also if PROGRAM is not found, or an option is out of range",
        4: "--resume: the newest state can't be composed; PROGRAM was not started",
    }
)
@click.option("--policy", metavar="POLICY", help="Policy that chooses the parts of each save. Default: rounded.")
@click.option(
    "--layout",
    type=click.Choice(["partial", "stock"]),
    help="partial checkpoints (the default), or the program's own ones, saved in the background.",
)
@click.option("--save-steps", metavar="N", help="Optimizer steps between two saves, or auto. Default: the script's.")
@click.option(
    "--overhead", metavar="SHARE", help="--save-steps auto: fraction of the training time that saving may cost."
)
@click.option(
    "--keep-composable", type=COUNT, metavar="N", help="Delete partial checkpoints that the newest N steps don't need."
)
@click.option(
    "--on-restart",
    type=click.Choice(["refuse", "compose"]),
    help="If the run folder already holds partial checkpoints: refuse to start, or resume from the newest state.",
)
@click.option(
    "--resume",
    type=PATH,
    metavar="RUN_DIR",
    help="Compose the newest state of RUN_DIR first. Implies --on-restart compose.",
)
@click.option(
    "--attest",
    type=click.Choice(["sample", "full"]),
    is_flag=False,
    flag_value="sample",
    help="Save nothing; only compare what PROGRAM has resumed with its checkpoint, by a sample or every byte.",
)
@click.option(
    "--on-mismatch",
    type=click.Choice(["warn", "stop"]),
    help="If a resumed training does not hold its checkpoint: warn (the default), or stop it with exit code 7.",
)
@PROGRAM
def run(resume: Path | None, attest: str | None, program: tuple[str, ...], **options: object) -> None:
    """Run a training PROGRAM with a saver in every transformers Trainer, in every rank.

    PROGRAM needs no change: the saver is added when it imports transformers, with the options given here or in the
    environment (LLMTAILOR_POLICY, ...; see docs/saving.md). A saver attached by the program takes precedence. The exit
    code is PROGRAM's.

    With --attest, a resume by a Trainer, DeepSpeed's engine.load_checkpoint, accelerate's load_state or Lightning's fit
    is attested and nothing is saved; see docs/attest.md.

    \b
    Examples:
      llmtailor run --policy parity --save-steps 50 -- python train.py --output_dir runs/x
      llmtailor run --save-steps 50 -- torchrun --nproc_per_node 8 train.py
      llmtailor run --save-steps 50 -- llamafactory-cli train config.yaml
      llmtailor run --save-steps auto --resume runs/x -- torchrun --max-restarts 3 train.py --output_dir runs/x
      llmtailor run --attest --on-mismatch stop -- torchrun --nproc_per_node 8 train.py --resume
    """
    environ = dict(os.environ)
    given = {name: str(value) for name, value in options.items() if value is not None}
    if attest is not None:
        from llmtailor.integrations.attested import ATTESTING, Task

        named = [*given, *(["resume"] if resume is not None else [])]
        if useless := [f"--{name.replace('_', '-')}" for name in named if name != "on_mismatch"]:
            raise UsageError.at("--attest", f"nothing is saved with it, so {useless[0]} has no effect", "omit one")
        given["attest"], environ[ATTESTING] = attest, Task().to_text()
    if resume is not None:
        given["on_restart"] = "compose"
    prepare(environ, given)
    executable = find_program(program[0])
    if resume is not None and is_first_launcher(environ):
        _compose(resume)
    end = _watch(environ, _NEVER if attest is None else _NEVER_ATTESTED)
    try:
        os.execve(executable, [*program], environ)
    except OSError as error:
        Path(environ[_UNASKED]).unlink()
        raise StorageError.at(executable, f"it can't be started: {error.strerror}", "check the file") from error
    finally:
        os.close(end)


run.allow_interspersed_args = False  # the options behind PROGRAM are its own


def find_program(name: str) -> str:
    """Return the path of a program. Raises UsageError."""
    if (path := shutil.which(name)) is None:
        raise UsageError.at(name, "there is no such program", "check the name, or give its path")
    return path


def prepare(environ: MutableMapping[str, str], given: dict[str, str]) -> None:
    """Add the import hook that attaches the saver, and the saver's options, to an environment. Raises UsageError."""
    from llmtailor.saving.arguments import PREFIX, check_arguments, from_environment

    environ.update({PREFIX + name.upper(): text for name, text in given.items()})
    check_arguments(from_environment(environ))
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(_STARTUP), *paths]))


def _watch(environ: MutableMapping[str, str], note: str) -> int:
    """Start a shell that prints a note, once PROGRAM has ended, if no process of it looked for the Trainer.

    PROGRAM replaces this process, so the note must come from another one. Return the end of a pipe that PROGRAM must
    inherit: the shell waits until it is closed. It is no child of PROGRAM, which may wait for all of its children.
    """
    descriptor, environ[_UNASKED] = tempfile.mkstemp(prefix="llmtailor-run-")
    os.close(descriptor)
    script = 'exec 3<&0; (cat <&3; test -e "$1" && rm "$1" && echo "$2" >&2) >/dev/null &'
    read, end = os.pipe()
    words = ["/bin/sh", "-c", script, "sh", environ[_UNASKED], note]
    subprocess.run(words, stdin=read, stdout=subprocess.DEVNULL, check=True, start_new_session=True)
    os.close(read)
    os.set_inheritable(end, True)
    return end


def is_first_launcher(environ: MutableMapping[str, str]) -> bool:
    """Return whether this is the only launcher of a job, or that of its first node."""
    return all(environ.get(name, "") in ("", "0") for name in (*_OF_NODE, *_RANKS))


def _compose(folder: Path) -> None:
    from llmtailor.runs.composing import compose_newest

    newest = compose_newest(folder)
    if newest is None:
        notify(f"{folder} has no complete partial checkpoint; nothing was composed")
    else:
        notify(f"{'composed' if newest.is_new else 'the newest state is in'} {newest.path}")
