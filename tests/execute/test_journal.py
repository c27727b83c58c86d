"""The journal keeps what it is told, and survives whatever becomes of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtailor.engine.journal import Identity, Journal, Mark, Unfinished, read_journal
from llmtailor.storage.local import FileFact

IDENTITY = Identity("1", "plan", {"/source é": FileFact(1, 2, 3, 4)}, "request", "recipe.yaml", "today", 10)


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def journal(file):
    journal = Journal(file)
    journal.begin(IDENTITY)
    return journal


def test_what_was_written_is_read(file, journal):
    journal.add("a/b", Mark(4, 0xABC))
    journal.add("c", Mark(0, 0))
    journal.add("a/b", Mark(6, 0xDEADBEEF))
    assert read_journal(file) == Unfinished(
        IDENTITY, {"a/b": (Mark(4, 0xABC), Mark(6, 0xDEADBEEF)), "c": (Mark(0, 0),)}
    )
    assert read_journal(file).num_bytes == sum(journal.reached.values()) == 6


def test_a_file_that_was_written_again_has_no_marks_behind_the_newest(file, journal):
    for num_bytes in (4, 6, 8, 5):
        journal.add("a", Mark(num_bytes, num_bytes))
    assert read_journal(file).marks == {"a": (Mark(4, 4), Mark(5, 5))}
    assert sum(journal.reached.values()) == 5


def test_an_empty_journal_is_none(file, journal):
    journal.add("a", Mark(1, 1))
    journal.clear()
    assert read_journal(file) is None
    assert not journal.reached
    journal.begin(replace(IDENTITY, plan="other"))
    assert read_journal(file) == Unfinished(replace(IDENTITY, plan="other"), {})


def test_a_torn_line_is_lost_and_the_next_one_is_not(file, journal):
    journal.add("a", Mark(1, 1))
    journal.add("b", Mark(2, 2))
    os.ftruncate(file, os.fstat(file).st_size - 3)
    assert set(read_journal(file).marks) == {"a"}
    journal.add("c", Mark(3, 3))
    assert set(read_journal(file).marks) == {"a", "c"}


@pytest.mark.parametrize(
    "line",
    [
        {"path": 1, "num_bytes": 1, "crc32": "00"},
        {"path": "a", "num_bytes": "1", "crc32": "00"},
        {"path": "a", "num_bytes": 1, "crc32": 7},
        {"path": "a", "num_bytes": 1, "crc32": "xy"},
        {"path": "a", "num_bytes": 1},
        [],
        None,
        "a" * 100,
    ],
)
def test_a_line_that_makes_no_sense_is_left_out(file, journal, line):
    os.write(file, b"\n" + json.dumps(line).encode() + b"\n\xff\x00" + b"[" * 100_000)
    journal.add("b", Mark(2, 2))
    assert read_journal(file) == Unfinished(IDENTITY, {"b": (Mark(2, 2),)})


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "llmtailor.journal/2"},
        {"sources": 3},
        {"sources": {"a": {"num_bytes": 1}}},
        {"num_bytes": "10"},
        {"other": 1},
    ],
)
def test_a_journal_of_who_knows_what_is_none(tmp_path, file, journal, change):
    header = json.loads((tmp_path / "journal").read_text())
    journal.clear()
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, json.dumps({**header, **change}).encode())
    journal.add("a", Mark(1, 1))
    assert read_journal(file) is None


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_survived(file, data):
    """Bytes are overwritten and the end is cut: what is read is a journal or none, never an error."""
    journal = Journal(file)
    journal.clear()
    journal.begin(IDENTITY)
    for number in range(3):
        journal.add(f"file {number}", Mark(number, number))
    size = os.fstat(file).st_size
    os.pwrite(file, data.draw(st.binary(min_size=1, max_size=40)), data.draw(st.integers(0, size)))
    os.ftruncate(file, data.draw(st.integers(0, size + 100)))
    found = read_journal(file)
    assert found is None or found.num_bytes >= 0 or found.marks
