"""What is wrong with a resume by Lightning is found and named; tests of other resumes stop if any is found there."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from lightning_runs.runs import RUNS, needs_lightning  # noqa: E402
from trainings.harness import train  # noqa: E402

pytestmark = [pytest.mark.real, needs_lightning]
FAULTS = {
    ("ddp", ""): (None, set()),
    ("ddp-groups", ""): (None, set()),
    ("zero-2", ""): (None, set()),
    ("ddp", "schedule"): ("the schedule was restarted", set()),
    ("zero-2", "schedule"): ("the schedule was restarted", set()),
    ("ddp", "moments"): ("moments were reset to zero", {"exp_avg"}),
    ("ddp-groups", "weights"): ("the weights are not the checkpoint's", {"master"}),
}


@pytest.fixture(scope="module")
def attested(lightnings, tmp_path_factory):
    folder, specs = tmp_path_factory.mktemp("attested"), {}
    for name, fault in FAULTS:
        made = RUNS[name].resumed(lightnings.checkpoint(name), f"{name}-{fault}", saver="full", fault=fault)
        specs[name, fault] = made
    runs = train(specs.values(), 2, folder, program="trainings.lightning")
    found = {}
    for key, spec in specs.items():
        lines = (runs[spec.name].folder / "partial" / "saves.jsonl").read_text().splitlines()
        found[key] = [one["attested"] for one in map(json.loads, lines) if "attested" in one]
    return found


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_it_is_found_and_named(name, fault, attested):
    (found,), (cause, kinds) = attested[name, fault], FAULTS[name, fault]
    assert found["is_same"] == (not fault) and found["num_states"] > 60 and found["step"] == 2
    assert {row["state"] for row in found["states"] if row["is_alarm"]} == kinds
    assert cause is None or found["cause"].startswith(cause)
