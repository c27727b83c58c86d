"""Strategies, against tables made by hand, and what must hold for any run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import RecipeError
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe.strategies import STRATEGIES, StrategyOptions, assign
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
