"""Strategies, against tables made by hand, and what must hold for any run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import RecipeError
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe import Assignment
from llmtailor.recipe.selectors import numbering
from llmtailor.recipe.strategies import STRATEGIES, FlagLine, StrategyOptions, assign, assign_flags, read_flags
from recipe.structures import check, full, llama, problems_of


def partial(step: int, *parts: str, resumable: bool = False) -> RunCheckpoint:
    return RunCheckpoint(Path(f"/w/run/partial/step-{step:08}"), step, frozenset(parts), resumable)


RUN = [full(step) for step in (100, 200, 300, 400, 500)]
WITH_PARTIAL = [
    full(100), partial(200, "layer 0", "layer 1"), full(300), partial(400, "embed_tokens", "layer 1", "layer 3"),
]  # fmt: skip
TIED = llama(2, tied=True, extra={"visual.weight": "visual"})
LACKING = "newest, but step 400 lacks it"


@pytest.mark.parametrize(
    ("run", "structure", "strategy", "options", "expected"),
    [
        # full checkpoints: embed_tokens, seven layers, norm, lm_head
        (RUN, llama(7), "latest", {}, [500] * 10),
        (RUN, llama(7), "parity", {}, [500, 500, 400, 500, 400, 500, 400, 500, 500, 500]),
        (RUN, llama(7), "parity", {"flip": True}, [500, 400, 500, 400, 500, 400, 500, 400, 500, 500]),
        (RUN, llama(7), "filter", {"every": 3, "first": 0, "last": 3}, [500, *[300] * 4, *[500] * 5]),
        (RUN, llama(7), "filter", {"every": 4, "first": 1, "last": 0}, [500, 500, *[400] * 6, 500, 500]),
        (RUN, llama(7), "filter", {"every": 3, "first": 9, "last": 9}, [500] * 10),
        (RUN, llama(7), "filter", {"every": 3, "aux": ("norm",)}, [300, 500, 500, 300, 300, 300, 500, 500, 500, 300]),
        # tied: embed_tokens, two layers, norm, visual
        (RUN, TIED, "filter", {"every": 4, "first": 0, "last": 0}, [500, 400, 400, 500, 500]),
        (RUN, TIED, "filter", {"every": 4, "first": 0, "last": 0, "aux": ("lm_head",)}, [500, 400, 400, 400, 400]),
        # partial checkpoints give what they hold
        (WITH_PARTIAL, llama(4), "latest", {}, [400, 300, 400, 300, 400, 300, 300]),
        (WITH_PARTIAL, llama(4), "parity", {}, [400, 300, 300, 300, 300, 300, 300]),
        (WITH_PARTIAL, llama(4), "parity", {"flip": True}, [400, 300, 400, 300, 400, 300, 300]),
        (WITH_PARTIAL, llama(4), "filter", {"every": 3, "first": 0, "last": 0}, [400, 300, 300, 300, 300, 300, 300]),
        # what nothing older holds comes from something newer
        ([partial(100, "layer 0"), full(200)], llama(2), "parity", {}, [200] * 5),
        ([partial(100, "norm"), partial(200, *llama(2).parts, resumable=True)], llama(2), "parity", {"flip": True},
         [200] * 5),
        # two checkpoints of one step count once
        ([full(100), full(200), partial(200, "layer 1"), partial(300, "layer 1"), full(300)], llama(2), "parity", {},
         [300, 300, 200, 300, 300]),
    ],
)  # fmt: skip
def test_the_step_of_each_part(run, structure, strategy, options, expected):
    found = assign(run, structure, StrategyOptions(strategy, **options))
    assert [found.source_of[part].step for part in structure.parts] == expected
    assert found.source_of.keys() == found.reason.keys() == set(structure.parts)
    assert found.base == [one for one in run if one.resumable][-1]
    assert found.title == f"strategy {strategy} at step {run[-1].step}"


def test_of_two_checkpoints_of_one_step_the_full_one_is_read():
    run = [full(100), full(200), partial(200, "layer 1"), partial(300, "layer 1"), full(300)]
    assert set(assign(run, llama(2), StrategyOptions("latest")).source_of.values()) == {full(300)}
    assert assign(run[:3], llama(2), StrategyOptions("parity")).source_of["layer 1"] == full(100)
    weak, able = replace(full(300), resumable=False), partial(300, "layer 1", resumable=True)
    found = assign([able, weak], llama(2), StrategyOptions("latest"))
    assert (set(found.source_of.values()), found.base) == ({weak}, able)


@pytest.mark.parametrize(
    ("run", "strategy", "options", "expected"),
    [
        (RUN, "latest", {}, ["newest"] * 6),
        (RUN, "parity", {"flip": True},
         ["newest", "even: one before", "odd: newest", "even: one before", "newest", "newest"]),
        (RUN, "filter", {"first": 1, "last": 1, "every": 2},
         ["newest", "first 1: newest", "rest: number 4 of 5 usable, by every 2", "last 1: newest", "newest", "newest"]),
        (WITH_PARTIAL, "latest", {}, ["newest", LACKING, "newest", LACKING, LACKING, LACKING]),
        (WITH_PARTIAL[:2], "parity", {"flip": True},
         ["newest, but step 200 lacks it", "even: one before", "odd: newest", "even: one before",
          *["newest, but step 200 lacks it"] * 2]),
    ],
)  # fmt: skip
def test_reasons(run, strategy, options, expected):
    """Of embed_tokens, three layers, norm and lm_head."""
    assert [*assign(run, llama(3), StrategyOptions(strategy, **options)).reason.values()] == expected


@pytest.mark.parametrize(
    ("run", "structure", "strategy", "options", "problems"),
    [
        (RUN, llama(4), "filter", {"every": 6},
         [("--every", "of 5 usable checkpoints (100, 200, 300, 400, 500)", "lower --every to 5")]),
        (RUN, llama(4), "filter", {"aux": ("nrom",)}, [("--aux", "'nrom'", "'norm'")]),
        (RUN, llama(4), "filter", {"aux": ("layer 1",)},
         [("--aux", "'layer 1' is not a part other than a layer", "norm")]),
        (RUN, llama(4), "filter", {"every": 9, "aux": ("nrom", "nose")},  # all at once
         [("--aux", "'nrom'", "'norm'"), ("--aux", "'nose'", "norm"), ("--every", "none is number 9", "to 5")]),
        (RUN[:1], llama(2), "parity", {}, [("--strategy", "only step 100", "latest")]),
        ([replace(full(100), resumable=False), replace(full(200), resumable=False)], llama(2), "latest", {},
         [("checkpoints", "100, 200: none of them is complete enough", "later step (--at)")]),
        ([partial(100, "layer 0", "norm", resumable=True), partial(200, "embed_tokens")], llama(3), "latest", {},
         [("checkpoints", "no usable checkpoint holds layers 1-2, lm_head", "full checkpoint")]),
    ],
)  # fmt: skip
def test_refusals(run, structure, strategy, options, problems):
    check(problems_of(lambda: assign(run, structure, StrategyOptions(strategy, **options))), *problems)


@st.composite
def runs(draw: st.DrawFn) -> tuple[ModelStructure, list[RunCheckpoint]]:
    structure = llama(draw(st.integers(1, 6)), tied=draw(st.booleans()), extra={"wpe.weight": "wpe"})
    shapes = st.lists(
        st.tuples(st.integers(1, 9), st.none() | st.frozensets(st.sampled_from(structure.parts)), st.booleans()),
        min_size=1, max_size=6,
    )  # fmt: skip
    found = [RunCheckpoint(Path(f"/r/{at}"), step, parts, able) for at, (step, parts, able) in enumerate(draw(shapes))]
    return structure, sorted(found, key=lambda one: one.step)


@given(
    case=runs(),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    flip=st.booleans(),
    numbers=st.tuples(*[st.integers(1, 3)] * 3),
)
def test_every_part_has_a_source_that_holds_it_or_there_is_a_problem(case: Any, strategy: str, flip: bool, numbers):
    structure, run = case
    first, last, every = numbers
    options = StrategyOptions(strategy, flip=flip, first=first, last=last, every=every)
    held = {part for part in structure.parts if any(one.holds(part) for one in run)}
    try:
        found = assign(run, structure, options)
    except RecipeError as error:
        too_few = len({one.step for one in run}) < {"parity": 2, "filter": every}.get(strategy, 1)
        assert too_few or held != set(structure.parts) or not any(one.resumable for one in run), error
        return
    assert list(found.source_of) == list(structure.parts)
    assert all(checkpoint in run and checkpoint.holds(part) for part, checkpoint in found.source_of.items())
    assert found.base.step == max(one.step for one in run if one.resumable)
    assert found.base.resumable
    newest = {part: max(one.step for one in run if one.holds(part)) for part in structure.parts}
    for part, checkpoint in found.source_of.items():
        assert checkpoint.step == newest[part] or (strategy != "latest" and part.startswith("layer "))


# --- LLMTailor's update log, against tables made by hand and a naive oracle ------------------------------------------

LOG = "flags.jsonl"
BASE = full(100)
TENS = [full(step) for step in range(100, 191, 10)]
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


def flags(lines, failure, base, run, structure, total):
    more = {"failure_step": failure, "base": base, "total_layers": total, "name": LOG}
    return assign_flags(lines, run, structure, **more)


@pytest.mark.parametrize(
    ("log", "failure", "base", "run", "structure", "expected", "newest"),
    [
        # tied: 29 is embed_tokens, and visual has no number; the failure lies between two lines
        ([(110, [0, 1, 28]), (120, [29, 2]), (150, [1, 28]), (160, [29, 0])], 155, BASE, TENS, VISUAL,
         [120, 150, 120, *[100] * 25, 150, 110, 100], 150),
        # the failure step itself counts; before the first line, all comes from the base
        *(([(110, [0]), (130, [0])], failure, BASE, TENS, TWO, [100, 100, 100, norm, 100], norm)
          for failure, norm in ((109, 100), (130, 130))),
        # without a base, everything was flagged
        ([(110, [0, 1, 2]), (120, [3, 4, 1])], 125, None, TENS, TWO, [120, 120, 110, 110, 120], 120),
        # a part comes from what holds it, and the rest from the newest that can be resumed from
        ([(110, [2]), (120, [0, 1])], 160, BASE, PARTLY, TWO, [100, 120, 110, 120, 100], 110),
        ([(120, [0, 2])], 160, BASE, [*PARTLY, full(120)], TWO, [100, 100, 120, 120, 100], 120),
    ],
)  # fmt: skip
def test_the_flagged_step_of_each_part(log, failure, base, run, structure, expected, newest):
    found = flags(lines(*log), failure, base, run, structure, structure.num_layers)
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
    found = flags(lines((100, [1]), (110, [2])), 160, base, [full(100), full(110)], TWO, None)
    assert found.source_of["layer 0"] == base
    assert found.reason["layer 0"] == "not flagged after 100"


TEN_THIRTY = [full(10), full(30)]
STEPS = ", ".join(str(one.step) for one in TENS)


@pytest.mark.parametrize(
    ("log", "failure", "base", "run", "structure", "total", "expected"),
    [
        ([(10, [0, 2]), (30, [1])], 25, None, TEN_THIRTY, llama(3), None,
         [(LOG, "never flagged at or before step 25: embed_tokens, layers 0, 2, lm_head", "--base")]),
        ([], 25, None, TEN_THIRTY, llama(3), None, [(LOG, "embed_tokens, layers 0-2, norm, lm_head", "--base")]),
        ([(110, [0, 31, 99]), (120, [1]), (900, [31])], 160, BASE, TENS, llama(28), None,
         [(f"{LOG}:1", "31, 99 are not numbers of parts",
           "1-28 are its layers, 0 is norm, 29 is lm_head, 30 is embed_tokens"),
          (f"{LOG}:3", "31 is not the number of a part", "1-28")]),
        ([(110, [30])], 160, BASE, TENS, llama(28, tied=True), None, [(f"{LOG}:1", "30 is not", "29 is embed_tokens")]),
        # 117 and 119 are not chosen for anything
        ([(110, [0, 1, 2]), (115, [1, 3]), (117, [2]), (119, [3]), (120, [2, 3]), (165, [1])], 160, BASE, TENS,
         llama(4), None, [(f"{LOG}:2", "step 115 is flagged for layer 0", f"available: {STEPS}")]),
        ([(115, [1]), (117, [2, 3])], 160, BASE, [], llama(4), None,
         [(f"{LOG}:1", "step 115 is flagged for layer 0", "available: none"),
          (f"{LOG}:2", "step 117 is flagged for layers 1-2", "available: none")]),
        ([], 160, BASE, TENS, llama(28), 24,
         [("--total-layers", "24 layers are expected, but the model has 28 layers", "--total-layers 28")]),
        ([], 160, full(170), TENS, llama(28), None, [("--base", "later than the failure", "before the failure")]),
        ([(110, [2])], 160, RunCheckpoint(Path("/b"), 100, frozenset({"norm", "layer 0"})), TENS, TWO, None,
         [("--base", "b does not hold embed_tokens, lm_head, which no line after step 100 flags", "every part")]),
        ([(110, [1]), (120, [0, 2])], 160, BASE, PARTLY, TWO, None,
         [(f"{LOG}:2", "step 120 is flagged for layer 1, but no checkpoint of that step holds it", "remove it")]),
        ([(120, [0, 1, 2, 3, 4])], 160, None, [RunCheckpoint(Path("/p"), 120, None, resumable=False)], TWO, None,
         [(LOG, "none of the checkpoints used is resumable", "--base")]),
        ([(110, [9]), (115, [1])], 160, None, TENS, TWO, 3,  # all at once
         [(f"{LOG}:1", "9", ""), ("--total-layers", "3 layers", ""), (f"{LOG}:2", "115", ""), (LOG, "never", "")]),
    ],
)  # fmt: skip
def test_refusals_of_a_log(log, failure, base, run, structure, total, expected):
    check(problems_of(lambda: flags(lines(*log), failure, base, run, structure, total)), *expected)


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
    found = flags(lines(*flagged), failure, full(base), run, structure, structure.num_layers)
    number_of = {"norm": 0, "layer 0": 1, "layer 1": 2, "layer 2": 3}
    number_of |= {"layer 3": 4, "embed_tokens": 5} if tied else {"lm_head": 4, "embed_tokens": 5}
    expected = {part: naive(flagged, number, base, failure) for part, number in number_of.items()}
    assert by_part(found) == expected
    assert found.base == full(max(expected.values()))
