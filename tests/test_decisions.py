"""Code decides by types, codes and paths; the texts of a message are for people, and may be worded anew."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from llmtailor.codes import Code
from llmtailor.compose.plan import plan_merge
from llmtailor.compose.write import write
from llmtailor.errors import PathIn, Problem, SourceError, VerificationError
from llmtailor.findings import ERROR, NOTE, Finding
from llmtailor.recipe import Recipe

PACKAGE = Path(__file__).parents[1] / "llmtailor"
TEXTS = {"where", "what", "fix"}
MAY_READ_TEXT = {
    "'os error' not in str(error)": "tokenizers reports the system error only in the text of a bare Exception",
    "problem.what.split(' ')": "lists for people fold problems that differ in one word; nothing else depends on that",
    "word in problem.fix": "the same",
}
"""Expressions that read a text, and why"""
ASKING = {"startswith", "endswith", "removeprefix", "removesuffix", "split", "partition", "rpartition", "find", "index"}


def is_text(node: ast.AST) -> bool:
    """Whether this is a problem's text, or all texts of an error at once: ``x.what``, ``x["what"]``, ``str(error)``."""
    if isinstance(node, ast.Attribute):
        return node.attr in TEXTS
    if isinstance(node, ast.Name):
        return node.id == "where"
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in TEXTS
    is_str = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
    return is_str and isinstance(node.args[0], ast.Name) and node.args[0].id in ("error", "problem", "finding")


def decides(node: ast.AST) -> bool:
    """Whether a text is compared, searched, cut up, or made the key that something is looked up by."""
    if isinstance(node, ast.Compare):
        return any(is_text(side) for side in (node.left, *node.comparators))
    if isinstance(node, ast.SetComp):
        return is_text(node.elt)
    if isinstance(node, ast.DictComp):
        return is_text(node.key)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_regex = node.func.attr in ("match", "fullmatch", "search") and any(map(is_text, node.args))
        return is_regex or (node.func.attr in ASKING and is_text(node.func.value))
    return False


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return the package's calls, comparisons and comprehensions, each with the file that it is in."""
    kinds = (ast.Call, ast.Compare, ast.SetComp, ast.DictComp)
    return [
        (str(path.relative_to(PACKAGE)), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    ]


def test_nothing_is_decided_by_the_text_of_a_message():
    found = [(path, ast.unparse(node)) for path, node in nodes() if decides(node)]
    assert not [f"{path}: {text}" for path, text in found if text not in MAY_READ_TEXT]


@pytest.mark.parametrize(
    "source",
    [
        "problem.where.removeprefix(name)",
        "where.removesuffix(path)",
        "finding.what in told",
        "one.where == name",
        "{notice.what for notice in notices}",
        'notice["where"] == SPLIT',
        '"missing" in str(error)',
        "re.match(pattern, problem.what)",
    ],
)
def test_such_decisions_would_be_seen(source):
    assert decides(ast.parse(source, mode="eval").body)


def test_every_finding_has_a_code():
    made = [
        (path, node)
        for path, node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
    ]
    assert len(made) > 10
    assert not [
        f"{path}: {ast.unparse(node)}"
        for path, node in made
        if len(node.args) <= 3 and not any(word.arg == "code" for word in node.keywords)
    ]


def test_a_finding_keeps_the_code_and_the_path_of_its_problem():
    error = SourceError.at(PathIn("run/checkpoint-4", "latest"), "the file is missing", "copy it", Code.FILE_MISSING)
    finding = Finding.of(error.problems[0], ERROR)
    assert (finding.code, finding.path, finding.severity) == (Code.FILE_MISSING, "latest", ERROR)
    assert finding.problem == error.problems[0]
    assert finding.to_json() == {
        "severity": "error",
        "code": "file-missing",
        "where": "run/checkpoint-4/latest",
        "path": "latest",
        "what": "the file is missing",
        "fix": "copy it",
    }


def test_what_concerns_the_whole_checkpoint_has_no_path():
    assert Problem("run/checkpoint-4", "it is odd").path is None
    assert Finding("run/checkpoint-4", "it is odd", "", Code.OTHER, NOTE).to_json()["path"] is None


def test_codes_are_written_alike():
    for code in Code:
        assert code.value == code.name.lower().replace("_", "-")
        assert code.meaning


FORM_WORDS = {"stage", "is_partial", "variant"}
FORM_FUNCTIONS = {"is_partial", "looks_partial", "is_plain"}
MAY_ASK_FOR_THE_FORM = {
    "compose/plan.py": "--stage names one; a partial base has its output in the run's folder, elastic is no base",
    "runs/folder.py": "a partial checkpoint without its manifest is an unfinished save",
    "runs/prune.py": "thin turns full checkpoints into partial ones",
    "runs/gc.py": "steps count with full checkpoints, and with partial ones alone",
    "runs/scan.py": "a partial checkpoint builds on others, and needs no stock resume",
    "salvage/plan.py": "a full checkpoint needs no salvage; a file's checksum does not say which states it costs",
    "saving/deepspeed.py": "a live DeepSpeed engine cuts by its stage",
    "verify/values.py": "partial checkpoints have checksums of other files, and may lack what is zero elsewhere",
    "verify/verify.py": "no stock resume reads a partial checkpoint, so it is judged as a source",
}
"""The files outside of formats/ and loaders/ that ask for a stage, or whether something is partial or plain, and why"""


def asks_for_the_form(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        tests: list[ast.expr] = []
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        elif isinstance(node, (ast.Compare, ast.BoolOp)):
            tests = [node]
        for inner in (inner for test in tests for inner in ast.walk(test)):
            if isinstance(inner, ast.Attribute) and inner.attr in FORM_WORDS:
                return True
            if isinstance(inner, ast.Name) and inner.id in FORM_FUNCTIONS:
                return True
    return False


def test_few_ask_for_the_form_of_a_checkpoint():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if asks_for_the_form(ast.parse(path.read_text()))
    }
    outside = {path for path in found if path.split("/")[0] not in ("formats", "loaders", "checkpoint")}
    assert outside == MAY_ASK_FOR_THE_FORM.keys() and len(outside) <= 12


@pytest.mark.parametrize(
    "source", ["1 if index.stage else 2", "[x for x in y if x.is_partial]", "is_plain(root) and z"]
)
def test_such_questions_would_be_seen(source):
    assert asks_for_the_form(ast.parse(source))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_an_output_is_known_only_if_the_same_file_of_a_source_has_it(tmp_path, rank):
    """Also among the shards: that another rank's file has it says nothing about this one."""
    pytest.importorskip("torch")
    from helpers.checkpoints import edit, make, optim_states

    base = make(tmp_path, 100)
    for one in (0, 1):
        edit(optim_states(base, one), lambda tree: tree["optimizer_state_dict"].update(dynamic_loss_scale="yes"))
    composition = plan_merge(Recipe("recipe", "", base, (), None, None), tmp_path / "out")
    report = composition.report
    errors = [one for one in report.notices if isinstance(one, Finding) and one.severity == ERROR]
    paths = [optim_states(base, one).relative_to(base).as_posix() for one in (0, 1)]
    assert [one.path for one in errors] == paths
    notice = errors[0]
    moved = replace(notice, where=PathIn("checkpoint-100", paths[rank]))
    notices = tuple(moved if one is notice else one for one in report.notices)
    known = replace(composition, report=replace(report, notices=notices))
    if rank == 0:
        write(known)
        return
    with pytest.raises(VerificationError) as caught:
        write(known)
    assert [(one.path, one.code) for one in caught.value.problems] == [(paths[0], notice.code)]


MOST_CALLS = {
    "names of parts are parsed": ({"Part"}, "model", 13),
    "paths are asked whether they are in a store": ({"RemotePath"}, "storage", 15),
}
"""What is asked in too many places -> the functions, or the class that ``isinstance`` is called with; the room that may
call them freely, and the most calls elsewhere.
The numbers may only fall: lower one when you remove a call."""


@pytest.mark.parametrize("what", MOST_CALLS)
def test_what_is_asked_in_too_many_places_gets_no_more(what):
    names, room, most = MOST_CALLS[what]
    called = [
        path
        for path, node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        for name in [ast.unparse(node.args[-1]) if node.func.id == "isinstance" else node.func.id]
        if name in names
    ]
    assert len([path for path in called if Path(path).parts[0] != room]) == most
