"""Every refusal in the package says where, what and how to mend it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "llmtailor"
NOWHERE = {
    "cli/main.py": "an interrupt, or a bug: there is no place to name",
    "ranks/board.py": "an interrupt, or a bug: there is no place to name",
    "engine/pool.py": "an interrupt has no place",
}
"""Files that may leave ``where`` empty in as many words, and why"""


def modules() -> list[Path]:
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def refusals(source: str) -> Iterator[tuple[int, dict[str, ast.expr]]]:
    """Yield line and fields of each `Problem`, `Finding`, ``SomeError.at``, `damaged` (which knows the fix) and
    `SelectorError` (whose place its caller knows) that is made."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        fields = ("where", "what", "fix")
        match node.func:
            case ast.Name(id="Problem" | "Finding"):
                pass
            case ast.Name(id="SelectorError"):
                fields = ("what", "fix")
            case ast.Name(id="damaged"):
                fields = ("where", "what")
            case ast.Attribute(attr="at", value=ast.Name(id=name)) if name[0].isupper() or name == "cls":
                pass
            case _:
                continue
        named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        found = dict(zip(fields, node.args, strict=False)) | named
        yield node.lineno, {field: found.get(field, ast.Constant("")) for field in fields}


def lacking(source: str) -> list[tuple[int, str]]:
    return [
        (line, field)
        for line, fields in refusals(source)
        for field, value in fields.items()
        if isinstance(value, ast.Constant) and not str(value.value or "").strip()
    ]


def test_every_refusal_says_where_what_and_how_to_mend_it():
    found = {(str(path), *one) for path in modules() for one in lacking((PACKAGE / path).read_text(encoding="utf-8"))}
    allowed = {one for one in found if one[0] in NOWHERE and one[2] == "where"}
    assert not [f"{path}:{line}: no {field}" for path, line, field in sorted(found - allowed)]
    assert {path for path, *_ in allowed} == NOWHERE.keys(), "a file that needs no exception any more"


def test_the_test_sees_them():
    assert sum(1 for path in modules() for _ in refusals((PACKAGE / path).read_text(encoding="utf-8"))) > 400
    assert lacking("SourceError.at(path, 'damaged')") == [(1, "fix")]
    assert lacking("Problem(where='x', what=f'{x}', fix=' ')") == [(1, "fix")]
    assert lacking("Finding('', what, fix, ERROR)") == [(1, "where")]
    assert lacking("SelectorError(what)") == [(1, "fix")]
    assert lacking("damaged('', what, Code.TIED)") == [(1, "where")]
    assert not lacking("folder.at(step); Problem(where, what, fix)")


MAY_BE_REMOVED = {
    "cli/run.py": "a file that the command itself made: a shell removes it",
    "compose/write.py": "an unfinished merge: its bytes are those of the sources",
    "engine/staging.py": "the same, and the mark of a process that is dead",
    "recipe/resolve.py": "an entry of a recipe",
    "recipe/strategies.py": "a line of a map",
    "training.py": "an entry of a config",
    **dict.fromkeys(("cli/thin.py", "cli/main.py", "runs/gc.py"), "what a command does"),
    **dict.fromkeys(("salvage/replace.py", "storage/remote.py"), "what has failed"),
}
"""Files that say ``remove`` to users, and what is meant"""


def test_no_text_says_to_remove_a_file_that_may_be_the_only_copy():
    words = re.compile(r"\b(?:remove|delete|rm)\b")
    found = set()
    for path in modules():
        tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts)
        if any(isinstance(node.value, str) and words.search(node.value) for node in constants):
            found.add(str(path))
    assert found <= MAY_BE_REMOVED.keys()
