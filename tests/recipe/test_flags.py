"""LLMTailor's update log, against tables made by hand and a naive oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import Problem, RecipeError
from llmtailor.recipe import Assignment
from llmtailor.recipe.selectors import numbering
from llmtailor.recipe.strategies import FlagLine, assign_flags, read_flags
from recipe.structures import llama

LOG = "flags.jsonl"


def full(step: int) -> RunCheckpoint:
    return RunCheckpoint(Path(f"/run/checkpoint-{step}"), step, None)


def run(*steps: int) -> list[RunCheckpoint]:
    return [full(step) for step in steps]


def lines(*flagged: tuple[int, list[int]]) -> tuple[FlagLine, ...]:
    return read_flags("".join(json.dumps({"step": step, "flag": ids}) + "\n" for step, ids in flagged), LOG)


def problems_of(text: str) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        read_flags(text, LOG)
    assert all(problem.fix for problem in caught.value.problems)
    return list(caught.value.problems)


def test_numbering():
    assert numbering(llama(28)) == {
        0: "norm", **{number: f"layer {number - 1}" for number in range(1, 29)}, 29: "lm_head", 30: "embed_tokens",
    }  # fmt: skip
    assert numbering(llama(2, tied=True)) == {0: "norm", 1: "layer 0", 2: "layer 1", 3: "embed_tokens"}
    assert "visual" not in numbering(llama(2, extra={"visual.weight": "visual"})).values()


def test_lines_of_a_log():
    text = '\ufeff{"step": 110, "flag": [0, 2], "loss": 1.5}\r\n\n  \n{"flag": [], "step": 0}\n'
    text += '{"step": 110, "flag": [3, 3]}'
    assert read_flags(text, LOG) == (FlagLine(110, (0, 2), 1), FlagLine(0, (), 4), FlagLine(110, (3, 3), 5))
    assert read_flags("", LOG) == ()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nonsense", "not valid JSON"),
        ('{"step": 1, "flag": [1]', "not valid JSON"),
        ('{"step": 1, "flag": [1]} {"step": 2, "flag": [1]}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"step": ' + "9" * 5000 + ', "flag": []}', "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("{}", "step and flag are missing"),
        ('{"step": 1}', "flag is missing"),
        ('{"flag": [1]}', "step is missing"),
        ('{"step": 1, "step": 2, "flag": []}', "a key is repeated"),
        ('{"step": "1", "flag": []}', "step is '1', not a step number"),
        ('{"step": 1.0, "flag": []}', "step is 1.0"),
        ('{"step": true, "flag": []}', "step is True"),
        ('{"step": -1, "flag": []}', "step is -1"),
        ('{"step": null, "flag": []}', "step is None"),
        ('{"step": 1, "flag": 3}', "flag is 3, not a list"),
        ('{"step": 1, "flag": {"3": 1}}', "flag is (('3', 1),), not a list"),
        ('{"step": 1, "flag": null}', "flag is None"),
        ('{"step": 1, "flag": [1, true]}', "flag has True"),
        ('{"step": 1, "flag": [1, -2]}', "flag has -2"),
        ('{"step": 1, "flag": [1.5]}', "flag has 1.5"),
        ('{"step": 1, "flag": ["1"]}', "flag has '1'"),
        ('{"step": NaN, "flag": [[1]]}', "step is nan, not a step number"),
        (json.dumps({"step": "x" * 10_000, "flag": []}), "x...', not a step number"),
    ],
)  # fmt: skip
def test_bad_lines(line, what):
    (problem,) = problems_of(f'{{"step": 5, "flag": [0]}}\n\n{line}\n')
    assert problem.where == f"{LOG}:3"
    assert what in problem.what
    assert len(problem.what) < 200


def test_all_bad_lines_are_told():
    found = problems_of('x\n{"step": 1, "flag": [1]}\n{"step": -1, "flag": [1]}\n{}\n')
    assert [problem.where for problem in found] == [f"{LOG}:1", f"{LOG}:3", f"{LOG}:4"]


def by_part(found: Assignment) -> dict[str, int]:
    return {part: checkpoint.step for part, checkpoint in found.source_of.items()}


STEPS = tuple(range(100, 191, 10))


def test_a_table_made_by_hand_untied():
    """28 layers, failure at 160, base at 100. By hand: the newest of 110..160 in each part's column, else 100."""
    log = lines(
        (90, [0, 29, 30]),  # before the base: never counts
        (100, [20]),  # the base's own step: no difference
        (110, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (120, [0, 11, 12, 13, 29]),
        (130, [1, 3, 5]),
        (140, [2, 14, 15, 28]),
        (150, [0, 3, 30]),
        (160, [16, 4]),
        (170, [0, 1, 2, 3, 29, 30]),  # after the failure
        (180, [17, 18]),
        (190, [19]),
    )
    found = assign_flags(log, 160, full(100), run(*STEPS), llama(28), 28, LOG)
    layers = {
        0: 130, 1: 140, 2: 150, 3: 160, 4: 130, 5: 110, 6: 110, 7: 110, 8: 110, 9: 110, 10: 120, 11: 120, 12: 120,
        13: 140, 14: 140, 15: 160, 16: 100, 17: 100, 18: 100, 19: 100, 20: 100, 21: 100, 22: 100, 23: 100, 24: 100,
        25: 100, 26: 100, 27: 140,
    }  # fmt: skip
    assert by_part(found) == {"embed_tokens": 150, "norm": 150, "lm_head": 120} | {
        f"layer {number}": step for number, step in layers.items()
    }
    assert list(found.source_of) == list(llama(28).parts)
    assert found.base == full(160)
    assert found.reason["layer 0"] == "flagged at 130"
    assert found.reason["layer 16"] == "not flagged after 100"
    assert found.title == "update log flags.jsonl, failure at step 160"


def test_a_table_made_by_hand_tied():
    """Tied, 29 is embed_tokens. The failure lies between two lines."""
    structure = llama(28, tied=True, extra={"visual.weight": "visual"})
    log = lines((110, [0, 1, 28]), (120, [29, 2]), (150, [1, 28]), (160, [29, 0]))
    found = assign_flags(log, 155, full(100), run(*STEPS), structure, 28, LOG)
    expected = dict.fromkeys(structure.parts, 100)
    expected |= {"norm": 110, "layer 0": 150, "layer 27": 150, "embed_tokens": 120, "layer 1": 120}
    assert by_part(found) == expected
    assert found.base == full(150)
    assert found.reason["visual"] == "has no number in the log"


@pytest.mark.parametrize(
    ("failure", "norm", "base"), [(109, 100, 100), (110, 110, 110), (129, 110, 110), (130, 130, 130)]
)
def test_the_failure_step_itself_counts(failure, norm, base):
    found = assign_flags(lines((110, [0]), (130, [0])), failure, full(100), run(*STEPS), llama(2), None, LOG)
    assert found.source_of["norm"] == full(norm)
    assert found.base == full(base)
    assert found.source_of["layer 0"] == full(100)


def test_a_failure_before_the_first_line_takes_everything_from_the_base():
    for log in (lines((110, [0, 1])), ()):
        found = assign_flags(log, 105, full(100), run(100, 110), llama(2), None, LOG)
        assert set(found.source_of.values()) == {full(100)}
        assert found.base == full(100)


def test_the_bases_own_step_is_the_base_wherever_that_lies():
    base = RunCheckpoint(Path("/elsewhere"), 100, None)
    found = assign_flags(lines((100, [1]), (110, [2])), 160, base, run(100, 110), llama(2), None, LOG)
    assert found.source_of["layer 0"] == base
    assert found.reason["layer 0"] == "not flagged after 100"


def test_the_order_of_lines_does_not_matter_and_lines_of_one_step_add_up():
    log = lines((130, [1]), (110, [0, 1, 2]), (130, [2]), (120, [1, 2]))
    found = assign_flags(log, 160, full(100), run(*STEPS), llama(3), None, LOG)
    assert by_part(found) == {
        "embed_tokens": 100, "layer 0": 130, "layer 1": 130, "layer 2": 100, "norm": 110, "lm_head": 100,
    }  # fmt: skip


def test_without_a_base_everything_must_have_been_flagged():
    found = assign_flags(lines((10, [0, 1, 2]), (20, [3, 4, 1])), 25, None, run(10, 20), llama(2), None, LOG)
    assert by_part(found) == {"embed_tokens": 20, "layer 0": 20, "layer 1": 10, "norm": 10, "lm_head": 20}
    assert found.base == full(20)


def problems(log: tuple[FlagLine, ...], failure: int, base: RunCheckpoint | None, *rest, total=None) -> list[Problem]:
    checkpoints, structure = rest
    with pytest.raises(RecipeError) as caught:
        assign_flags(log, failure, base, checkpoints, structure, total, LOG)
    assert all(problem.fix for problem in caught.value.problems)
    return list(caught.value.problems)


def test_parts_that_were_never_flagged_need_a_base():
    (problem,) = problems(lines((10, [0, 2]), (30, [1])), 25, None, run(10, 30), llama(3))
    assert problem.where == LOG
    assert problem.what == "never flagged at or before step 25: embed_tokens, layers 0, 2, lm_head"
    assert "--base" in problem.fix
    (problem,) = problems((), 25, None, run(10, 30), llama(3))
    assert "embed_tokens, layers 0-2, norm, lm_head" in problem.what


def test_numbers_of_no_part():
    log = lines((110, [0, 31, 99]), (120, [1]), (900, [31]))
    found = problems(log, 160, full(100), run(*STEPS), llama(28))
    assert [problem.where for problem in found] == [f"{LOG}:1", f"{LOG}:3"]
    assert found[0].what == "31, 99 are not numbers of parts"
    assert found[1].what == "31 is not the number of a part"
    assert "1-28 are its layers, 0 is norm, 29 is lm_head, 30 is embed_tokens" in found[0].fix
    (problem,) = problems(lines((110, [30])), 160, full(100), run(*STEPS), llama(28, tied=True))
    assert "29 is embed_tokens" in problem.fix


def test_steps_without_a_checkpoint():
    log = lines((110, [0, 1, 2]), (115, [1, 3]), (117, [2]), (119, [3]), (120, [2, 3]), (165, [1]))
    (problem,) = problems(log, 160, full(100), run(*STEPS), llama(4))
    assert problem.where == f"{LOG}:2"
    assert "step 115 is flagged for layer 0" in problem.what  # 117 and 119 are not chosen for anything
    assert f"available: {', '.join(map(str, STEPS))}" in problem.fix
    found = problems(lines((115, [1]), (117, [2, 3])), 160, full(100), [], llama(4))
    assert ["step 115" in found[0].what, "step 117 is flagged for layers 1-2" in found[1].what] == [True, True]
    assert "available: none" in found[0].fix


def test_total_layers_and_a_base_that_can_not_serve():
    (problem,) = problems((), 160, full(100), run(*STEPS), llama(28), total=24)
    assert problem.where == "--total-layers"
    assert "24 layers are expected, but the model has 28 layers" in problem.what
    (problem,) = problems((), 160, full(170), run(*STEPS), llama(28))
    assert problem.where == "--base"
    assert "later than the failure" in problem.what
    base = RunCheckpoint(Path("/b"), 100, frozenset({"norm", "layer 0"}))
    (problem,) = problems(lines((110, [2])), 160, base, run(*STEPS), llama(2))
    assert problem.what == "b does not hold embed_tokens, lm_head, which no line after step 100 flags"


def test_partial_checkpoints():
    """What belongs to no part comes from the newest that can be resumed from; a part from what holds it."""
    part = RunCheckpoint(Path("/run/partial/step-120"), 120, frozenset({"layer 0", "norm"}), resumable=False)
    checkpoints = [full(100), full(110), part]
    found = assign_flags(lines((110, [2]), (120, [0, 1])), 160, full(100), checkpoints, llama(2), None, LOG)
    assert by_part(found) == {"embed_tokens": 100, "layer 0": 120, "layer 1": 110, "norm": 120, "lm_head": 100}
    assert found.base == full(110)
    (problem,) = problems(lines((110, [1]), (120, [0, 2])), 160, full(100), checkpoints, llama(2))
    assert problem.where == f"{LOG}:2"
    assert problem.what == "step 120 is flagged for layer 1, but no checkpoint of that step holds it"
    found = assign_flags(lines((120, [0, 2])), 160, full(100), [*checkpoints, full(120)], llama(2), None, LOG)
    assert found.source_of["layer 1"] == full(120)
    whole = RunCheckpoint(Path("/p"), 120, None, resumable=False)
    (problem,) = problems(lines((120, [0, 1, 2, 3, 4])), 160, None, [whole], llama(2))
    assert "none of the checkpoints used is resumable" in problem.what


def test_all_problems_at_once():
    log = lines((110, [9]), (115, [1]))
    found = problems(log, 160, None, run(*STEPS), llama(2), total=3)
    assert [problem.where for problem in found] == [f"{LOG}:1", "--total-layers", f"{LOG}:2", LOG]


def naive(flagged: list[tuple[int, list[int]]], number: int, base: int, failure: int) -> int:
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
    found = assign_flags(lines(*flagged), failure, full(base), run(*range(31)), structure, structure.num_layers, LOG)
    number_of = {"norm": 0, "layer 0": 1, "layer 1": 2, "layer 2": 3}
    number_of |= {"layer 3": 4, "embed_tokens": 5} if tied else {"lm_head": 4, "embed_tokens": 5}
    expected = {part: naive(flagged, number, base, failure) for part, number in number_of.items()}
    assert by_part(found) == expected
    assert found.base == full(max(expected.values()))
