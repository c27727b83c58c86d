"""The policy that spends a share of the bytes where a missing part would cost most."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.model.parts import EMBED, HEAD, NORM
from llmtailor.policies import Adaptive, Situation, state_of
from recipe.structures import llama
from saving.loop import Disk, Loop
from saving.policy_runs import run

BYTES = {EMBED: 500, "layer 0": 100, "layer 1": 100, NORM: 10, HEAD: 500}
INF, NAN = float("inf"), float("nan")


def asked(policy, *costs, last=(0, 0, 0, 0, 0), save=1):
    """Return what is chosen, in the order of preference."""
    expected, held = dict(zip(BYTES, costs, strict=True)), dict(zip(BYTES, last, strict=True))
    return list(policy.choose(Situation(save, save, llama(2), tuple(BYTES), BYTES, held, {}, expected)))


@pytest.mark.parametrize(
    ("share", "costs", "last", "expected"),
    [
        (0.2, (5, 2, 1, 0.01, 60), (0, 0, 0, 0, 0), [HEAD]),  # 242 bytes are allowed
        (0.2, (5, 2, 3, 0.01, 4), (0, 0, 0, 0, 0), ["layer 1", "layer 0", NORM]),  # what does not fit is skipped
        (0.5, (5, 2, 3, 0.01, 4), (0, 0, 0, 0, 0), ["layer 1", "layer 0", EMBED]),  # 605 bytes, to the nearest
        (0.2, (5, 2, 3, 0.01, 12), (2, 2, 2, 2, 0), [HEAD]),  # it is three times as old
        (1.0, (0, 0, 0, 0, 1), (0, 0, 0, 0, 0), [HEAD, EMBED, "layer 0", "layer 1", NORM]),
        (0.01, (5, 2, 1, 0, 6), (0, 0, 0, 0, 0), ["layer 0"]),  # never empty
        (0.2, (NAN, 2, 1, 0, INF), (0, 0, 0, 0, 0), [EMBED]),  # what could not be measured comes first
        (0.2, (0, 0, 0, 0, 0), (2, 1, 0, 1, 2), ["layer 1", "layer 0", NORM]),  # what is older, if nothing changes
    ],
)
def test_choice(share, costs, last, expected):
    save = max(last) + 1
    assert asked(Adaptive(share), *costs, last=last, save=save) == expected


def test_what_a_save_took_too_much_is_missing_from_the_next():
    policy = Adaptive(0.2)
    assert asked(policy, 5, 1, 1, 0, 0) == [EMBED]  # 242 bytes were allowed, 500 taken
    assert asked(policy, 5, 1, 1, 0, 9, last=(1, 0, 0, 0, 0), save=2) == [HEAD]  # -16 left: only the first
    assert asked(policy, 0, 1, 1, 0, 0, last=(1, 0, 0, 0, 2), save=3) == ["layer 0"]


def test_parts_that_were_added_count():
    policy = Adaptive(0.5)
    asked(policy, 1, 1, 1, 1, 1)
    # its answer was extended to all parts
    assert asked(policy, 0, 1, 1, 0, 0, last=(1, 1, 1, 1, 1), save=2) == ["layer 0"]


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 100), min_size=11, max_size=11),
    st.floats(0.05, 1),
    st.integers(0, 2**32),
)
def test_saves_are_even_and_nothing_starves(layers, sizes, share, seed):
    """Some parts cost millions of times as much as others, or nothing at all."""
    structure = llama(layers)
    num_bytes = dict(zip(structure.parts, sizes, strict=False))
    rates = {part: Random(f"{seed} {part}").choice((0.0, 1e-3, 1.0, 1e3)) for part in structure.parts}
    policy = Adaptive(share)
    limit = policy.default_max_staleness

    def drift(save, last):
        return {part: rates[part] * (save - last[part]) for part in structure.parts}

    made = run(policy, structure, limit, 60, num_bytes=num_bytes, drift=drift)
    total, largest = sum(num_bytes.values()), max(num_bytes.values())
    assert made.oldest <= limit
    assert max(made.costs) <= 1.25 * share * total + 2 * largest + 1
    if largest <= share * total:
        assert sum(made.costs) / 60 == pytest.approx(share * total, abs=2 * largest / 60 + 1)


def test_a_training_saves_its_share_and_a_failed_save_counts_for_nothing(tmp_path, monkeypatch):
    loop = Loop(tmp_path / "run", layers=6, policy="adaptive:0.4").start()
    disk = Disk(monkeypatch)
    loop.make_saves()
    num_bytes = loop.saver.model.num_bytes
    saved = [sum(num_bytes[part] for part in loop.make_saves().parts) for _ in range(6)]
    assert sum(saved) / sum(num_bytes.values()) / 6 == pytest.approx(0.4, abs=0.05)
    loop.train()
    before = state_of(loop.saver.policy)
    disk.error = OSError(28, "No space left on device")
    wanted = loop.save()
    loop.saver.finish()
    assert wanted.failure is not None
    disk.recover()
    loop.saver.reports()
    assert state_of(loop.saver.policy) == before
    loop.save()
    loop.saver.finish()
    (done,) = loop.saver.reports()
    assert list(done.parts) == list(wanted.parts)
    loop.saver.close()
    loop.check(loop.step, tmp_path / "out")
