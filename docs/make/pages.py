#!/usr/bin/env python3
"""Writes the pages of docs/ that are made from the code.

docs/make/pages.py            writes them
docs/make/pages.py --check    writes nothing; exits with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from llmtailor import errors  # noqa: E402
from llmtailor.cli.main import DEBUG, EXIT_CODES, cli  # noqa: E402
from llmtailor.codes import Code  # noqa: E402

NOTE = "<!-- made by docs/make/pages.py: change the code, and run it -->"
BEGIN, END = "<!-- docs/make/pages.py -->\n\n", "\n<!-- end -->"


def error_tree() -> str:
    """Return the error tree with exit codes and meanings, as it stands in the docstring of llmtailor/errors.py."""
    rows: list[tuple[str, str, str]] = []

    def add(error: type[errors.TailorError], stem: str, below: str) -> None:
        own_code = str(error.exit_code) if "exit_code" in vars(error) else ""
        rows.append((stem + error.__name__, own_code, error.meaning))
        children = [child for child in error.__subclasses__() if child.__module__ == errors.__name__]
        for child in children:
            is_last = child is children[-1]
            add(child, below + ("└── " if is_last else "├── "), below + ("    " if is_last else "│   "))

    add(errors.TailorError, "", "")
    wide = max(len(name) for name, _, _ in rows)
    return "".join(f"{name:<{wide}}  {code:>3}  {meaning}\n" for name, code, meaning in rows)


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, ("---:" if head[0] == "code" else "---", *["---"] * (len(head) - 1)), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def exit_codes() -> str:
    """Return the table of the exit codes that all commands share."""
    return table(("code", "meaning"), list(EXIT_CODES.items()))


def by_command() -> str:
    """Return the exit codes that mean something in particular, command by command."""
    context = click.Context(cli)
    rows: list[tuple[object, ...]] = []
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        for code, meaning in command.exit_codes.items():  # type: ignore[union-attr]
            rows.append((f"`{name}`", code, meaning))
    return table(("command", "code", "meaning"), rows)


def errors_page() -> str:
    then = [(f"{error.exit_code}", error.afterwards) for error in errors.BRANCHES]
    example = errors.SourceError.at(
        "checkpoint-300/model.safetensors",
        "the file is truncated: 6376 bytes instead of 6476",
        "copy the file again from where it was saved, or leave this checkpoint out",
    )
    return f"""{NOTE}

# Errors and exit codes

Every failure ends in a message on stderr and an exit code. You never have to read a traceback.

## A message

```
error: {example}
```

A message names the place (a path, a line of the recipe such as `recipe.yaml:12`, or a flag), the problem, and a fix.
Checks are made in stages: the grammar of the recipe; then the sources, whether they fit together, the selectors and
the output; then the plan and the free space. All problems of a stage are reported together, and the last line counts
them. The exit code is that of the gravest kind, as in the table: the lowest number. Where nothing was written, the
message says `nothing was written`.

## Exit codes

{exit_codes()}
A misspelled option also gives 2, with the usage of the command. A dry run that would fit gives 0.

What the codes mean for each command, as `llmtailor COMMAND --help` shows:

{by_command()}
## What to do

{table(("code", "what to do"), list(then))}
A job script can rerun the same command after 9 and 130, and after 8 once there is space. Other errors need a person.

## stdout and stderr

stdout contains only the result: tables, a recipe, the path that `latest` found, or one JSON document with `--json`.
Errors, notes, the progress bar (on a terminal) and the log go to stderr.

With `--json`, errors are still text on stderr, and stdout stays empty. There are two exceptions. `verify` and
`latest` print their document even when they exit with 7, because the verdict is their result. `thin` and `gc` print
their plan before they carry it out.

## `-v`

`-v` writes the log to stderr, with the time of day: which checkpoints were indexed and what they are, which were
skipped and why, where each part comes from, each file with its bytes and CRC-32, what an interrupted merge left and
how much of it is usable, and how long each stage took. `-vv` adds how much of a long file is durable, and which
states are damaged. Put it before or after the command: `llmtailor -v merge ...` or `llmtailor merge ... -v`.

The log uses Python's `logging`, with a logger for each module below `llmtailor`. From Python, configure logging to
see it: `logging.getLogger("llmtailor").setLevel("INFO")` and a handler.

## {DEBUG}

With `{DEBUG}=1` in the environment, every error except a usage error is preceded by a Python traceback with all
causes. Include it when you report a bug (exit code 1).

## The classes

From Python, the same errors are exceptions. `error.problems` lists the problems: `where`, `what` and `fix` for
people, `code` and `path` for programs. [findings.md](findings.md#codes) lists the codes.

```
{error_tree()}```
"""


def findings_page() -> str:
    """Return docs/findings.md with the table of codes between its marks."""
    text = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    codes = table(("code of a finding", "what it says"), [(f"`{code.value}`", code.meaning) for code in Code])
    return text[: text.index(BEGIN) + len(BEGIN)] + codes + text[text.index(END) :]


PAGES = {
    "docs/errors.md": errors_page,
    "docs/findings.md": findings_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if check and stale:
        sys.exit(f"error: out of date: {', '.join(stale)}\n  fix: run docs/make/pages.py")


if __name__ == "__main__":
    main()
