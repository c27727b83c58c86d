"""Random runs on disk, thinned out and collected: every step that is promised is there, with the right bytes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.cases import examples
from helpers.checkpoints import make
from helpers.strategies import shapes
from llmtailor.checkpoint.lineage import Ledger
from oracle import zero3
from synthetic import Shape, pickled_as_deepspeed
from thin.scene import call, compose, folders, save_partial, sources, taken


@dataclass(frozen=True)
class Case:
    shape: Shape
    layout: dict[str, Any]
    saves: dict[int, tuple[bool, list[str]]]
    """Step -> whether there is a full checkpoint, and the parts of the saver's partial one, if there is one"""
    lost: list[int]
    """Steps whose partial checkpoint somebody has deleted"""
    words: list[object]
    """Of ``thin``"""
    keep: list[object]
    """Of ``gc``"""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes(max_layers=3))
    parts = ["embed_tokens", *(f"layer {number}" for number in range(shape.num_layers)), "norm"]
    parts += [] if shape.tied else ["lm_head"]
    subsets = st.lists(st.sampled_from(parts), min_size=1, max_size=2, unique=True)
    steps = draw(st.lists(st.integers(1, 400), min_size=2, max_size=4, unique=True).map(sorted))
    kinds = {step: draw(st.sampled_from(["full", "full", "partial", "both"])) for step in steps}
    kinds[steps[-1]] = draw(st.sampled_from(["full", "both"]))
    in_part = [step for step, kind in kinds.items() if kind != "full"]
    saves = {
        step: (kind != "partial", [] if kind == "full" else parts if step == in_part[0] else draw(subsets))
        for step, kind in kinds.items()
    }
    lost = draw(st.lists(st.sampled_from(in_part), max_size=1)) if in_part else []
    words: list[object] = draw(
        st.sampled_from([["--strategy", "parity"], ["--strategy", "round_robin:2"], ["--select", "layer 0"]])
        | st.integers(1, 2).map(lambda count: ["--keep-optimizer-last", count])
    )
    layout = {
        "groups": draw(st.sampled_from(["default", "layer"])),
        "world_size": draw(st.integers(1, 3)),
        "sub_group_size": draw(st.sampled_from([20, 10**9])),
    }
    keep: list[object] = draw(st.sampled_from([[], ["--keep", 1], ["--keep", 2]]))
    return Case(shape, layout, saves, lost, words, keep)


def check(run: Path, step: int, snapshots: dict[str, zero3.Snapshot], out: Path) -> dict[str, int]:
    """Compose a step, and compare it with what the oracle makes of the full checkpoints; return the steps it took."""
    told = sources(compose(run, step, out))
    with pickled_as_deepspeed():
        found = zero3.load(out)
    tied = found.rest["tied"]

    def chosen(name: str) -> str:
        words = tied.get(name, name).split(".")
        return str(told[f"layer {words[2]}" if words[1] == "layers" else words[-2]])

    zero3.assert_same(found, zero3.compose(snapshots, str(step), chosen))
    shutil.rmtree(out)
    return told


@given(cases())
@settings(max_examples=examples(3, 16), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_promised_step_is_composed_bit_for_bit(tmp_path_factory, case):
    root = tmp_path_factory.mktemp("runs")
    run, ledger = root / "run", Ledger("saver")
    run.mkdir()
    for step, (is_full, parts) in case.saves.items():
        full = make(root / "all", step, shape=case.shape, **case.layout)
        if parts:
            ledger = save_partial(run, full, parts, ledger)
        if is_full:
            shutil.copytree(full, run / full.name)
    for step in case.lost:
        shutil.rmtree(run / "partial" / f"step-{step:08}")
    with pickled_as_deepspeed():
        snapshots = {str(step): zero3.load(root / "all" / f"checkpoint-{step}") for step in case.saves}

    before = taken(run)
    thinned = call("thin", run, *case.words, "--yes")
    assert taken(run) == before - thinned["freed_bytes"]
    given_up = {row["step"] for row in thinned["checkpoints"] if row["becomes"] == "weights only"}
    assert set(thinned["composable_before"]) - given_up <= set(thinned["composable_after"])
    made = {step: check(run, step, snapshots, root / "out") for step in thinned["composable_after"]}
    for row in thinned["checkpoints"]:
        if row["becomes"] == "partial":
            assert {made[row["step"]][part] for part in row["parts"]} == {row["step"]}
        elif row["becomes"] == "stays" and row["step"] in made:
            assert set(made[row["step"]].values()) == {row["step"]}

    before = taken(run)
    collected = call("gc", run, *case.keep, "--yes")
    assert taken(run) == before - collected["freed_bytes"]
    count = case.keep[-1] if case.keep else len(made)
    assert sorted(made)[-count:] == collected["composable_after"][-count:]
    for step in sorted(made)[-count:]:
        assert check(run, step, snapshots, root / "out") == made[step]
    assert all("llmtailor" not in name for name in folders(run))
    shutil.rmtree(root)
