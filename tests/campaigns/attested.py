"""Make resumes wrong at random, over every client, and clean ones in every way, and count what attesting says.

    python tests/campaigns/attested.py --seed 1

Faults are drawn by the seed from those of tests/attestation/test_faults.py: two ranks resume, the training is spoiled,
and attesting must name it. Clean resumes are of other numbers of ranks, stages, formats and param groups, by
``convert``; none may give an alarm. Trainings are those of the tests, trained once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TQDM_DISABLE", "1")

from attestation.test_faults import ADAM, CASES, EVERYWHERE, SCHEDULED, ZERO  # noqa: E402
from helpers.commands import call  # noqa: E402
from trainings.harness import Runs, start_ranks  # noqa: E402
from trainings.spec import Spec  # noqa: E402

LORA = Spec("lora", "llama+lora", stage=0, dtype="fp32", steps=4)
MORE = {
    "trainer ZeRO-1": ("zero1", {**EVERYWHERE, **ZERO, **SCHEDULED}),
    "trainer ZeRO-2": ("zero2", {**EVERYWHERE, **ZERO, **SCHEDULED}),
    "trainer ZeRO-3": ("llama", {**EVERYWHERE, **ZERO, **SCHEDULED}),
    "trainer LoRA": ("", {**EVERYWHERE, **SCHEDULED}),
    "lightning DDP": ("lightning", {**EVERYWHERE, **SCHEDULED}),
    "lightning ZeRO-2": ("lightning-zero-2", {**EVERYWHERE, **ZERO, **SCHEDULED}),
}


def is_right(found: dict[str, Any], fault: str, expected: tuple[Any, ...]) -> bool:
    """Return whether what was found has the right name, and nothing else is named."""
    how, kinds, cause = expected
    if fault in ("zeroed", "one_state_of_another_step"):  # of either moment, as drawn
        kinds = {row["state"] for row in found["states"] if row["is_alarm"]} & ADAM
        if len(kinds) != 1:
            return False
    alarms = {(row["state"], row["kind"]) for row in found["states"] if row["is_alarm"]}
    if found["is_same"] or cause not in (found["cause"] or ""):
        return False
    if kinds:
        return {(kind, how) for kind in kinds} <= alarms and {kind for kind, _ in alarms} <= set(kinds)
    return not alarms and any(one["what"].startswith(how) for one in found["others"])


def plan_faults(chance: random.Random, count: int, runs: Runs) -> list[dict[str, Any]]:
    table = {**CASES, **{name: faults for name, (_, faults) in MORE.items()}}
    drawn: dict[str, list[tuple[str, int]]] = {}
    names = list(table)
    for number in range(count):
        case = names[number % len(names)]
        faults = [name for name, expected in table[case].items() if expected]
        # each fault of a client once, before any comes again
        left = [name for name in faults if name not in {one for one, _ in drawn.get(case, [])}] or faults
        drawn.setdefault(case, []).append((chance.choice(left), chance.randrange(10**6)))
    plan: list[dict[str, Any]] = []
    for case, faults in drawn.items():
        one: dict[str, Any] = {"name": case, "by": "loop", "faults": faults}
        if case in CASES:
            run = runs[case]
            one |= {"spec": run.spec.to_json(), "root": str(run.folder.parent), "step": 4}
        elif case.startswith("lightning"):
            name = MORE[case][0]
            paths = [str(runs[name].checkpoint(step)) for step in (4, 2)]
            one |= {"by": "lightning", "spec": runs[name].spec.to_json(), "checkpoints": paths}
            one["spec"]["steps"] = 6
        elif case == "trainer LoRA":
            one |= {"by": "lora", "spec": LORA.to_json(), "checkpoints": ["", ""]}
        else:
            run = runs[MORE[case][0]]
            paths = [str(run.checkpoint(step)) for step in (4, 2)]
            one |= {"by": "trainer", "spec": run.spec.to_json(), "checkpoints": paths}
        plan.append(one)
    return plan


def plan_clean(ranks: int, folder: Path, runs: Runs) -> list[dict[str, Any]]:
    """Return clean resumes on so many ranks: each client from every other one of its kind."""
    plan = list[dict[str, Any]]()

    def add(name: str, by: str, spec: dict[str, Any], sources: list[Path], *words: object) -> None:
        made = []
        for number, source in enumerate(sources):
            out = folder / name / f"from-{number}" / "checkpoint-4"
            out.parent.mkdir(parents=True)
            call("convert", source, out, "--num-gpu", ranks, *words)
            for path in out.glob("custom_checkpoint_*.pkl"):  # no object is registered here
                path.unlink()
            made.append(str(out))
        plan.append({"name": f"{name} on {ranks}", "by": by, "spec": spec, "clean": made})

    engines = [runs[f"engine-{stage}"].checkpoint(step) for stage in (1, 2, 3) for step in (2, 4)]
    for stage in (1, 2, 3):
        spec = {**runs[f"engine-{stage}"].spec.to_json(), "scheduler": ""}  # theirs are of different kinds
        add(f"engine-{stage}", "loop", spec, engines, "--stage", stage)
    of_dtype = {
        "bf16": [runs["accelerate-2"].checkpoint(step) for step in (2, 4)],
        "fp32": [runs[name].checkpoint(4) for name in ("accelerate-ddp", "accelerate-fsdp")],
    }
    for stage in (2, 3):
        for dtype, sources in of_dtype.items():
            spec = {**runs["accelerate-2"].spec.to_json(), "objects": False, "stage": stage, "dtype": dtype}
            add(f"accelerate-{stage} {dtype}", "loop", spec, sources, "--stage", stage)
    fsdp = [runs[name].checkpoint(step) for name in ("loop", "loop-w3") for step in (2, 4)]
    add("loop", "loop", runs["loop"].spec.to_json(), fsdp, "--to", "dcp")
    for name, others in (("zero1", ("zero2", "llama")), ("zero2", ("zero1", "llama")), ("llama", ("zero1", "zero2"))):
        spec, paths = runs[name].spec, [runs[other].checkpoint(4) for other in others]
        add(f"trainer {name}", "trainer", spec.to_json(), paths, "--stage", spec.stage)
    layers = {**runs["zero2"].spec.to_json(), "groups": "layer"}
    add("trainer groups", "trainer", layers, [runs["zero1"].checkpoint(4)], "--stage", 2, "--groups", "layer")
    return plan


def run(plan: list[dict[str, Any]], ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    (folder / "plan.json").write_text(json.dumps(plan))
    start_ranks("trainings.attested_more", [folder / "plan.json", folder], ranks, folder, 1500)
    return [json.loads((folder / f"found-{number}.json").read_text()) for number in range(len(plan))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: another one each time")
    parser.add_argument("--faults", type=int, default=84, help="how many (default: 84)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3], help="of clean resumes (default: 1 2 3)")
    parser.add_argument("--work", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    work, wrong, began = Path(tempfile.mkdtemp(prefix="attested-", dir=options.work)), 0, time.monotonic()
    print(f"seed {options.seed}", flush=True)
    runs = Runs(False, work / "runs")
    table = {**CASES, **{name: faults for name, (_, faults) in MORE.items()}}
    try:
        plan = plan_faults(random.Random(options.seed), options.faults, runs) if options.faults else []
        counts: Counter[str] = Counter()
        (folder := work / "faults").mkdir()
        for case, found in zip(plan, run(plan, 2, folder) if plan else [], strict=True):
            for (name, seed), told in zip(case["faults"], found, strict=True):
                good = is_right(told, name, table[case["name"]][name])
                counts[f"{case['name']}: {'named' if good else 'NOT NAMED'}"] += 1
                if not good:
                    wrong += 1
                    print(f"  {case['name']}, {name}, seed {seed}: {told['cause']}; {told['states']}; {told['others']}")
        for title, count in sorted(counts.items()):
            print(f"  {count:4}  {title}")
        print(f"faults found with the right name: {counts.total() - wrong} of {counts.total()}", flush=True)
        num_clean = alarms = 0
        for ranks in options.ranks:
            (folder := work / f"clean-{ranks}").mkdir()
            plan = plan_clean(ranks, folder, runs)
            for case, found in zip(plan, run(plan, ranks, folder), strict=True):
                for path, told in zip(case["clean"], found, strict=True):
                    num_clean += 1
                    if not told["is_same"] or not told["num_states"]:
                        alarms += 1
                        print(f"  {case['name']}, {path}: {told['cause']}; {told['states']}; {told['others']}")
            print(f"  {sum(len(case['clean']) for case in plan):4}  clean resumes on {ranks} ranks", flush=True)
        print(f"false alarms: {alarms} of {num_clean} clean resumes ({time.monotonic() - began:.0f} s)")
    finally:
        shutil.rmtree(work)
    return 1 if wrong or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
