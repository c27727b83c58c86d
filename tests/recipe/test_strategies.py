"""Strategies, against tables made by hand, and what must hold for any run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import Problem, RecipeError
from llmtailor.model.parts import ModelStructure
from llmtailor.recipe.strategies import STRATEGIES, StrategyOptions, assign
from recipe.structures import llama


def full(step: int) -> RunCheckpoint:
    return RunCheckpoint(Path(f"/run/checkpoint-{step}"), step, None)


def partial(step: int, *parts: str, resumable: bool = False) -> RunCheckpoint:
    return RunCheckpoint(Path(f"/run/partial/step-{step:08}"), step, frozenset(parts), resumable)


RUN = [full(step) for step in (100, 200, 300, 400, 500)]


def steps(checkpoints: list[RunCheckpoint], structure: ModelStructure, strategy: str, **options: Any) -> list[int]:
    """Return the step of each part, in the order of the model."""
    found = assign(checkpoints, structure, StrategyOptions(strategy, **options))
    assert found.source_of.keys() == found.reason.keys() == set(structure.parts)
    return [found.source_of[part].step for part in structure.parts]


def problems(
    checkpoints: list[RunCheckpoint], structure: ModelStructure, strategy: str, **options: Any
) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        assign(checkpoints, structure, StrategyOptions(strategy, **options))
    assert all(problem.where and problem.fix for problem in caught.value.problems)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("strategy", "options", "embed", "layers", "norm", "head"),
    [
        ("latest", {}, 500, [500] * 7, 500, 500),
        ("parity", {}, 500, [500, 400, 500, 400, 500, 400, 500], 500, 500),
        ("parity", {"flip": True}, 500, [400, 500, 400, 500, 400, 500, 400], 500, 500),
        ("filter", {"every": 2}, 500, [500, 500, 400, 400, 400, 500, 500], 500, 500),
        ("filter", {"every": 3, "first": 0, "last": 3}, 500, [300, 300, 300, 300, 500, 500, 500], 500, 500),
        ("filter", {"every": 4, "first": 1, "last": 0}, 500, [500, 400, 400, 400, 400, 400, 400], 500, 500),
        ("filter", {"every": 5}, 500, [500] * 7, 500, 500),
        ("filter", {"every": 3, "first": 9, "last": 9}, 500, [500] * 7, 500, 500),
        ("filter", {"every": 3, "aux": ("norm",)}, 300, [500, 500, 300, 300, 300, 500, 500], 500, 300),
        ("spread", {}, 500, [500, 400, 500, 400, 500, 400, 500], 500, 500),
        ("spread", {"over": 3}, 500, [500, 400, 300, 500, 400, 300, 500], 500, 500),
        ("spread", {"over": 1}, 500, [500] * 7, 500, 500),
        ("explicit", {"mapping": {"odd": 300}}, 500, [500, 300, 500, 300, 500, 300, 500], 500, 500),
        (
            "explicit",
            {"mapping": {"all": "checkpoint-200", "first:3": 100, "1-2": "300", "lm_head": 400, "!layers": 100}},
            100, [100, 300, 300, 200, 200, 200, 200], 100, 100,
        ),
        ("explicit", {"mapping": {"model.layers.[2-4].*": 400, "model.norm.*": 100, "layers": 400}},
         500, [400] * 7, 100, 500),
    ],
)  # fmt: skip
def test_a_run_of_full_checkpoints(strategy, options, embed, layers, norm, head):
    assert steps(RUN, llama(7), strategy, **options) == [embed, *layers, norm, head]
    found = assign(RUN, llama(7), StrategyOptions(strategy, **options))
    assert found.base == RUN[-1]
    assert found.title == f"strategy {strategy} at step 500"


def test_reasons():
    def reasons(strategy: str, **options: Any) -> dict[str, str]:
        return dict(assign(RUN, llama(3), StrategyOptions(strategy, **options)).reason)

    others = dict.fromkeys(("embed_tokens", "norm", "lm_head"), "newest")
    assert reasons("latest") == others | dict.fromkeys(("layer 0", "layer 1", "layer 2"), "newest")
    assert reasons("parity", flip=True) == others | {
        "layer 0": "even: one before", "layer 1": "odd: newest", "layer 2": "even: one before",
    }  # fmt: skip
    assert reasons("filter", first=1, last=1, every=2) == others | {
        "layer 0": "first 1: newest", "layer 1": "rest: number 4 of 5 usable, by every 2", "layer 2": "last 1: newest",
    }  # fmt: skip
    assert reasons("spread") == others | {
        "layer 0": "in turn: newest", "layer 1": "in turn: 1 usable before the newest", "layer 2": "in turn: newest",
    }  # fmt: skip
    assert reasons("explicit", mapping={"1": "checkpoint-200"})["layer 1"] == "1: checkpoint-200"


PARTS_OF_400 = ("embed_tokens", "layer 1", "layer 3")
WITH_PARTIAL = [full(100), partial(200, "layer 0", "layer 1"), full(300), partial(400, *PARTS_OF_400)]


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("latest", {}, [400, 300, 400, 300, 400, 300, 300]),
        ("parity", {}, [400, 300, 300, 300, 300, 300, 300]),
        ("parity", {"flip": True}, [400, 300, 400, 300, 400, 300, 300]),
        ("filter", {"every": 2, "first": 0, "last": 0}, [400, 300, 400, 300, 400, 300, 300]),
        ("spread", {"over": 3}, [400, 300, 300, 100, 400, 300, 300]),
        ("explicit", {"mapping": {"1": 200, "3": "step-00000400"}}, [400, 300, 200, 300, 400, 300, 300]),
    ],
)
def test_partial_checkpoints_give_what_they_hold(strategy, options, expected):
    found = assign(WITH_PARTIAL, llama(4), StrategyOptions(strategy, **options))
    assert steps(WITH_PARTIAL, llama(4), strategy, **options) == expected
    assert found.base == WITH_PARTIAL[2]


def test_what_was_wanted_from_a_checkpoint_that_lacks_it_is_told():
    reason = assign(WITH_PARTIAL, llama(4), StrategyOptions("spread", over=3)).reason
    assert reason["layer 0"] == "in turn: newest, but step 400 lacks it"
    assert reason["layer 2"] == "in turn: 2 usable before the newest, but step 200 lacks it"
    assert reason["layer 3"] == "in turn: newest"


def test_a_part_that_nothing_older_holds_comes_from_something_newer():
    run = [partial(100, "layer 0"), full(200)]
    assert steps(run, llama(2), "parity") == [200, 200, 200, 200, 200]
    run = [partial(100, "norm"), partial(200, *llama(2).parts, resumable=True)]
    assert steps(run, llama(2), "parity", flip=True) == [200] * 5


def test_two_checkpoints_of_one_step_count_once_and_the_full_one_is_read():
    run = [full(100), full(200), partial(200, "layer 1"), partial(300, "layer 1"), full(300)]
    assert steps(run, llama(2), "parity") == [300, 300, 200, 300, 300]
    found = assign(run, llama(2), StrategyOptions("latest"))
    assert set(found.source_of.values()) == {full(300)}
    assert assign(run[:3], llama(2), StrategyOptions("parity")).source_of["layer 1"] == full(100)
    weak, able = replace(full(300), resumable=False), partial(300, "layer 1", resumable=True)
    found = assign([able, weak], llama(2), StrategyOptions("latest"))
    assert set(found.source_of.values()) == {weak}
    assert found.base == able


def test_tied_embeddings_and_parts_that_are_no_layers():
    structure = llama(2, tied=True, extra={"visual.weight": "visual"})
    assert structure.parts == ("embed_tokens", "layer 0", "layer 1", "norm", "visual")
    options: Mapping[str, Any] = {"every": 4, "first": 0, "last": 0}
    assert steps(RUN, structure, "filter", **options) == [500, 400, 400, 500, 500]
    assert steps(RUN, structure, "filter", aux=("lm_head",), **options) == [500, 400, 400, 400, 400]
    assert steps(RUN, structure, "explicit", mapping={"lm_head": 100, "visual": 200}) == [100, 500, 500, 500, 200]


@pytest.mark.parametrize(
    ("strategy", "options", "where", "what", "fix"),
    [
        ("filter", {"every": 6}, "--every", "of 5 usable checkpoints (100, 200, 300, 400, 500)", "lower --every to 5"),
        ("filter", {"aux": ("nrom",)}, "--aux", "'nrom'", "'norm'"),
        ("filter", {"aux": ("layer 1",)}, "--aux", "'layer 1' is not a part other than a layer", "norm"),
        ("spread", {"over": 6}, "--over", "only 5 usable", "lower --over to 5"),
        ("explicit", {}, "--map", "needs a mapping", "write e.g."),
        ("explicit", {"mapping": {}}, "--map", "needs a mapping", "write e.g."),
        ("explicit", {"mapping": {"odd": 250}}, "--map 'odd'", "step 250", "100, 200, 300, 400, 500"),
        ("explicit", {"mapping": {"odd": "checkpoint-30"}}, "--map 'odd'", "'checkpoint-30'", "'checkpoint-300'"),
        ("explicit", {"mapping": {"nrom": 300}}, "--map 'nrom'", "'nrom'", "'norm'"),
        ("explicit", {"mapping": {"9": 300}}, "--map '9'", "out of range", "4 layers"),
        ("explicit", {"mapping": {"model.layers.[12].mlp.*": 300}}, "--map 'model.layers.[12].mlp.*'",
         "only some of the tensors of layers 1-2", "whole parts"),
    ],
)  # fmt: skip
def test_bad_options(strategy, options, where, what, fix):
    (problem,) = problems(RUN, llama(4), strategy, **options)
    assert problem.where == where
    assert what in problem.what
    assert fix in problem.fix


def test_runs_that_give_too_little():
    (problem,) = problems(RUN[:1], llama(2), "parity")
    assert "only step 100" in problem.what
    assert "latest" in problem.fix
    (problem,) = problems(
        [replace(full(100), resumable=False), replace(full(200), resumable=False)], llama(2), "latest"
    )
    assert "100, 200: none of them is complete enough" in problem.what
    run = [partial(100, "layer 0", "norm", resumable=True), partial(200, "embed_tokens")]
    (problem,) = problems(run, llama(3), "latest")
    assert problem.what == "no usable checkpoint holds layers 1-2, lm_head"


def test_explicit_means_that_checkpoint_and_no_other():
    (problem,) = problems(WITH_PARTIAL, llama(4), "explicit", mapping={"layers": 400, "norm": 100})
    assert problem.where == "--map 'layers'"
    assert problem.what == "400 does not hold layers 0, 2"
    assert problem.fix == "steps that hold it: 100, 300"
    # A later key may take over what is lacking.
    assert steps(WITH_PARTIAL, llama(4), "explicit", mapping={"layers": 400, "even": 100})[1:5] == [100, 400, 100, 400]


def test_all_problems_at_once():
    found = problems(RUN, llama(4), "filter", every=9, aux=("nrom", "nose"))
    assert [problem.where for problem in found] == ["--aux", "--aux", "--every"]
    found = problems(RUN, llama(4), "explicit", mapping={"odd": 250, "nrom": "checkpoint", "*.mlp.*": 100})
    assert [problem.where for problem in found] == [
        "--map 'odd'", "--map 'nrom'", "--map 'nrom'", "--map '*.mlp.*'",
    ]  # fmt: skip


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
    strategy=st.sampled_from(sorted(set(STRATEGIES) - {"explicit"})),
    flip=st.booleans(),
    numbers=st.tuples(*[st.integers(1, 3)] * 4),
)
def test_every_part_has_a_source_that_holds_it_or_there_is_a_problem(case, strategy, flip, numbers):
    structure, run = case
    first, last, every, over = numbers
    options = StrategyOptions(strategy, flip=flip, first=first, last=last, every=every, over=over)
    held = {part for part in structure.parts if any(one.holds(part) for one in run)}
    try:
        found = assign(run, structure, options)
    except RecipeError as error:
        num_steps = len({one.step for one in run})
        too_few = num_steps < {"parity": 2, "filter": every, "spread": over}.get(strategy, 1)
        assert too_few or held != set(structure.parts) or not any(one.resumable for one in run), error
        return
    assert list(found.source_of) == list(structure.parts)
    assert all(checkpoint in run and checkpoint.holds(part) for part, checkpoint in found.source_of.items())
    assert found.base.step == max(one.step for one in run if one.resumable)
    assert found.base.resumable
    newest = {part: max(one.step for one in run if one.holds(part)) for part in structure.parts}
    for part, checkpoint in found.source_of.items():
        assert checkpoint.step == newest[part] or (strategy != "latest" and part.startswith("layer "))
