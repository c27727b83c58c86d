"""Paths as a recipe writes them: relative to its folder, with ``~`` and environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llmtailor.recipe.words import Misspelt, quote

_VARIABLE = re.compile(r"\$(?:\{([^}]*)(\}?)|([A-Za-z_][A-Za-z0-9_]*))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expand(text: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """Expand ``~``, ``$VAR`` and ``${VAR}``, and make the path absolute if `folder` is. Raises Misspelt.

    Symlinks stay: a path means what it meant to whoever wrote it. An empty variable is refused like an undefined one,
    because ``${RUN}/checkpoint-300`` would turn into ``/checkpoint-300``.
    """
    if not text.strip() or "\0" in text:
        raise Misspelt("the path is empty" if not text.strip() else "the path holds a NUL byte", "give a folder")
    home = ""
    if text == "~" or text.startswith("~/"):
        home, text = _value("HOME", environ), text[1:]
    elif text.startswith("~"):
        raise Misspelt(
            f"{quote(text.split('/')[0])} is not expanded", "write the home directory in full, or ~/ for your own"
        )
    expanded = home + _VARIABLE.sub(lambda match: _variable(match, environ), text)
    return Path(os.path.normpath(folder / expanded))


def _variable(match: re.Match[str], environ: Mapping[str, str]) -> str:
    braced, closed, plain = match.groups()
    name = plain or braced
    if plain is None and not (closed and _NAME.fullmatch(braced)):
        raise Misspelt(
            f"{quote(match[0])} is not a variable", "write ${NAME} or $NAME; defaults and the like are not known"
        )
    return _value(name, environ)


def _value(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise Misspelt(f"the environment variable {name} is not set", f"export {name}=..., or write the path out")
    if not environ[name]:
        raise Misspelt(f"the environment variable {name} is empty", f"export {name}=..., or write the path out")
    return environ[name]
