"""What ranks share, in one process: messages, errors, and the division of work."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.balance import deal
from llmtailor.codes import Code
from llmtailor.copying.journal import Identity, Mark, Unfinished
from llmtailor.errors import (
    DamagedSource,
    Interrupted,
    PathIn,
    Problem,
    SourceError,
    StorageError,
    TailorError,
    UsageError,
)
from llmtailor.findings import WARNING, Finding
from llmtailor.ranks import store as ranks_store
from llmtailor.ranks.errors import as_error, from_json, merged, to_json
from llmtailor.ranks.store import KeyValueStore, LocalStore, Pulse, await_messages
from llmtailor.ranks.team import check_same


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_shares_are_disjoint_complete_and_even(sizes, hands):
    shares = deal(dict(enumerate(sizes)), hands)
    assert sorted(number for files in shares for number in files) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in files) for files in shares]
    assert len(shares) == hands
    # no rank has more than another without its smallest file
    for files, load in zip(shares, loads, strict=True):
        assert not files or load - min(sizes[number] for number in files) <= min(loads)


def test_the_first_difference_of_each_rank_is_reported():
    names = {"version": ("update", UsageError), "recipe": ("the same", UsageError), "sources": ("wait", SourceError)}
    same = {"version": 1, "recipe": "r", "sources": "s"}
    check_same([same, dict(same)], names)
    with pytest.raises(UsageError) as caught:
        check_same([same, {**same, "version": 2, "sources": "t"}, {**same, "sources": "t"}], names)
    problems = caught.value.problems
    assert [(one.where, one.what, one.fix) for one in problems] == [
        ("rank 1", "not the same version as on rank 0", "update"),
        ("rank 2", "not the same sources as on rank 0", "wait"),
    ]
    other = {**same, "sources": "t"}
    with pytest.raises(SourceError, match="ranks 1, 3: not the same sources"):
        check_same([same, other, same, other], names)


@pytest.fixture(params=["torch", "alone"])
def store(request):
    if request.param == "alone":
        return KeyValueStore(LocalStore())
    import torch

    return KeyValueStore(torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))


def test_messages(store):
    assert store.get("a") is None
    store.set("a", {"stage": "failed", "texts": ["x" * 9000]})
    assert store.get("a") == [{"stage": "failed", "texts": ["x" * 9000]}]
    store.set("a", [1, None])
    assert store.get("a") == [[1, None]]
    assert store.get("a", "b") is None
    threading.Timer(0.1, store.set, ("b", 2)).start()
    assert await_messages(store, ["a", "b"], lambda: None) == [[1, None], 2]
    store.remove("a", "never")
    assert store.get("a") is None
    with pytest.raises(ZeroDivisionError):
        await_messages(store, ["a"], lambda: 1 / 0)


def test_a_sign_of_life_is_seen_once(monkeypatch):
    monkeypatch.setattr(ranks_store, "PULSE_S", -1.0)
    store = KeyValueStore(LocalStore())
    mine, others = Pulse(store, "alive"), Pulse(store, "alive")
    assert not mine.is_new()
    others.beat()
    assert mine.is_new()
    assert not mine.is_new()


def kinds(kind: type[TailorError] = TailorError) -> list[type[TailorError]]:
    return [kind, *(one for below in kind.__subclasses__() for one in kinds(below))]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_no_fact_of_an_error_is_lost_between_ranks(kind):
    place = PathIn("run/checkpoint-4", "model.safetensors")
    error = kind(
        [
            Problem(place, "it is damaged", "copy it", Code.STATE_DTYPE, ranks=(1, 2)),
            Finding(place, "it is odd", "look", Code.TIED, WARNING, ("a", "b")),
            Problem("--flag", "it is wrong"),
        ]
    )
    error.came_late = True
    for found in (from_json(json.loads(json.dumps(to_json(error)))), pickle.loads(pickle.dumps(error))):
        check_same_error(found, error)


def test_the_folders_of_damaged_sources_are_known_to_all_ranks():
    error = DamagedSource(Problem("a", "it is damaged"), [Path("a")])
    assert pickle.loads(pickle.dumps(error)).roots == merged({1: error}, 3).roots == {Path("a")}


def check_same_error(found: TailorError, error: TailorError) -> None:
    assert type(found) is type(error)
    assert found.problems == error.problems
    assert [type(one) for one in found.problems] == [Problem, Finding, Problem]
    assert [one.path for one in found.problems] == ["model.safetensors", "model.safetensors", None]
    assert isinstance(found.problems[0].where, PathIn) and found.problems[0].where.checkpoint == "run/checkpoint-4"
    assert found.came_late and str(found) == str(error)


def test_an_error_of_a_class_that_this_rank_does_not_know_has_its_exit_code():
    content = {**to_json(SourceError.at("x", "y", "z")), "class": "OfTomorrow"}
    assert type(from_json(content)) is SourceError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyboardInterrupt(), Interrupted),
        (OSError(28, "No space left on device", "disk"), StorageError),
        (KeyError("x"), TailorError),
        (UsageError.at("x", "y"), UsageError),
    ],
)
def test_what_other_ranks_raise_for_an_exception(error, kind):
    assert type(as_error(error, "x")) is kind


def test_problems_of_some_ranks_name_them():
    full, bug = StorageError.at("disk", "full"), TailorError.at("x", "bug")
    place = SourceError.at(PathIn("c", "f"), "gone")
    found = merged({1: full, 2: full, 3: place}, 4)
    assert type(found) is SourceError
    assert [(str(one), one.ranks, one.path) for one in found.problems] == [
        ("ranks 1-2: disk: full", (1, 2), None),
        ("rank 3: c/f: gone", (3,), "f"),
    ]
    assert str(merged(dict.fromkeys(range(2), full), 2)) == "disk: full"
    assert type(merged({0: full, 1: bug}, 2)) is TailorError


def test_marks_of_other_ranks_continue_the_own_ones():
    identity = Identity("1", "plan", {}, "request", "recipe", "now", 100)
    own = Unfinished(identity, {"a": (Mark(10, 1), Mark(20, 2)), "b": (Mark(5, 9),)})
    other = Unfinished(identity, {"a": (Mark(20, 7), Mark(30, 3)), "c": (Mark(1, 1),)})
    foreign = Unfinished(Identity("1", "another", {}, "request", "recipe", "now", 100), {"b": (Mark(50, 1),)})
    marks = own.with_marks_of([other, None, foreign]).marks
    assert marks == {"a": (Mark(10, 1), Mark(20, 7), Mark(30, 3)), "b": (Mark(5, 9),), "c": (Mark(1, 1),)}
