"""Every command's arguments, options and exit codes, as click has them."""

from __future__ import annotations

from typing import Any

import click

from helpers.snapshots import check
from llmtailor.cli.main import EXIT_CODES, cli


def test_commands_and_their_options() -> None:
    context = click.Context(cli, **cli.context_settings)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    found: dict[str, Any] = {"llmtailor": {"params": params(cli, context), "exit codes": list(EXIT_CODES)}}
    for name, command in commands.items():
        assert command is not None
        found[name] = {
            "params": params(command, click.Context(command, parent=context)),
            "exit codes": list(command.exit_codes),  # type: ignore[attr-defined]
            "hidden": command.hidden,
            "deprecated": bool(command.deprecated),
        }
    check("flags", found)


def params(command: click.Command, context: click.Context) -> dict[str, str]:
    return {", ".join([*param.opts, *param.secondary_opts]): describe(param) for param in command.get_params(context)}


def describe(param: click.Parameter) -> str:
    """Return type, default and the like in one line; what is usual is left out."""
    info = param.type.to_info_dict()
    words = [param.param_type_name, param.type.name]
    words += [f"{key}={info[key]!r}" for key in ("choices", "min", "max", "path_type") if info.get(key) is not None]
    if isinstance(param.default, (str, int, float)) and param.default is not False:
        words.append(f"default={param.default!r}")
    for flag in ("required", "multiple", "is_flag", "count", "hidden", "prompt", "is_eager"):
        if getattr(param, flag, False):
            words.append(flag)
    if param.nargs != 1:
        words.append(f"nargs={param.nargs}")
    words += [f"envvar={param.envvar}"] if param.envvar else []
    words += [f"metavar={param.metavar}"] if param.metavar else []
    return " ".join(words)
