"""Source files are read again, and compared with what was written."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_128

from helpers.files import cut, flip
from llmtailor.checkpoint.layout import Bytes, Cast, Copy, FileLayout, Plan, Strided
from llmtailor.checkpoint.placement import Band, Extent, Grid
from llmtailor.copying import recheck
from llmtailor.copying.copy import execute
from llmtailor.copying.pool import Stop
from llmtailor.copying.recheck import read_again
from llmtailor.errors import Interrupted, SourceError
from llmtailor.model.roles import WEIGHT, State


@pytest.fixture
def merged(tmp_path):
    """Files, a plan that takes overlapping ranges of them in any order, and what was written."""
    data = np.random.default_rng(0)
    for name, numel in {"a": 5001, "b": 300, "c": 4, "unread": 3}.items():
        (tmp_path / name).write_bytes(data.standard_normal(numel, "f4").tobytes() + b"x")
    (tmp_path / "empty").touch()
    pieces = (
        Bytes(b"head", "why"),
        Copy(Extent("a", 10000, 20000), 0),
        Copy(Extent("a", 3, 103), 0),
        Cast(Extent("b", 0, 1200), "F32", "BF16", 0),
        Cast(Extent("a", 1, 10001), "F32", "F16", 0, scale=0.5),
        Copy(Extent("empty", 0, 0), 0),
        Copy(Extent("a", 20004, 20005), 0),
        Strided(Grid(0, 3, 3, (Band("a", 20, 8, 8), Band("c", 4, 4, 4))), "F32", "BF16", 0, State("w", WEIGHT)),
    )
    plan = Plan((str(tmp_path),), (FileLayout("one", pieces), FileLayout("two", (Copy(Extent("a", 10000, 10005), 0),))))
    return plan, execute(plan, tmp_path / "out"), tmp_path


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096, 1 << 20])
def test_what_has_not_changed_gets_a_digest(merged, monkeypatch, chunk_bytes):
    monkeypatch.setattr(recheck, "CHUNK_BYTES", chunk_bytes)
    plan, results, root = merged
    files = plan.summary.read
    assert files == ((0, "a"), (0, "b"), (0, "c"), (0, "empty"))
    seen = []
    digests = read_again(plan, results, files, seen.append, Stop())
    assert digests == {(0, name): xxh3_128((root / name).read_bytes()).hexdigest() for name in ("a", "b", "c", "empty")}
    assert sum(seen) == 20_005 + 1201 + 17


@pytest.mark.parametrize(
    ("name", "at"), [("a", 3), ("a", 102), ("a", 12_000), ("a", 20_004), ("b", 3), ("b", 1199), ("c", 7)]
)
@pytest.mark.parametrize("chunk_bytes", [7, 1 << 20])
def test_a_byte_that_was_taken_and_has_changed_is_found(merged, monkeypatch, name, at, chunk_bytes):
    monkeypatch.setattr(recheck, "CHUNK_BYTES", chunk_bytes)
    plan, results, root = merged
    flip(root / name, at, 7)
    with pytest.raises(SourceError, match="changed") as caught:
        read_again(plan, results, plan.summary.read, lambda num_bytes: None, Stop())
    assert str(root / name) in [problem.where for problem in caught.value.problems]


def test_a_byte_that_was_not_taken_may_change(merged):
    plan, results, root = merged
    flip(root / "b", -1, 7)
    read_again(plan, results, plan.summary.read, lambda num_bytes: None, Stop())


def test_files_that_shrink_or_vanish(merged):
    plan, results, root = merged
    cut(root / "a", 1)
    with pytest.raises(SourceError, match="ends before byte 20,005"):
        read_again(plan, results, plan.summary.read, lambda num_bytes: None, Stop())
    (root / "a").unlink()
    with pytest.raises(SourceError, match="No such file"):
        read_again(plan, results, plan.summary.read, lambda num_bytes: None, Stop())


def test_it_stops_on_request(merged):
    plan, results, _ = merged
    stop = Stop()
    stop.requested = True
    with pytest.raises(Interrupted):
        read_again(plan, results, plan.summary.read, lambda num_bytes: None, stop)
