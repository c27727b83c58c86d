"""Bytes are asked for once, in order, before they are read, and not too many at a time."""

from __future__ import annotations

import os

import pytest

from llmtailor.storage.local import AHEAD_BYTES, Ahead

STEP = 1 << 20


@pytest.mark.parametrize("num_bytes", [200_000, STEP, AHEAD_BYTES, 3 * AHEAD_BYTES + 5])
def test_all_bytes_are_asked_for_before_they_are_read(monkeypatch, num_bytes):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, count, how: asked.append((fd, start, count, how)))
    first = 7
    ahead = Ahead(3, first, first + num_bytes)
    for at in range(first, first + num_bytes, STEP):
        ahead.reached(at)
        fd, start, count, how = asked[-1]
        assert (fd, how) == (3, os.POSIX_FADV_WILLNEED)
        until = start + count
        assert until >= min(at + STEP, first + num_bytes) and until - at <= 2 * AHEAD_BYTES
    assert [start for _, start, _, _ in asked] == [first, *(start + count for _, start, count, _ in asked)][:-1]
    assert sum(count for _, _, count, _ in asked) == num_bytes


def test_small_ranges_and_refusals_cost_nothing(monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    Ahead(3, 0).reached(0)
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: asked.append(words))
    Ahead(3, 0, 100_000).reached(0)
    assert not asked
