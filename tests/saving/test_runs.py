"""Whole runs: policies, ledger and retention together, with failures and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cases import examples
from llmtailor.checkpoint.lineage import Ledger, RunCheckpoint, is_complete, lost_parts, partial_sources
from llmtailor.policies import Situation, check_policy, choose, make_policy
from llmtailor.runs.gc import deletable
from recipe.structures import llama

SPECS = (
    "full",
    "parity",
    "filter:first=1,last=1,every=2",
    "round_robin:3",
    "adaptive:0.1",
    "adaptive:0.4",
)


def sizes(num_layers: int) -> dict[str, int]:
    return {part: 60 + 40 * (at % 3) for at, part in enumerate(llama(num_layers).parts)}


@cache
def limit_of(spec: str, num_layers: int, max_staleness: int | None) -> int:
    structure = llama(num_layers)
    return check_policy(make_policy(spec), structure, structure.parts, sizes(num_layers), max_staleness)


def steps_of(found: Mapping[str, RunCheckpoint]) -> dict[str, int]:
    return {part: record.step for part, record in found.items()}


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[str, str, int]]:
    """What happens, in order: ("save" or "fail", the policy from then on, which step to resume from)."""
    events = []
    spec = draw(st.sampled_from(SPECS))
    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["save", "save", "save", "save", "fail"]))
        if kind == "fail" and draw(st.booleans()):
            spec = draw(st.sampled_from(SPECS))
        events.append((kind, spec, draw(st.sampled_from([0, 0, 0, 1, 3]))))
    return events


@settings(max_examples=examples(15, 100))  # checking a policy takes a while, the first time
@given(plans(), st.integers(1, 6), st.integers(1, 3), st.sampled_from([None, 9, 30]), st.integers(0, 2**32))
def test_every_step_can_be_composed_and_no_part_is_too_old(plan, num_layers, keep, given_staleness, seed):
    structure = llama(num_layers)
    parts = structure.parts
    num_bytes = sizes(num_layers)
    random = Random(seed)
    manifests: dict[int, str] = {}
    disk: dict[int, RunCheckpoint] = {}
    ledger, step, lineages = Ledger("L0"), 0, 0

    for kind, spec, back in plan:
        if kind == "fail":
            able = sorted(save.step for save in disk.values() if is_complete(save, disk.values()))
            if able:
                step = able[max(0, len(able) - 1 - back)]
                lineages += 1
                ledger = Ledger.from_json(json.loads(manifests[step]), "manifest.json").resumed(f"L{lineages}", step)
                ledger = ledger.without(lost_parts(ledger, disk.values()))
            continue
        step += random.randint(1, 3)
        limit = limit_of(spec, num_layers, given_staleness)
        if ledger.saves == 0:
            chosen = dict.fromkeys(parts, "base")
        else:
            drift = {part: random.random() ** 3 * (ledger.saves - save) for part, save in ledger.last.items()}
            situation = Situation(step, ledger.saves, structure, parts, num_bytes, ledger.last, drift, drift)
            chosen = dict(choose(make_policy(spec), situation, limit).parts)
        ledger = ledger.after(step, chosen, parts)
        manifests[step], disk[step] = json.dumps(ledger.to_json()), RunCheckpoint.saved(Path(str(step)), ledger)
        assert ledger.saves - 1 - min(ledger.last.values()) <= limit

        before = list(disk.values())
        disk = {at: record for at, record in disk.items() if at not in deletable(before, ledger, keep)}
        assert steps_of(partial_sources(disk[step], disk.values())) == disk[step].ledger.steps
        own = [save for save in before if disk[step].builds_on(save) and is_complete(save, before)]
        for save in sorted(own, key=lambda save: save.step)[-keep:]:
            assert partial_sources(save, disk.values()) == partial_sources(save, before)


ASK = """
import json, sys
from llmtailor.policies import Situation, choose, make_policy
from recipe.structures import qwen_vl

structure = qwen_vl(9)
num_bytes = {part: 100 + len(part) % 3 * 50 for part in structure.parts}
answers = []
for spec in json.loads(sys.argv[1]):
    policy, last = make_policy(spec), dict.fromkeys(structure.parts, 0)
    for save in range(1, 40):
        drift = {part: 0.1 * (save - last[part]) * (len(part) % 4) for part in structure.parts}
        now = Situation(save, save, structure, structure.parts, num_bytes, dict(last), drift, drift)
        choice = choose(policy, now, 20)
        last.update(dict.fromkeys(choice.parts, save))
        answers.append(list(choice.parts.items()))
print(json.dumps(answers))
"""


def test_every_process_gets_the_same_answers():
    """Ranks have different hash seeds, so nothing may depend on the order of a set."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tests")])
    said = {
        subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(SPECS)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(said) == 1
    assert len(json.loads(said.pop())) == 39 * len(SPECS)
