"""Defaults that helps, docstrings and docs state are those of the code."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict

import click
import pytest

from helpers.places import ROOT
from llmtailor.background.options import SavingOptions
from llmtailor.cli.main import cli
from llmtailor.policies import DEFAULT_POLICY
from llmtailor.policies.schedules import POLICIES
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.saving.arguments import LAYOUTS, Arguments

STATED = re.compile(r"\bdefaults?(?: is|:)? (?:\[?`+|\")?([a-z_]+|[0-9.]*[0-9])\b", re.IGNORECASE)
SAVING = {
    **asdict(SavingOptions()),
    "policy": DEFAULT_POLICY,
    "layout": LAYOUTS[0],
    "save_steps": Arguments.of({}).save_steps,
    "overhead": Arguments.of({"save_steps": "auto"}).overhead,
    "on_restart": Arguments.of({}).on_restart,
}


def test_those_of_options():
    """An option that states a default in words is listed here; click states the others."""
    found = {}
    for command in cli.list_commands(click.Context(cli)):
        for option in cli.get_command(click.Context(cli), command).params:
            for literal in STATED.findall(getattr(option, "help", None) or ""):
                if literal in POLICIES or literal[0].isdigit():
                    found[command, option.name] = literal
    counts = {name: str(value) for name, value in asdict(StrategyOptions("latest")).items() if type(value) is int}
    chosen = {(command, name): value for command in ("merge", "recipe") for name, value in counts.items()}
    named = {("run", "policy"): DEFAULT_POLICY, ("policy", "policies"): DEFAULT_POLICY}
    assert found == {**chosen, **named, ("thin", "keep_full_last"): "1"}


@pytest.mark.parametrize("file", ["saving/callbacks.py", "integrations/lightning.py"])
def test_those_of_the_callbacks(file):
    """``save_steps`` of Lightning is its own, because there are no training arguments."""
    tree = ast.parse((ROOT / "llmtailor" / file).read_text(encoding="utf-8"))
    text = next(ast.get_docstring(one) for one in tree.body if getattr(one, "name", "").endswith("PartialSaving"))
    arguments = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    stated = {
        name: found[1] for name, about in arguments if (found := re.search(r"Default: `*([\w.]+)`*\.(?:\s|$)", about))
    }
    assert stated.pop("policy") == DEFAULT_POLICY
    stated.pop("save_steps", None)
    assert stated == {name: str(SAVING[name]) for name in stated}


def test_those_of_the_page():
    """A default in the table of docs/saving.md is a literal, or says in words that there is none."""
    page = (ROOT / "docs" / "saving.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `(\w+)` \|.* Default: (.*) \|$", page, re.MULTILINE))
    assert stated.keys() == SAVING.keys() - {"staging_dir", "mirror"}
    for name, text in stated.items():
        literal = re.match(r"\[?`\"?(\w+)\"?`|([0-9.]+)$", text)
        said = (literal[1] or literal[2]) if literal else "None"
        assert said == (f"{SAVING[name]:g}" if isinstance(SAVING[name], float) else str(SAVING[name])), name
