"""``-v``: what it tells, where it may stand, and that nothing else changes by it."""

from __future__ import annotations

import json
import logging
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

import llmtailor
from helpers.checkpoints import SMALL, make
from helpers.commands import as_it_was, call, on_terminal
from llmtailor.cli.main import cli
from llmtailor.engine.staging import Staging
from llmtailor.errors import Interrupted

RECIPE = "base_model: checkpoint-200\nparts:\n  - {from: checkpoint-100, select: [odd]}\n"
LINE = re.compile(r"\d\d:\d\d:\d\d (.*)")
STAGES = [
    "indexed checkpoint-200 in", "indexed checkpoint-100 in", "the base is checkpoint-200, as the recipe says",
    "planned 13 files", "writing in", "wrote 13 files", "checked that the sources are unchanged", "verified out in",
    "verified what was written in", "published",
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    for step in (100, 200):
        make(tmp_path, step, shape=SMALL)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(stderr: str) -> list[str]:
    return [match[1] for line in stderr.splitlines() if (match := LINE.fullmatch(line))]


def begins(lines: list[str], beginnings: list[str]) -> bool:
    """Whether there are lines that begin so, in that order."""
    rest = iter(lines)
    return all(any(line.startswith(beginning) for line in rest) for beginning in beginnings)


@pytest.mark.parametrize("verbose", [["-v", "merge"], ["merge", "-v"], ["merge", "--verbose"], ["-v", "merge", "-v"]])
def test_it_names_the_stages_wherever_it_stands(run, verbose):
    command, *after = verbose[verbose.index("merge") :]
    lines = told(call(*verbose[: verbose.index("merge")], command, "recipe.yaml", "out", *after).stderr)
    assert begins(lines, STAGES), lines
    assert any(line.startswith("model.safetensors: 6,476 bytes, CRC-32 ") for line in lines)


def test_nothing_else_changes(run):
    plain, verbose = (call("merge", "recipe.yaml", "out", "--force", *words) for words in ([], ["-vv"]))
    assert told(plain.stderr) == []
    assert verbose.stdout == plain.stdout
    assert [line for line in verbose.stderr.splitlines() if not LINE.fullmatch(line)] == plain.stderr.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ["merge", "recipe.yaml", "out"], ["convert", "checkpoint-100"], ["inspect", "checkpoint-100"],
        ["verify", "checkpoint-100"], ["latest", "."], ["salvage", "."], ["thin", ".", "--strategy", "parity"],
        ["gc", "."],
    ],
)  # fmt: skip
def test_json_stays_json(run, arguments):
    result = call(*arguments, "--json", "-vv")
    assert json.loads(result.stdout)
    assert told(result.stderr)


def test_why_a_part_comes_from_where(run):
    (run / "checkpoint-100" / "latest").write_text("nowhere")
    lines = told(call("recipe", ".", "-v").stderr)
    assert "embed_tokens, layers 0-3, norm, lm_head from checkpoint-200: newest" in lines
    lines = told(call("recipe", ".", "-v", "--strategy", "filter", "--every", "1").stderr)
    assert any(line.startswith("skipped checkpoint-100/latest: it points to") for line in lines), lines


def test_what_a_journal_is_worth(run, monkeypatch):
    """A merge that was interrupted behind a mark; the file it marked is damaged since."""

    def end(staging):
        raise Interrupted.at("", "killed", "")

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Staging, "publish", end)
        llmtailor.merge(Path("recipe.yaml"), Path("out"))
    weights = run / ".out.llmtailor-staging" / "out" / "model.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    lines = told(call("merge", "recipe.yaml", "out", "-v").stderr)
    assert "model.safetensors: the content up to byte 6476 does not match the journal" in lines
    assert "scheduler.pt: 1465 of 1465 bytes are there and match the journal" in lines


def test_thin_and_gc_say_what_goes_and_why(run):
    lines = told(call("thin", ".", "--strategy", "parity", "--yes", "-v").stderr)
    assert begins(lines, ["wrote partial/step-00000100", "read it back in", "removing checkpoint-100: step 100 can be"])
    assert "checkpoint-200 stays: it is one of the newest" in lines
    (run / "partial" / "step-00000050.abandoned").mkdir()
    lines = told(call("gc", ".", "--keep", "1", "--yes", "-v").stderr)
    assert "step-00000100: needed" in lines
    gone = "step-00000050.abandoned: abandoned attempt"
    assert any(line.endswith(gone) and line.startswith("removed") for line in lines)


def test_the_log_stands_above_the_bar(run):
    """On a terminal each line is whole, whatever the bar does."""
    shown = on_terminal("-v", "merge", "recipe.yaml", "out")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
    assert "writing" in shown and "/s" in shown
    lines = told(shown)
    assert begins(lines, STAGES), shown
    assert [line for line in lines if line.startswith("latest: 14 bytes, CRC-32 5f46f5fe, in ")]


@pytest.mark.parametrize("verbose", [["-vv", "verify"], ["-v", "verify", "-v"]])
def test_twice_says_more(run, verbose):
    shards = sorted((run / "checkpoint-100").glob("*/*optim_states.pt"))
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    for arguments, wanted in ((["verify", "-v"], False), (verbose, True)):
        lines = told(call(*arguments, "checkpoint-100", code=7).stderr)
        assert any(line.startswith("damaged file: global_step100/") for line in lines)
        assert any(line.startswith("damaged state: ") for line in lines) is wanted


def test_names_in_hostile_files_can_not_play_with_the_terminal(run):
    with redirect_stderr(StringIO()) as stderr, as_it_was():
        cli.main(["-v", "latest", "."], standalone_mode=False)
        logging.getLogger("llmtailor.any").info("skipped %s", "\x1b[2J\nerror: x")
    assert told(stderr.getvalue())[-1] == r"skipped \x1b[2J\nerror: x"


def test_a_library_user_sees_it_by_own_logging_and_gets_no_handler(run, caplog, monkeypatch, capfd):
    monkeypatch.setattr(logging.getLogger("llmtailor"), "handlers", [])
    with caplog.at_level(logging.INFO, logger="llmtailor"):
        llmtailor.merge(Path("recipe.yaml"), Path("out"))
    assert begins([record.getMessage() for record in caplog.records], STAGES)
    assert logging.getLogger("llmtailor").handlers == []
    assert capfd.readouterr().err == ""
