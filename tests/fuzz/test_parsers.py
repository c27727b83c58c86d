"""tests/campaigns/fuzz for a few seconds, always with the same inputs."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns import fuzz
from helpers.cases import examples, mostly_long
from llmtailor.errors import SourceError

INPUTS = {
    "checkpoint": 60,
    "partial checkpoint": 70,
    "universal": 30,
    "dcp": 60,
    "trainer_state.json": examples(30, 70),
    "latest": 150,
    "recipe": examples(200, 1000),
}
"""Per parser; those that read a whole checkpoint are slower, and have many seeds, which come first."""
LONG = ("checkpoint", "partial checkpoint", "universal", "dcp", "latest")
"""The short suite damages these on purpose: see fuzz/test_checkpoints.py, verify/damages.py, partial/test_tampered.py,
dcp/test_hostile.py and hostile/test_files.py."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return fuzz.make_sound(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("parser", mostly_long(fuzz.PARSERS, *(one for one in fuzz.PARSERS if one not in LONG)))
def test_damaged_input_is_parsed_or_refused(sound, parser):
    wanted = INPUTS.get(parser, examples(120, 600))
    tally = fuzz.fuzz(parser, sound, random.Random(parser), lambda count: count < wanted)
    assert not tally.findings, tally.findings[0]
    assert tally.accepted  # or the seeds were no good
    assert tally.refused > wanted // 10  # or the mutations
    assert tally.outcomes > 3


def test_the_same_seed_gives_the_same_inputs(sound):
    first, second = (str(fuzz.fuzz("safetensors", sound, random.Random(7), lambda n: n < 200)) for _ in range(2))
    assert first == second


def test_what_ends_otherwise_is_a_finding(sound):
    def crash(data, folder, sound):
        raise KeyError(data)

    def no_mend(data, folder, sound):
        raise SourceError.at("x", "broken")

    def bare(data, folder, sound):
        return {"a": 1}["b"] if b"x" in data else None

    for parse, told in ((crash, "KeyError"), (no_mend, "no mend: x: broken"), (bare, "KeyError: 'b'")):
        _, finding = fuzz.try_input(fuzz.Parser(lambda sound: [b"x"], parse), b"x", sound)
        assert told in finding
    assert fuzz.try_input(fuzz.Parser(lambda sound: [], bare), b"", sound) == (None, "")


@pytest.mark.long
def test_the_script_runs_and_replays(tmp_path):
    def run(*words):
        script = Path(fuzz.__file__).parent
        command, path = [sys.executable, str(script), *map(str, words)], str(script.parents[1])
        return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": path})

    result = run("--minutes", 0.02, "--parser", "flags", "--seed", 1, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "flags: " in result.stdout and "0 findings" in result.stdout
    (tmp_path / "flags-0").write_bytes(b"nonsense")
    assert "the line is not valid JSON" in run("--replay", tmp_path / "flags-0").stdout
