"""What is wrong with a resumed training is found, on two ranks, and named: faults of each kind over all clients."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from trainings.harness import start_ranks  # noqa: E402

pytestmark = pytest.mark.real
ADAM = {"exp_avg", "exp_avg_sq"}
EVERYWHERE = {
    "clean": (),
    "moments_dropped": ("missing", ADAM, "only the weights were loaded"),
    "zeroed": ("zero", {"exp_avg"}, "reset to zero"),
    "zeroed_on_one_rank": ("zero", {"exp_avg_sq"}, "reset to zero"),
    "moments_in_16_bits": ("zero", {"exp_avg_sq"}, "reset to zero, or rounded to it"),
    "masters_rounded": (),
    "moments_of_another_step": ("of another step", ADAM, "of another checkpoint: step 2"),
    "weights_of_another_step": ("of another step", {"master"}, "of another checkpoint: step 2"),
    "one_state_of_another_step": ("of another step", {"exp_avg"}, "of another checkpoint: step 2"),
    "permuted": ("of another part", ADAM, "given to other params"),
    "one_weight_changed": ("other values", {"master"}, ""),
    "params_replaced": ("optimizer: ", None, "the optimizer was made before the model got other params"),
    "module_replaced": ("optimizer: 1 param that", None, "the optimizer was made before"),
    "param_frozen": ("not trained", {"master"}, "not trained: frozen, or left out"),
    "steps_reset": ("Adam's step is 0, 4", "", "Adam's step count"),
    "step_gone": ("Adam's step: missing, 4", "", "Adam's step count"),
}
SCHEDULED = {
    "schedule_restarted": ("schedule", "", "schedule was restarted"),
    "schedule_behind": ("schedule", "", "the schedule is 2 steps behind"),
    "schedule_changed": (),
    "rate_changed": ("learning rate", "", "learning rate"),
}
COPIES = {
    "forward_on_one_rank": ("not the rounded master", {"master"}, "forward pass"),
    "forward_stale": ("not the rounded master", {"master"}, "forward pass"),
}
ZERO = {
    "flats_swapped": ("of another rank", {"master", *ADAM}, "of another rank"),
    "flat_twice": ("of another rank", {"master", *ADAM}, "of another rank"),
    "forward_of_another_save": ("not the rounded master", {"master"}, "forward pass"),
    **COPIES,
    "counter_reset": ("DeepSpeed's global_steps is 0, 4", "", "global_steps"),
    "scale_ignored": (),
    "scale_changed": ("loss scale: cur_scale is", "", "loss scale"),
}
SHARDED = {
    "param_gone": ("not trained", {"master"}, "not trained: frozen, or left out"),
    "half_dropped": ("missing", ADAM, "some params only"),
    "ranks_swapped": ("of another rank", {"master", *ADAM}, "of another rank"),
    "one_shard_twice": ("of another rank", {"master", *ADAM}, "of another rank"),
    "older_loaded": ("of another step", {"master", *ADAM}, "of another checkpoint: step 2"),
}
PLAIN = {
    "param_gone": SHARDED["param_gone"],
    "half_dropped": SHARDED["half_dropped"],
    "decay_changed": (),
    "older_loaded": SHARDED["older_loaded"],
}
RANDOM = ("random states are those of rank", "", "the random states were exchanged on 2 of 2 ranks")
EXCHANGED = {"decay_exchanged": ("weight_decay is", "", "exchanged between params")}
NOTED = {
    "decay_changed": "weight_decay is 0.7",
    "schedule_changed": "schedule: the learning rate of param group 0 at its step is",
    "type_changed": "schedule: lr_scheduler_type is cosine, linear in the checkpoint",
    "total_changed": "schedule: max_steps is 60, 6 in the checkpoint",
}
CASES = {
    "engine-1": {**EVERYWHERE, **ZERO},
    "engine-2": {
        **EVERYWHERE,
        **ZERO,
        **{name: SCHEDULED[name] for name in ("schedule_restarted", "schedule_changed")},
    },
    "engine-3": {**EVERYWHERE, **ZERO, **SCHEDULED},
    "accelerate-2": {**EVERYWHERE, **ZERO, **SCHEDULED},
    "accelerate-ddp": {**EVERYWHERE, **SCHEDULED, **PLAIN, "random_drawn": (), "random_exchanged": RANDOM},
    "accelerate-fsdp": {**EVERYWHERE, **SCHEDULED, **SHARDED},
    "hf": {**EVERYWHERE, **SCHEDULED, **SHARDED, **EXCHANGED},
    "titan": {**SCHEDULED, **EXCHANGED, "clean": ()},
    "loop-tied": {"clean": (), "untied": ("lm_head.weight and", None, "params are not tied")},
    "loop-frozen": {
        **EVERYWHERE,
        "frozen_changed": ("other values", {"frozen"}, "frozen params"),
        "frozen_gone_on_one_rank": ("missing", {"frozen"}, "frozen params"),
        "param_trained": ("frozen in the checkpoint", {"master"}, "were frozen"),
    },
}
ARGUED = {"type_changed": (), "total_changed": ()}
TRAINERS = {name: {**EVERYWHERE, **ZERO, **SCHEDULED, **ARGUED} for name in ("zero1", "zero2", "llama", "lora3")}
for _name in ("llama", "lora3"):  # of ZeRO-3, where every param is divided
    TRAINERS[_name] = {fault: how for fault, how in TRAINERS[_name].items() if fault not in COPIES}
TRAINERS |= {name: {**EVERYWHERE, **SCHEDULED} for name in ("lightning", "lightning-zero-2")}
del TRAINERS["lightning"]["module_replaced"]  # the head still has the param
TRAINERS["llama-tied"] = {"clean": (), "untied": ("lm_head.weight and model.embed_tokens", None, "params are not tied")}
CASES |= TRAINERS
LONG = {"engine-1", "accelerate-2", *TRAINERS}
"""engine-2 has all the code of the first two; test_trainer.py and lightning_runs/test_attested.py try the others."""


def in_turn() -> set[tuple[str, str]]:
    """Return the case in which the short suite tries each fault: the clients take turns."""
    clients: dict[str, list[str]] = {}
    for case, faults in CASES.items():
        for fault in faults if case not in LONG else ():
            clients.setdefault(fault, []).append(case)
    turns = {(cases[at % len(cases)], fault) for at, (fault, cases) in enumerate(clients.items())}
    return turns | {(case, "clean") for case in clients["clean"]}


SHORT = in_turn()


@pytest.fixture(scope="module")
def found(tmp_path_factory, runs, selected):
    folder, plan = tmp_path_factory.mktemp("attested"), []
    wanted = {name: [fault for fault in faults if (name, fault) in selected] for name, faults in CASES.items()}
    wanted = {name: faults for name, faults in wanted.items() if faults}
    for name, faults in wanted.items():
        paths = [str(runs.checkpoint(name, step)) for step in (4, 2)]
        plan.append({"name": name, "spec": runs[name].spec.to_json(), "checkpoints": paths, "faults": faults})
    (folder / "plan.json").write_text(json.dumps(plan))
    start_ranks("trainings.attested", [folder / "plan.json", folder], 2, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in wanted}


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        pytest.param(case, fault, marks=[] if (case, fault) in SHORT else [pytest.mark.long])
        for case, faults in CASES.items()
        for fault in faults
    ],
)
def test_it_is_found_and_named(found, case, fault):
    told, expected = found[case][fault], CASES[case][fault]
    assert told["is_same"] == (not expected), told
    if not expected:
        assert told["num_states"] > 0
        rows = {(row["state"], row["kind"]) for row in told["states"]}
        assert rows == ({("master", "rounded")} if fault == "masters_rounded" else set())
        assert (told["num_same"] == told["num_states"]) == (not rows)
        noted = [one["what"] for one in told["others"]]
        assert all(one.startswith(NOTED.get(fault, "-")) for one in noted) and bool(noted) == (fault in NOTED)
        return
    how, kinds, cause = expected
    assert cause in told["cause"]
    if kinds:
        alarms = {(row["state"], row["kind"]) for row in told["states"] if row["is_alarm"]}
        assert {(kind, how) for kind in kinds} <= alarms
        assert {kind for kind, how_ in alarms if how != "not trained" or how_ != "missing"} == kinds
        if fault.endswith("_on_one_rank"):
            assert all(row["ranks"] == [1] for row in told["states"] if row["is_alarm"])
    else:
        assert kinds is None or not told["states"]
        assert [one for one in told["others"] if one["what"].startswith(how)]


def test_random_states_of_accelerate_are_compared(found):
    notes = {
        fault: [note for note in told["notes"] if "random" in note] for fault, told in found["accelerate-ddp"].items()
    }
    assert not notes["clean"] and not notes["random_exchanged"]
    assert notes["random_drawn"] == ["random states of 2 of 2 ranks: not restored, or drawn from since"]


def test_objects_that_accelerate_saves_along_are_named(found):
    assert "objects that accelerate saves along are not compared: Meter" in found["accelerate-ddp"]["clean"]["notes"]
