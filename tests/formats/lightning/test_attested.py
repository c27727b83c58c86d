"""What is wrong with a resume by Lightning is found and named; tests of other resumes stop if any is found there."""

from __future__ import annotations

import pytest

from saving.loop import log_of
from trainings.harness import train

pytestmark = pytest.mark.real
FAULTS = {
    ("lightning", ""): (None, set()),
    ("lightning", "schedule"): ("the schedule was restarted", set()),
    ("lightning-zero-2", "schedule"): ("the schedule was restarted", set()),
    ("lightning", "moments"): ("moments were reset to zero", {"exp_avg"}),
    ("lightning-groups", "weights"): ("the weights are not the checkpoint's", {"master"}),
}


@pytest.fixture(scope="module")
def attested(runs, tmp_path_factory):
    folder, specs = tmp_path_factory.mktemp("attested"), {}
    for name, fault in FAULTS:
        run = runs[name]
        specs[name, fault] = run.spec.resumed(run.checkpoint(), f"{name}-{fault}", saver="full", fault=fault)
    trained = train(specs.values(), folder)
    found = {}
    for key, spec in specs.items():
        found[key] = [one["attested"] for one in log_of(trained[spec.name].folder) if "attested" in one]
    return found


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_it_is_found_and_named(name, fault, attested):
    (found,), (cause, kinds) = attested[name, fault], FAULTS[name, fault]
    assert found["is_same"] == (not fault) and found["num_states"] > 60 and found["step"] == 2
    assert {row["state"] for row in found["states"] if row["is_alarm"]} == kinds
    assert cause is None or found["cause"].startswith(cause)
