"""Bounds on lines, and on modules without a test file of their name: a raise needs a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.places import ROOT

BUDGET = Path(__file__).with_name("budget.txt")
WITHOUT_TESTS = Path(__file__).with_name("without_tests.txt")


def entries(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("folder", ["llmtailor", "tests"])
def test_the_lines_are_within_the_budget(folder):
    raises = [line.split(maxsplit=2) for line in entries(BUDGET) if line.split()[0] == folder]
    assert all(len(words) == 3 for words in raises), "a line of tests/budget.txt is: folder, lines, what they buy"
    most = int(raises[-1][1])
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= most, f"{folder}/ has {lines:,} lines, {lines - most:,} too many: cut, or raise tests/budget.txt"


def test_every_module_has_a_test_file_of_its_name():
    lacking = set()
    for path in (ROOT / "llmtailor").rglob("*.py"):
        module = path.relative_to(ROOT / "llmtailor")
        if path.stem.startswith("_") or (ROOT / "tests" / module.parent / f"test_{module.name}").exists():
            continue
        lacking.add(module.as_posix())
    listed = entries(WITHOUT_TESTS)
    assert listed == sorted(listed)
    assert not lacking.difference(listed), "write tests/ROOM/test_MODULE.py; tests/without_tests.txt only gets shorter"
    assert not set(listed) - lacking, "they have tests, or are gone: take them out of tests/without_tests.txt"
