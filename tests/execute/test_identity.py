"""Which merge may go on with what another has written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtailor.checkpoint.layout import Bytes, Cast, Copy, Crc, FileLayout, Plan, Zeros
from llmtailor.checkpoint.placement import Extent
from llmtailor.engine.journal import identify, is_another, why_not
from llmtailor.model.roles import MASTER, WEIGHT, State
from llmtailor.storage.local import FileFact

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
