"""Random trainings of every form, against what torch.save has written at each step; see `random_trainings`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from saving import random_dcp
from trainings.harness import start_ranks

pytestmark = pytest.mark.real

LONG = {"plain": 660, "ddp": 40, "fsdp": 60, "zero2": 50, "zero3": 50, "accelerate": 40, "trainer": 40}
"""Form -> trainings with --all; with those through DcpSaver, 1,000"""
SHORT = {"plain": (0, 3, 8, 9, 16, 18), "trainer": (2,), "fsdp": (10,), "zero3": (1,)}
"""Form -> seeds of the short suite: the plain ones are killed, fail and close, by six policies, with ten events"""
AT_ONCE = 25


def batches() -> Iterator[Any]:
    for form, seeds in SHORT.items():
        yield form, [*seeds]
    yield pytest.param("plain", [*range(20)], marks=pytest.mark.long)
    yield pytest.param("fsdp", [3], marks=pytest.mark.long)
    for form, count in LONG.items():
        for first in range(100, 100 + count, AT_ONCE):
            yield pytest.param(form, [*range(first, min(first + AT_ONCE, 100 + count))], marks=pytest.mark.long)


@pytest.mark.parametrize(("form", "seeds"), [*batches()])
def test_composites_hold_what_was_recorded(form, seeds, tmp_path):
    (tmp_path / "order.json").write_text(json.dumps({"form": form, "seeds": seeds}))
    start_ranks("saving.random_trainings", [tmp_path], 1 if form in ("plain", "trainer") else 2, tmp_path)
    found = {seed: json.loads((tmp_path / f"{form}-{seed}.json").read_text()) for seed in seeds}
    assert not {seed: one["faults"] for seed, one in found.items() if one["faults"]}
    if form == "plain":
        num_merges = sum(one["merges"] for one in found.values())
        assert sum(one["old"] for one in found.values()) > num_merges / 8
        assert sum(one["refused merges"] for one in found.values()) < num_merges / 10


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (1, [*range(3)]),
        pytest.param(1, [*range(3, 6)], marks=pytest.mark.long),
        (2, [106]),
        *(pytest.param(ranks, [*range(300, 320)], marks=pytest.mark.long) for ranks in (1, 2, 4)),
    ],
)
def test_folders_of_dcp_hold_what_was_recorded(ranks, seeds, tmp_path):
    """And any number of ranks loads them by a stock dcp.load."""
    order = {"seeds": seeds, "ranks": ranks}
    for number in (ranks, 3) if ranks > 1 else (1,):
        (tmp_path / "order.json").write_text(json.dumps({**order, "loads": number != ranks}))
        start_ranks("saving.random_dcp", [tmp_path], number, tmp_path)
    for seed in seeds:
        case = random_dcp.drawn(seed, ranks)
        for step in range(1, random_dcp.STEPS + 1):
            assert not random_dcp.faults(case, tmp_path / f"{ranks}-{seed}", step), case
