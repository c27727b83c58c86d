"""The adaptive policy against tables made by hand."""

from __future__ import annotations

import math

import pytest

from llmtailor.model.parts import EMBED, HEAD, NORM
from llmtailor.policies import Update
from recipe.structures import llama
from saving.policy_runs import situation

BYTES = {EMBED: 500, "layer 0": 100, "layer 1": 100, NORM: 10, HEAD: 500}


def chosen(policy: Update, *drift: float) -> list[str]:
    """Return what is chosen, in the order of preference, when parts have changed by this much."""
    drifts = dict(zip(BYTES, drift, strict=True))
    return list(policy.choose(situation(llama(2), num_bytes=BYTES, drift=drifts)))


@pytest.mark.parametrize(
    ("options", "drift", "expected"),
    [
        ({"threshold": 0.01}, (0.02, 0.01, 0.03, 0.0, 0.005), ["layer 1", EMBED]),
        ({"threshold": 0.01}, (0.0, 0.0, 0.0, 0.0, 0.0), []),
        ({"threshold": 0}, (0.0, 1e-9, 0.0, 0.0, 0.0), ["layer 0"]),
        ({"threshold": 0.01}, (math.inf, 0.5, math.nan, 0.0, 0.0), [EMBED, "layer 1", "layer 0"]),
        # In order of change; what does not fit is passed over.
        ({"budget_bytes": 600}, (0.2, 0.5, 0.4, 0.3, 0.1), ["layer 0", "layer 1", NORM]),
        ({"budget_bytes": 600}, (0.5, 0.4, 0.1, 0.1, 0.3), [EMBED, "layer 0"]),
        ({"budget_bytes": 610}, (0.5, 0.4, 0.1, 0.1, 0.3), [EMBED, "layer 0", NORM]),
        ({"budget_bytes": 9}, (0.5, 0.4, 0.1, 0.1, 0.3), []),
        ({"budget_bytes": 10**9}, (0.5, 0.0, 0.1, 0.0, 0.3), [EMBED, HEAD, "layer 1"]),
        # Ties go by the order of the model.
        ({"budget_bytes": 150}, (0.1, 0.1, 0.1, 0.1, 0.1), ["layer 0", NORM]),
        ({"threshold": 0.15, "budget_bytes": 120}, (0.5, 0.2, 0.3, 0.1, 0.4), ["layer 1"]),
        ({"threshold": 0.15, "budget_bytes": 620}, (0.5, 0.2, 0.3, 0.1, 0.4), [EMBED, "layer 1"]),
    ],
)
def test_choice(options, drift, expected):
    assert chosen(Update(**options), *drift) == expected


def test_what_could_not_be_measured_counts_as_changed():
    found = Update(threshold=0.5).choose(situation(llama(1), drift={"layer 0": 0.1, EMBED: 0.6, NORM: 0.0}))
    assert found == {HEAD: "change unknown", EMBED: "changed by 60.00%"}


def test_it_promises_nothing_by_itself():
    assert Update(threshold=0.1).worst_staleness(llama(1), llama(1).parts) is None
    assert Update.default_max_staleness == 20
    assert Update.needs_drift
