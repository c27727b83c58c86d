"""What was saved when, through JSON and resumes."""

from __future__ import annotations

import json

import pytest

from llmtailor.checkpoint.lineage import Ledger
from llmtailor.errors import SourceError
from llmtailor.model.parts import EMBED, expert_part, layer_part, non_expert_part

PARTS = ("embed_tokens", "layer 0", "norm")


def thrice() -> Ledger:
    """A base and two partial saves."""
    return Ledger("one").after(50, PARTS, PARTS).after(100, ["layer 0"], PARTS).after(150, ["norm"], PARTS)


@pytest.mark.parametrize(
    ("step", "saved", "trainable", "message"),
    [
        (200, ["norm"], [*PARTS, "layer 1"], "no save would hold layer 1"),
        (200, [], PARTS, "must save at least one part"),
        (200, ["layer 7", "norm"], PARTS, "only trainable ones"),
        (150, ["norm"], PARTS, "does not come after step 150"),
    ],
)
def test_saves_that_cannot_be(step, saved, trainable, message):
    with pytest.raises(ValueError, match=message):
        thrice().after(step, saved, trainable)
    with pytest.raises(ValueError, match="no save would hold embed_tokens, norm"):
        Ledger("new").after(50, ["layer 0"], PARTS)


def test_a_resume_continues_in_another_lineage():
    ledger = thrice().resumed("two", 150)
    assert (ledger.lineage, ledger.history) == ("two", {"one": 150})
    assert (ledger.saves, ledger.step, ledger.last) == (3, 150, thrice().last)
    later = ledger.after(200, ["norm"], PARTS).resumed("three", 210)
    assert later.history == {"one": 150, "two": 210}
    with pytest.raises(ValueError, match="continues itself"):
        thrice().resumed("one", 150)


def test_json():
    for ledger in (
        Ledger("new"),
        thrice(),
        thrice().resumed("two", 150).after(200, PARTS, PARTS, {"asked": [1, {"of": None}]}),
    ):
        assert Ledger.from_json(json.loads(json.dumps(ledger.to_json())), "manifest.json") == ledger


def test_older_records_say_nothing_of_missed_updates():
    data = thrice().to_json()
    del data["missed"]
    assert Ledger.from_json(data, "manifest.json").missed == {}


def test_a_state_of_the_policy_is_that_of_the_newest_save():
    ledger = thrice().after(200, ["norm"], PARTS, {"asked": 3})
    assert ledger.policy_state == {"asked": 3}
    assert ledger.after(250, ["norm"], PARTS).policy_state is None


GOOD = thrice().to_json()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, ["the record of earlier saves is None"]),
        ([GOOD], ["the record of earlier saves is ["]),
        ({}, ["lacks lineage", "lacks history", "lacks saves", "lacks held_by", "lacks policy_state"]),
        (GOOD | {"lineage": ""}, ["lineage is ''"]),
        (GOOD | {"lineage": 5, "saves": -1, "policy_state": [], "history": {"x": "y"}}, [
            "lineage is 5", "saves is -1", "policy_state is []", "history maps 'x' to 'y'",
        ]),
        (GOOD | {"saves": True}, ["saves is True"]),
        (GOOD | {"saves": 2}, ["'norm' is held by a save that does not exist"]),
        (GOOD | {"history": None, "held_by": []}, ["history is None", "held_by is []"]),
        (GOOD | {"history": {"one": 20}}, ["lineage 'one' continues itself"]),
        (GOOD | {"held_by": {"norm": 2, "a": [1], "b": [1, 2.5], "c": [0, 50]}}, [
            "held_by maps 'norm' to 2", "held_by maps 'a' to [1]", "held_by maps 'b' to [1, 2.5]",
        ]),
    ],
)  # fmt: skip
def test_damaged_json(data, expected):
    with pytest.raises(SourceError) as caught:
        Ledger.from_json(data, "manifest.json")
    told = caught.value.problems
    assert len(told) == len(expected)
    for problem, words in zip(told, expected, strict=True):
        assert words in problem.what
        assert problem.where == "manifest.json"
        assert problem.fix


def test_a_run_may_change_between_whole_layers_and_experts():
    shares = [non_expert_part(0), expert_part(0, 0), expert_part(0, 1)]
    whole = [EMBED, layer_part(0)]
    layers = Ledger("a").after(2, whole, whole)
    fine = layers.divided([EMBED, *shares], lost=())
    assert fine.held_by == dict.fromkeys([EMBED, *shares], (0, 2))
    assert layers.divided([EMBED, *shares], lost=[layer_part(0)]).held_by == {"embed_tokens": (0, 2)}
    assert layers.divided(whole, lost=()) == layers
    back = fine.divided(whole, lost=())
    assert back.held_by == layers.held_by
    newer = fine.after(4, [shares[1]], [EMBED, *shares])
    # no save holds the newest of all of the layer
    assert newer.divided(whole, lost=()).held_by == {"embed_tokens": (0, 2)}
    assert fine.divided(whole, lost=[shares[2]]).held_by == {"embed_tokens": (0, 2)}
    assert fine.divided([EMBED, *shares], lost=[shares[2]]).held_by.keys() == {"embed_tokens", *shares[:2]}
