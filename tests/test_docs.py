"""What is said about errors and exit codes is what the code has: the made pages, docstrings and helps."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import llmtailor
from docs.make import pages, rooms, save_and_compose, timeline
from docs.make.pages import PAGES, error_tree
from helpers.places import ROOT
from llmtailor import errors
from llmtailor.cli.main import EXIT_CODES, cli


def test_the_pages_are_current():
    stale = [name for name, make in PAGES.items() if (ROOT / name).read_text(encoding="utf-8") != make()]
    assert not stale, "run docs/make/pages.py"


def test_the_check_of_a_page_that_is_not(tmp_path, monkeypatch):
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    pages.main()
    (tmp_path / "docs" / "errors.md").unlink()
    with pytest.raises(SystemExit) as told:
        pages.main()
    assert told.value.code == "error: out of date: docs/errors.md\n  fix: run docs/make/pages.py"
    assert not (tmp_path / "docs" / "errors.md").exists()
    monkeypatch.setattr("sys.argv", ["pages.py"])
    pages.main()
    assert (tmp_path / "docs" / "errors.md").read_bytes() == (ROOT / "docs" / "errors.md").read_bytes()


def test_the_docstring_draws_the_tree():
    drawn = "".join(f"    {line}\n" for line in error_tree().splitlines())
    assert errors.__doc__ is not None
    assert f"::\n\n{drawn}\n" in errors.__doc__


def test_every_class_with_a_code_of_its_own_is_a_branch():
    for module in pkgutil.walk_packages(llmtailor.__path__, "llmtailor."):
        heavy = ("llmtailor.saving.", "llmtailor.background.", "llmtailor.live.", "llmtailor.integrations.")
        if not module.name.startswith(heavy) and not module.name.endswith(("worker", "__main__")):
            importlib.import_module(module.name)

    def below(error):
        return {error}.union(*map(below, error.__subclasses__()))

    codes = [error.exit_code for error in errors.BRANCHES]
    assert codes == sorted(set(codes))
    assert {error for error in below(errors.TailorError) if "exit_code" in vars(error)} == set(errors.BRANCHES)


def test_the_help_has_every_code():
    shown = CliRunner().invoke(cli, ["--help"]).output
    section = shown[shown.index("Exit codes:\n") :]
    assert [int(code) for code in re.findall(r"^  (\d+) ", section, re.MULTILINE)] == list(EXIT_CODES)


def test_the_help_of_every_command_has_its_own():
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert 0 in command.exit_codes
        assert set(command.exit_codes) <= set(EXIT_CODES)
        shown = CliRunner().invoke(cli, [name, "--help"]).output
        section = shown[shown.index("Exit codes") :]
        assert [int(code) for code in re.findall(r"^  (\d+) ", section, re.MULTILINE)] == list(command.exit_codes)


TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


def anchors(path: Path) -> set[str]:
    """Return the names by which headings of a page are linked to, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_no_link_leads_nowhere():
    lost = []
    for page in TEXTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            if "://" not in target and not (there.exists() and (not anchor or anchor in anchors(there))):
                lost.append(f"{page.name}: {target}")
    assert not lost


def test_the_index_has_every_page():
    listed = re.findall(r"^\| \[(\S+)\]", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("make", [rooms, save_and_compose, timeline], ids=lambda make: make.__name__)
def test_the_pictures_are_current(make):
    assert make.PICTURE.read_text(encoding="utf-8") == make.draw(), f"run {make.__name__.replace('.', '/')}.py"


def test_every_file_that_a_page_names_exists():
    lost = []
    for page in TEXTS:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for name in re.findall(r"`([\w./-]+/|[\w./-]+/[\w.-]+\.(?:py|sh|md|txt|yml)|tests/[\w./-]+)`", text):
            if not any((place / name).exists() for place in (ROOT, ROOT / "llmtailor")):
                lost.append(f"{page.name}: {name}")
    assert not lost
