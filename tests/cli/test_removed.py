"""An option that is gone is refused with what does its job now."""

from __future__ import annotations

import click
import pytest

from helpers.commands import run_here
from llmtailor.cli.command import REMOVED
from llmtailor.cli.main import cli


@pytest.mark.parametrize(("command", "option"), sorted(REMOVED))
def test_what_was_removed_is_refused_with_what_to_do_instead(command, option, tmp_path):
    result = run_here(command, *option.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"error: {option}: this option of llmtailor {command} was removed",
        f"  fix: {REMOVED[command, option]}",
    ]


def test_nothing_that_is_there_counts_as_removed():
    context = click.Context(cli)
    for command, option in REMOVED:
        name, *value = option.split()
        found = cli.get_command(context, command)
        assert found is not None
        there = [one for one in found.get_params(context) if name in one.opts]
        if value:
            (choice,) = [one.type for one in there]
            assert value[0] not in choice.choices
        else:
            assert not there


def test_an_unknown_option_is_unknown(tmp_path):
    result = run_here("thin", "run", "--never", cwd=tmp_path)
    assert result.returncode == 2
    assert "No such option" in result.stderr
