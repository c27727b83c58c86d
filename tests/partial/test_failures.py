"""Saves that go wrong, and trainings that are refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real

from partial.checking import check_composite, newest  # noqa: E402


@pytest.mark.parametrize("name", ["full-0", "full-1"])
def test_a_full_disk_costs_one_save(trained, name, tmp_path):
    """Training goes on as if nothing had been, one warning says what happened, and the next save makes up for it."""
    done = trained[name]
    assert len(done.losses) == done.job.steps
    assert done.saves == [2, 6]
    assert not list((done.folder / "partial").glob("step-00000004*"))
    [warning] = done.messages
    rank = done.job.disturb["rank"]
    assert "step 4 failed" in warning and f"rank {rank} can't write" in warning and "fix:" in warning
    lines = [json.loads(line) for line in (done.folder / "partial" / "saves.jsonl").read_text().splitlines()]
    assert [(line["step"], "failed" in line) for line in lines] == [(2, False), (4, True), (6, False)]
    assert [part["why"] for part in done.manifest(6)["parts"]] == ["odd half"] * 2
    assert set(check_composite(done, 6, tmp_path).values()) == {2, 6}


@pytest.mark.parametrize(("name", "files"), [("frozen-2", 1), ("frozen-3", 2)])
def test_frozen_params_are_written_once_and_again_when_they_change(trained, name, files, tmp_path):
    done = trained[name]
    inodes = {step: [path.stat().st_ino for path in sorted(done.partial(step).glob("frozen-*"))] for step in done.saves}
    assert [len(found) for found in inodes.values()] == [files] * 3
    assert inodes[2] == inodes[4] and not set(inodes[4]) & set(inodes[6])
    check_composite(done, 6, tmp_path)  # has them as they are now


def test_small_files_that_do_not_change_are_links(trained):
    done = trained["z3-extras-w3"]
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert len({(done.partial(step) / name).stat().st_ino for step in done.saves}) == 1


@pytest.mark.parametrize("name", ["z3-fp16", "z2-fp16"])
def test_nothing_is_saved_before_the_first_step_of_the_optimizer(trained, name):
    """fp16: the first steps overflow."""
    done = trained[name]
    assert done.saves == [2, 3, 4, 5, 6]
    [warning] = done.messages
    assert "step 1: nothing was saved" in warning
    assert [part["why"] for part in done.manifest(2)["parts"]] == ["complete base"] * 6


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("locked", "TargetError", "another run is saving"),
        ("anew", "TargetError", "up to step 8"),
        ("sgd-2", "UnsupportedCheckpoint", "keeps no moments"),
        ("sgd-3", "UnsupportedCheckpoint", "keeps no moments"),
        ("adafactor-2", "UnsupportedCheckpoint", "has not an element for each"),
        ("adafactor-3", "UnsupportedCheckpoint", "has not an element for each"),
    ],
)
def test_a_refusal_is_the_same_on_all_ranks(trained, name, kind, words):
    done = trained[name]
    errors = [done.result(rank)["error"] for rank in range(2)]
    assert errors[0] == errors[1]
    assert errors[0]["class"] == kind
    assert words in errors[0]["text"] and "fix:" in errors[0]["text"]
    assert len(done.losses) <= 1
    if name == "anew":
        assert newest(done, 8) == newest(trained["z3"], 8)
    else:
        assert not done.saves
