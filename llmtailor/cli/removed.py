"""Options that llmtailor had and has no more: giving one is refused with what does its job now."""

from __future__ import annotations

from typing import Any

import click

from llmtailor.errors import UsageError

_CLONE = "use --clone: on a file system with reflinks, unchanged data takes no space"
_ALONE = "omit it: one process does the work; only merge and convert run on several ranks"
_BY_HAND = "write a recipe with parts:, starting from the output of llmtailor recipe RUN_DIR -o recipe.yaml"
REMOVED: dict[tuple[str, str], str] = {
    **{
        (command, option): _BY_HAND
        for command in ("merge", "recipe")
        for option in ("--map", "--over", "--strategy spread", "--strategy explicit")
    },
    ("policy", "--gpus"): "omit it: --write-gbps is the speed of all ranks together",
    ("policy", "--copy-gbps"): "omit it: copying to host memory is assumed to overlap with the next step",
    ("policy", "--drift"): "omit it: it was only for the removed policy update; use adaptive",
    ("policy", "--svg"): "omit it, or draw a chart from --json",
    ("policy", "--force"): "omit it: no file is written",
    ("thin", "--distributed"): _ALONE,
    ("verify", "--distributed"): _ALONE,
    ("salvage", "--distributed"): _ALONE,
    ("merge", "--link"): _CLONE,
    ("convert", "--link"): _CLONE,
}
"""(command, ``--option`` or ``--option VALUE``) -> what to do instead, as the fix of a message.

A value is refused only where its option's type is `Choice`.
"""


def refuse_removed(command: str | None, option: str) -> None:
    """Raise UsageError if a command had this option, or this value of it, once."""
    if (fix := REMOVED.get((command or "", option))) is not None:
        raise UsageError.at(option, f"this option of llmtailor {command} was removed", fix)


class Choice(click.Choice[str]):
    """A choice some of whose values were removed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(param, click.Option) and ctx is not None:
            refuse_removed(ctx.command.name, f"{param.opts[0]} {value}")
        return super().convert(value, param, ctx)
