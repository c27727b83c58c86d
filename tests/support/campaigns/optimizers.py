"""Kill trainings with every optimizer of trainings/optimizers.py, and print what a stock resume makes of it.

    python tests/support/campaigns/optimizers.py
    python tests/support/campaigns/optimizers.py "SGD momentum" adamw_bnb_8bit --seed 7

A training of 12 steps saves in the background after every third, and its process kills itself some steps after the
second save. ``llmtailor merge --run`` composes the newest checkpoint, and the stock Trainer resumes from it. With the
policy ``full``, all later losses and the final weights must be those of the training that nobody killed, to the last
bit. With the default policy, the composite must verify and the training must get to its end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from helpers.commands import call  # noqa: E402
from trainings.harness import TrainingFailed, start_ranks  # noqa: E402
from trainings.killed import MOMENTS, STEPS  # noqa: E402
from trainings.optimizers import ALL  # noqa: E402

POLICIES = {"full": {"policy": "full"}, "default": {}}
EVERY = 3
DIES = range(2 * EVERY + 1, 3 * EVERY)
"""After how many steps: some after the second save, before the third"""


@dataclass(frozen=True)
class Found:
    """What a resume of a killed training made."""

    died: str
    """After which step, and in which part of the next"""
    step: int
    """Of the composite"""
    is_same: bool
    """Whether losses and final weights are those of the straight run, to the last bit"""
    largest: float
    """The largest relative difference of losses"""


def trial(name: str, folder: Path, seed: int) -> dict[str, Found]:
    """Return what came of each policy; raise AssertionError for what is wrong."""
    chance = random.Random(f"{name} {seed}")
    dies = {policy: (chance.choice(DIES), chance.choice(MOMENTS)) for policy in POLICIES}
    train(name, folder, [{"name": "straight"}])
    for policy, options in POLICIES.items():
        attached = {"save_steps": EVERY, **options}
        train(name, folder, [{"name": policy, "attached": attached, "dies": dies[policy]}], killed=True)
    composed = {policy: folder / policy / "composed" for policy in POLICIES}
    for policy, out in composed.items():
        call("merge", "--run", folder / policy, out)
        call("verify", out, "--deep")
    resumes = [{"name": f"{one}-resumed", "resume_from": str(out)} for one, out in composed.items()]
    train(name, folder, resumes)
    return {policy: found(folder, policy, dies[policy]) for policy in POLICIES}


def train(name: str, folder: Path, trainings: list[dict[str, Any]], killed: bool = False) -> None:
    orders = folder / f"{trainings[0]['name']}.json"
    orders.write_text(json.dumps({"optimizer": name, "trainings": trainings}))
    try:
        start_ranks("trainings.killed", [orders, folder], 1, folder)
    except TrainingFailed as error:
        assert killed and "code -9" in str(error), error
    else:
        assert not killed, "the training was not killed"


def found(folder: Path, policy: str, died: tuple[int, str]) -> Found:
    straight, resumed = folder / "straight", folder / f"{policy}-resumed"
    step = json.loads((folder / policy / "composed" / "trainer_state.json").read_text())["global_step"]
    wanted, losses = (json.loads((one / "losses.json").read_text()) for one in (straight, resumed))
    assert [*losses] == [f"{at}" for at in range(step + 1, STEPS + 1)], losses
    assert all(map(math.isfinite, losses.values())), losses
    weights, final = (torch.load(one / "final.pt") for one in (straight, resumed))
    is_same = all(losses[at] == wanted[at] for at in losses) and all(weights[one].equal(final[one]) for one in weights)
    assert is_same or policy != "full", f"losses of the straight run: {wanted}; of the resume: {losses}"
    largest = max(abs(losses[at] / wanted[at] - 1) for at in losses)
    return Found(f"{died[0]}, {died[1]}", step, is_same, largest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which optimizers (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: another one each time")
    parser.add_argument("--work", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    work, wrong, began = Path(tempfile.mkdtemp(prefix="optimizers-", dir=options.work)), 0, time.monotonic()
    names = options.names or [*ALL]
    print(f"seed {options.seed}", flush=True)
    try:
        for number, name in enumerate(names):
            (folder := work / f"{number}").mkdir()
            try:
                for policy, one in trial(name, folder, options.seed).items():
                    said = "as the straight run" if one.is_same else f"losses differ by up to {one.largest:.1e}"
                    print(f"{name:24} {policy:8} killed after {one.died:24} from step {one.step}: {said}", flush=True)
            except AssertionError as error:
                wrong += 1
                print(f"{name:24} WRONG: {error}", flush=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(work)
    print(
        f"{len(names) - wrong} of {len(names)} optimizers resumed after their death ({time.monotonic() - began:.0f} s)"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
