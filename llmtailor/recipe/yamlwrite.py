"""Small pieces of YAML that read back as what they were written from: texts, paths, comments. Pure."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from llmtailor.errors import Problem
from llmtailor.recipe.paths import expand
from llmtailor.recipe.words import Misspelt

WIDTH = 100

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
"""What needs no quotes, in a flow list either: no sign of YAML's, except `-` inside."""
_NULLS = ("null", "Null", "NULL")


def quote(text: str) -> str:
    """Return the YAML of a text: as it is, or in double quotes where YAML would read it as something else."""
    if _PLAIN.fullmatch(text) and text not in _NULLS:
        return text
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """Write what can't be printed as YAML's (and Python's) escapes."""
    return "".join(sign if sign.isprintable() else _escape(ord(sign)) for sign in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def comment(text: str, indent: str = "") -> list[str]:
    """Return the lines of a comment, wrapped."""
    head = f"{indent}# "
    return [
        head + row
        for line in text.splitlines()
        for row in textwrap.wrap(printable(line), WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    ]


def entry(key: str, words: Sequence[str], indent: str) -> list[str]:
    """Return ``key: [a, b]``, a block list if that gets too long, or just ``key: a``."""
    texts = [quote(word) for word in words]
    if len(texts) == 1:
        return [f"{indent}{key}: {texts[0]}"]
    line = f"{indent}{key}: [{', '.join(texts)}]"
    return [line] if len(line) <= WIDTH else [f"{indent}{key}:", *(f"{indent}  - {text}" for text in texts)]


def normal(path: Path) -> Path:
    """Return the path as the parser would: normalised by its letters alone. ValueError if it is relative."""
    if not path.is_absolute():
        raise ValueError(f"not an absolute path: {path}")
    return Path(os.path.normpath(path))


def reference(path: Path, folder: Path | None, problems: list[Problem]) -> str:
    """Return the YAML of a checkpoint; as `path_text`."""
    text = path_text(path, folder, problems)
    return f"{{path: {text}}}" if "+" in text else text  # a plain text with + would be path+lora


def path_text(path: Path, folder: Path | None, problems: list[Problem]) -> str:
    """Return the YAML of a path: relative to `folder` if it lies inside or next to it, else absolute.

    What can't be written is added to `problems`: nothing in the language escapes ``$``.
    """
    text = str(path)
    if folder is not None:
        close = os.path.relpath(path, normal(folder))
        text = text if close.split("/").count("..") > 1 else close
        # tokenizer_source: base means the base, not a folder of that name.
        if text.startswith("~") or not text.strip() or text in ("base", "union"):
            text = f"./{text}"
    shown, fix = printable(str(path)), "rename the folder, or go by a symlink with a plain name"
    try:
        if expand(text, folder or Path("/"), {}) != path:
            problems.append(Problem(shown, "a recipe would read this path as another one", fix))
        text.encode()
    except Misspelt:
        what = "a recipe can't name this path: it would read what follows $ as an environment variable"
        problems.append(Problem(shown, what, fix))
    except UnicodeEncodeError:
        problems.append(Problem(shown, "a recipe can't name this path: it is not UTF-8", fix))
    return quote(text)
