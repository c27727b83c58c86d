"""The journal keeps what it is told, and survives whatever becomes of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtailor.checkpoint.layout import Bytes, Cast, Copy, Crc, FileLayout, Plan, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.copying.journal import Identity, Journal, Mark, Unfinished, identify, is_another, read_journal, why_not
from llmtailor.model.roles import MASTER, WEIGHT, State
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


# --- which merge may go on with what another has written -------------------------------------------------------------

FACT = FileFact(100, 5, 6, 7)
PLAN = Plan(
    ("/a", "/b"),
    (
        FileLayout(
            "one",
            (
                Bytes(b"head", "why"),
                Copy(Extent("x", 0, 8), 0, State("w", MASTER), 0),
                Zeros(8, "padding"),
                Cast(Extent("y", 0, 20), "F32", "BF16", 1, State("w", WEIGHT), 0, 1.0),
                Crc(4, 12),
            ),
        ),
        FileLayout("two", (Bytes(b"more", "why"),)),
    ),
)
FACTS = ({"x": FACT, "unread": FACT}, {"y": FACT})
WORDS = {"tool_version": "1", "recipe": "recipe.yaml", "request": ("a", 1), "begun": "today"}


def the(plan: Plan = PLAN, facts=FACTS, **words):
    return identify(plan, facts, **{**WORDS, **words})


def changed(plan: Plan, number: int, **fields) -> Plan:
    """Return a plan with one piece changed."""
    first, *others = plan.files
    pieces = list(first.pieces)
    piece = pieces[number]
    pieces[number] = piece._replace(**fields) if isinstance(piece, Copy) else replace(piece, **fields)
    return replace(plan, files=(FileLayout(first.path, tuple(pieces)), *others))


@pytest.mark.parametrize(
    "other",
    [
        changed(PLAN, 0, data=b"HEAD"),
        changed(PLAN, 1, source=1),
        changed(PLAN, 1, extent=Extent("z", 0, 8)),
        changed(PLAN, 1, extent=Extent("x", 8, 16)),
        changed(PLAN, 1, begin=2),
        changed(PLAN, 3, source_dtype="I32"),
        changed(PLAN, 3, scale=0.5),
        changed(PLAN, 4, stop=20),
        replace(PLAN, sources=("/a", "/c")),
        replace(PLAN, files=PLAN.files[::-1]),
        replace(PLAN, files=(PLAN.files[0], FileLayout("three", PLAN.files[1].pieces))),
        replace(PLAN, files=PLAN.files[:1]),
    ],
)
def test_every_part_of_a_plan_counts(other):
    assert other.summary.digest != PLAN.summary.digest


def test_only_files_that_are_read_count():
    assert the().sources == {"/a/x": FACT, "/b/y": FACT}
    assert the().num_bytes == 38


def test_the_same_merge_goes_on():
    assert why_not(the(), the(begun="tomorrow", recipe="renamed.yaml", request=("other words", 1))) == ""
    assert why_not(the(), the(facts=({"x": replace(FACT, ctime_ns=9, inode=9)}, {"y": FACT}))) == ""


def test_other_sources_versions_and_recipes_do_not():
    touched = the(facts=({"x": replace(FACT, mtime_ns=9)}, {"y": replace(FACT, num_bytes=9)}))
    assert why_not(the(), touched) == "its sources have changed since: /a/x, /b/y"
    assert why_not(the(), the(plan=changed(PLAN, 0, data=b"HEAD"))) == "its sources have changed since"
    assert why_not(the(), the(tool_version="2")) == "it was started by llmtailor 1, but this is 2"
    other = the(plan=changed(PLAN, 1, source=1), facts=({}, {"x": FACT, "y": FACT}), request=())
    assert "recipe or options differ" in why_not(the(), other)


def test_only_what_somebody_may_still_want_is_another():
    other_plan = changed(PLAN, 0, data=b"HEAD")
    assert is_another(the(), the(plan=other_plan, request=()))
    assert not is_another(the(), the(plan=other_plan))
    assert not is_another(the(), the(request=()))
    assert not is_another(the(), the(tool_version="2"))
