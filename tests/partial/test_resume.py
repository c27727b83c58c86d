"""Training that goes on from composites of partial checkpoints: by the stock Trainer, and with the saver attached."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.real

from partial.checking import newest  # noqa: E402
from partial.runs import CHECKED_2, CHECKED_3, LIVELY  # noqa: E402

SPEEDS = ("_runtime", "_per_second")
INEXACT = {"z3-cpu-adam"}
"""DeepSpeedCPUAdam computes its bias correction anew after a resume, so the steps that follow differ a little."""
NOISE = 2e-3
"""Of the loss, when gradients are summed in another order and rounded to bf16"""


def comparable(done):
    """The log line by line, without times, and without the summary of this process's own steps."""
    return [
        {key: value for key, value in line.items() if not key.endswith(SPEEDS)}
        for line in done.log
        if "train_loss" not in line
    ]


@pytest.mark.parametrize("name", [job.name for job in LIVELY])
def test_the_saver_changes_nothing_in_a_training(trained, name):
    """Dropout, gradient accumulation, evaluations at the steps that are saved, and a schedule that follows them."""
    watched, alone = trained[name], trained[f"{name}-alone"]
    assert comparable(watched) == comparable(alone)
    lines = comparable(alone)
    assert sum("loss" in line for line in lines) == 8 and sum("eval_loss" in line for line in lines) == 4
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert len(set(rates)) > 2
    about = [line for line in watched.result()["log"] if "checkpoint/bytes" in line]
    assert [line["step"] for line in about] == watched.saves == [2, 4, 6, 8]
    assert {"checkpoint/bytes", "checkpoint/stall_s", "checkpoint/stalest_part_steps"} <= about[0].keys()


@pytest.mark.parametrize("resume", [f"{job.name}@{job.every}" for job in (*CHECKED_2, *CHECKED_3, *LIVELY)])
def test_a_stock_resume_from_a_complete_save_repeats_the_straight_run(trained, resume):
    name = resume.partition("@")[0]
    done, resumed = trained[name], trained[resume]
    assert resumed.job.policy is None
    if name in INEXACT:
        assert resumed.losses == pytest.approx(done.losses, rel=1e-3)
    else:
        assert comparable(resumed) == comparable(done)
    summary = resumed.result()["log"][-1]
    own = [resumed.losses[step] for step in after(resumed)]
    assert len(own) == done.job.steps - resumed.job.at
    assert summary["train_loss"] == pytest.approx(sum(own) / len(own))


def after(done):
    """The steps that ran in this process."""
    return [step for step in done.losses if step > done.job.at]


@pytest.mark.parametrize("resume", ["z3@6", "z3-layer@4", "z2@4", "z1@4", "ddp@4"])
def test_a_stock_resume_from_halves_stays_near_the_straight_run(trained, resume):
    done, resumed = trained[resume.partition("@")[0]], trained[resume]
    assert len(set(newest(resumed, resumed.job.at).values())) == 2
    straight = done.losses
    spread = max(straight.values()) - min(straight.values())
    for step in after(resumed):
        assert resumed.losses[step] != straight[step]
        assert abs(resumed.losses[step] - straight[step]) < spread / 2


@pytest.mark.parametrize("name", ["z3-full-again", "z3-full-twice"])
def test_a_resume_with_the_saver_repeats_the_straight_run(trained, name):
    assert comparable(trained[name]) == comparable(trained["z3-full"])


def test_a_resume_on_more_ranks_repeats_the_straight_run_nearly(trained):
    resumed, straight = trained["z3-full-on-3"], trained["z3-full"]
    assert after(resumed) == [5, 6, 7, 8]
    assert resumed.losses == pytest.approx(straight.losses, rel=NOISE)


@pytest.mark.parametrize(
    ("name", "taken_up"), [("z3-again", [4]), ("z3-twice", [4, 6]), ("z3-on-3", [4]), ("z3-then-filter", [4])]
)
def test_the_record_of_saves_is_taken_up(trained, name, taken_up):
    """No new complete base, the policy goes on where it was, and the log of saves is one."""
    done, straight = trained[name], trained["z3"]
    assert done.saves == straight.saves == [2, 4, 6, 8]
    for step in done.saves:
        ledger = done.manifest(step)["ledger"]
        assert ledger["saves"] == step // 2
        assert sorted(ledger["history"].values()) == [end for end in taken_up if end < step]
    parts = {step: [part["part"] for part in done.manifest(step)["parts"]] for step in done.saves}
    if name != "z3-then-filter":
        assert parts == {step: [part["part"] for part in straight.manifest(step)["parts"]] for step in straight.saves}
    else:
        assert parts[8] == ["embed_tokens", "layer 0", "layer 2", "norm", "lm_head"]
    given_up = [step for step in (6, 8) if step > taken_up[-1]]
    moved = sorted(path.name for path in (done.folder / "partial").glob("step-*.abandoned*"))
    assert [name for name in moved if int(name[5:13]) in given_up]
    [warning] = done.messages
    assert all(f"step-{step:08}" in warning for step in given_up)


def lines_of(done):
    """The log of saves, by step; what was saved again after a failure goes before what was given up."""
    text = (done.folder / "partial" / "saves.jsonl").read_text()
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def exact_drift(before, now, params):
    """|w - w_saved| / |w_saved| from the truth."""
    moved = size = 0.0
    for param in params:
        old, new = before[param].double(), now[param].double()
        moved, size = moved + float((new - old).square().sum()), size + float(old.square().sum())
    return math.sqrt(moved / size)


@pytest.mark.parametrize("name", ["z3", "z3-again", "z3-twice", "z3-on-3", "z2-update"])
def test_drift_is_measured_since_a_parts_own_last_save(trained, name):
    """Also right after a resume. Small tensors are kept whole, so that only rounding is between both."""
    done = trained[name]
    base = done.manifest(2)["parts"]
    masters = {step: done.truth(step)["master"] for step in done.saves}
    for step in done.saves[1:]:
        held, drift = newest(done, step - 1), lines_of(done)[step]["drift"]
        for part in base:
            exact = exact_drift(masters[held[part["part"]]], masters[step], part["params"])
            assert drift[part["part"]] == pytest.approx(exact, rel=1e-4), (step, part["part"])


def test_update_saves_what_has_changed_and_what_would_get_too_old(trained):
    done = trained["z2-update"]
    limit, stalest = 0.04, 3
    seen = set()
    for number, step in enumerate(done.saves[1:], 1):
        held = newest(done, step - 1)
        drift = lines_of(done)[step]["drift"]
        chosen = {part["part"]: part["why"] for part in done.manifest(step)["parts"]}
        changed = {part for part in held if drift[part] > limit}
        assert changed <= chosen.keys()
        assert all(why.startswith("changed by") for part, why in chosen.items() if part in changed)
        for part, since in held.items():
            if part not in chosen:
                assert number - (since // 2 - 1) <= stalest
        seen |= {why.split(" by ")[0] for why in chosen.values()}
    assert seen == {"changed", "max_staleness"}
