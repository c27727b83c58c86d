"""LLMTailor's update log, against tables made by hand and a naive oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.recipe import Assignment
from llmtailor.recipe.selectors import numbering
from llmtailor.recipe.strategies import FlagLine, assign_flags, read_flags
from recipe.structures import check, full, llama, problems_of

LOG = "flags.jsonl"
BASE = full(100)
RUN = [full(step) for step in range(100, 191, 10)]
TWO, VISUAL = llama(2), llama(28, tied=True, extra={"visual.weight": "visual"})
Flagged = tuple[int, list[int]]


def lines(*flagged: Flagged) -> tuple[FlagLine, ...]:
    return read_flags("".join(json.dumps({"step": step, "flag": ids}) + "\n" for step, ids in flagged), LOG)


def by_part(found: Assignment) -> dict[str, int]:
    return {part: checkpoint.step for part, checkpoint in found.source_of.items()}


def test_lines_of_a_log():
    text = '\ufeff{"step": 110, "flag": [0, 2], "loss": 1.5}\r\n\n  \n{"flag": [], "step": 0}\n'
    text += '{"step": 110, "flag": [3, 3]}'
    assert read_flags(text, LOG) == (FlagLine(110, (0, 2), 1), FlagLine(0, (), 4), FlagLine(110, (3, 3), 5))
    assert read_flags("", LOG) == ()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nonsense", "not valid JSON"),
        ('{"step": 1, "flag": [1]} {"step": 2, "flag": [1]}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"step": ' + "9" * 5000 + ', "flag": []}', "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ("{}", "step and flag are missing"),
        ('{"step": 1}', "flag is missing"),
        ('{"step": 1, "step": 2, "flag": []}', "a key is repeated"),
        ('{"step": "1", "flag": []}', "step is '1', not a step number"),
        ('{"step": true, "flag": []}', "step is True"),
        ('{"step": -1, "flag": []}', "step is -1"),
        ('{"step": 1, "flag": 3}', "flag is 3, not a list"),
        ('{"step": 1, "flag": {"3": 1}}', "flag is (('3', 1),), not a list"),
        ('{"step": 1, "flag": [1, true]}', "flag has True"),
        ('{"step": 1, "flag": [1, -2]}', "flag has -2"),
        ('{"step": NaN, "flag": [[1]]}', "step is nan, not a step number"),
        (json.dumps({"step": "x" * 10_000, "flag": []}), "x...', not a step number"),
    ],
)  # fmt: skip
def test_bad_lines(line, what):
    found = problems_of(lambda: read_flags(f'{{"step": 5, "flag": [0]}}\n\n{line}\n{{}}\n', LOG))
    check(found, (f"{LOG}:3", what, "write e.g."), (f"{LOG}:4", "step and flag are missing", ""))
    assert len(found[0].what) < 200


SHARE = RunCheckpoint(Path("/w/run/partial/step-120"), 120, frozenset({"layer 0", "norm"}), resumable=False)
PARTLY = [full(100), full(110), SHARE]


@pytest.mark.parametrize(
    ("log", "failure", "base", "run", "structure", "expected", "newest"),
    [
        # tied: 29 is embed_tokens, and visual has no number; the failure lies between two lines
        ([(110, [0, 1, 28]), (120, [29, 2]), (150, [1, 28]), (160, [29, 0])], 155, BASE, RUN, VISUAL,
         [120, 150, 120, *[100] * 25, 150, 110, 100], 150),
        # the failure step itself counts; before the first line, all comes from the base
        *(([(110, [0]), (130, [0])], failure, BASE, RUN, TWO, [100, 100, 100, norm, 100], norm)
          for failure, norm in ((109, 100), (130, 130))),
        # without a base, everything was flagged
        ([(110, [0, 1, 2]), (120, [3, 4, 1])], 125, None, RUN, TWO, [120, 120, 110, 110, 120], 120),
        # a part comes from what holds it, and the rest from the newest that can be resumed from
        ([(110, [2]), (120, [0, 1])], 160, BASE, PARTLY, TWO, [100, 120, 110, 120, 100], 110),
        ([(120, [0, 2])], 160, BASE, [*PARTLY, full(120)], TWO, [100, 100, 120, 120, 100], 120),
    ],
)  # fmt: skip
def test_the_step_of_each_part(log, failure, base, run, structure, expected, newest):
    found = assign_flags(lines(*log), failure, base, run, structure, structure.num_layers, LOG)
    assert by_part(found) == dict(zip(structure.parts, expected, strict=True))
    assert (list(found.source_of), found.base) == (list(structure.parts), full(newest))
    assert found.title == f"update log flags.jsonl, failure at step {failure}"
    numbers = {part: number for number, part in numbering(structure).items()}
    for part, reason in found.reason.items():
        step = found.source_of[part].step
        never = "not flagged after 100" if part in numbers else "has no number in the log"
        assert reason == (never if step == 100 else f"flagged at {step}")


def test_the_bases_own_step_is_the_base_wherever_that_lies():
    base = RunCheckpoint(Path("/elsewhere"), 100, None)
    found = assign_flags(lines((100, [1]), (110, [2])), 160, base, [full(100), full(110)], TWO, None, LOG)
    assert found.source_of["layer 0"] == base
    assert found.reason["layer 0"] == "not flagged after 100"


TEN_THIRTY = [full(10), full(30)]
STEPS = ", ".join(str(one.step) for one in RUN)


@pytest.mark.parametrize(
    ("log", "failure", "base", "run", "structure", "total", "expected"),
    [
        ([(10, [0, 2]), (30, [1])], 25, None, TEN_THIRTY, llama(3), None,
         [(LOG, "never flagged at or before step 25: embed_tokens, layers 0, 2, lm_head", "--base")]),
        ([], 25, None, TEN_THIRTY, llama(3), None, [(LOG, "embed_tokens, layers 0-2, norm, lm_head", "--base")]),
        ([(110, [0, 31, 99]), (120, [1]), (900, [31])], 160, BASE, RUN, llama(28), None,
         [(f"{LOG}:1", "31, 99 are not numbers of parts",
           "1-28 are its layers, 0 is norm, 29 is lm_head, 30 is embed_tokens"),
          (f"{LOG}:3", "31 is not the number of a part", "1-28")]),
        ([(110, [30])], 160, BASE, RUN, llama(28, tied=True), None, [(f"{LOG}:1", "30 is not", "29 is embed_tokens")]),
        # 117 and 119 are not chosen for anything
        ([(110, [0, 1, 2]), (115, [1, 3]), (117, [2]), (119, [3]), (120, [2, 3]), (165, [1])], 160, BASE, RUN,
         llama(4), None, [(f"{LOG}:2", "step 115 is flagged for layer 0", f"available: {STEPS}")]),
        ([(115, [1]), (117, [2, 3])], 160, BASE, [], llama(4), None,
         [(f"{LOG}:1", "step 115 is flagged for layer 0", "available: none"),
          (f"{LOG}:2", "step 117 is flagged for layers 1-2", "available: none")]),
        ([], 160, BASE, RUN, llama(28), 24,
         [("--total-layers", "24 layers are expected, but the model has 28 layers", "--total-layers 28")]),
        ([], 160, full(170), RUN, llama(28), None, [("--base", "later than the failure", "before the failure")]),
        ([(110, [2])], 160, RunCheckpoint(Path("/b"), 100, frozenset({"norm", "layer 0"})), RUN, TWO, None,
         [("--base", "b does not hold embed_tokens, lm_head, which no line after step 100 flags", "every part")]),
        ([(110, [1]), (120, [0, 2])], 160, BASE, PARTLY, TWO, None,
         [(f"{LOG}:2", "step 120 is flagged for layer 1, but no checkpoint of that step holds it", "remove it")]),
        ([(120, [0, 1, 2, 3, 4])], 160, None, [RunCheckpoint(Path("/p"), 120, None, resumable=False)], TWO, None,
         [(LOG, "none of the checkpoints used is resumable", "--base")]),
        ([(110, [9]), (115, [1])], 160, None, RUN, TWO, 3,  # all at once
         [(f"{LOG}:1", "9", ""), ("--total-layers", "3 layers", ""), (f"{LOG}:2", "115", ""), (LOG, "never", "")]),
    ],
)  # fmt: skip
def test_refusals(log, failure, base, run, structure, total, expected):
    check(problems_of(lambda: assign_flags(lines(*log), failure, base, run, structure, total, LOG)), *expected)


def naive(flagged: list[Flagged], number: int, base: int, failure: int) -> int:
    """The newest step at or before the failure and after the base whose line has the number, else the base."""
    step = failure
    while step > base:
        if any(at == step and number in ids for at, ids in flagged):
            return step
        step -= 1
    return base


@given(
    flagged=st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 5), max_size=7)), max_size=12),
    base=st.integers(0, 15),
    failure=st.integers(15, 32),
    tied=st.booleans(),
)
def test_as_a_naive_oracle(flagged, base, failure, tied):
    structure = llama(4 if tied else 3, tied=tied)
    run = [full(step) for step in range(31)]
    found = assign_flags(lines(*flagged), failure, full(base), run, structure, structure.num_layers, LOG)
    number_of = {"norm": 0, "layer 0": 1, "layer 1": 2, "layer 2": 3}
    number_of |= {"layer 3": 4, "embed_tokens": 5} if tied else {"lm_head": 4, "embed_tokens": 5}
    expected = {part: naive(flagged, number, base, failure) for part, number in number_of.items()}
    assert by_part(found) == expected
    assert found.base == full(max(expected.values()))
