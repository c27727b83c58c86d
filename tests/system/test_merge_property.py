"""Whole merges over random layouts, world sizes and choices, against the slow oracle."""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmtailor
from helpers.cases import examples
from helpers.checkpoints import make
from helpers.files import TOLD, names
from helpers.states import raw
from helpers.strategies import shapes
from llmtailor.model.roles import WEIGHT
from llmtailor.storage.checksums import part_digest
from oracle import zero3
from synthetic import pickled_as_deepspeed


@st.composite
def cases(draw):
    shape = draw(shapes(max_layers=4))
    layout = {
        "shape": shape,
        "groups": draw(st.sampled_from(["default", "layer"])),
        "shard_bytes": draw(st.sampled_from([60, 10**9])),
    }
    steps = draw(st.lists(st.integers(1, 400), min_size=1, max_size=3, unique=True))
    parts = ["embed_tokens", *range(shape.num_layers), "norm", *([] if shape.tied else ["lm_head"])]
    choice = {part: draw(st.sampled_from(steps)) for part in parts}
    cuts = {
        step: {"world_size": draw(st.integers(1, 5)), "sub_group_size": draw(st.sampled_from([1, 10, 40, 10**9]))}
        for step in steps
    }
    return layout, cuts, choice, draw(st.sampled_from(steps)), draw(st.none() | st.integers(1, 6))


def part_of(name: str) -> str | int:
    words = name.split(".")
    return int(words[2]) if words[1] == "layers" else words[-2]


@given(cases())
@settings(max_examples=examples(4, 25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_byte_is_where_the_oracle_says(tmp_path_factory, case):
    layout, cuts, choice, base, num_ranks = case
    root = tmp_path_factory.mktemp("run")
    for step, cut in cuts.items():
        make(root, step, **layout, **cut)
    recipe = {
        "base_model": f"checkpoint-{base}",
        "parts": [{"from": f"checkpoint-{step}", "select": part} for part, step in choice.items()],
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    report = llmtailor.merge(root / "recipe.yaml", root / "out", llmtailor.Options(num_ranks))

    with pickled_as_deepspeed():
        snapshots = {str(step): zero3.load(root / f"checkpoint-{step}") for step in cuts}
        native = None
        if num_ranks not in (None, cuts[base]["world_size"]):  # as if so many ranks had saved the base
            cut = {**cuts[base], "world_size": num_ranks}
            native = zero3.load(make(root / "native", base, **layout, **cut))
        found = zero3.load(root / "out")
        wanted = zero3.compose(snapshots, str(base), lambda name: str(choice[part_of(name)]), native)
        for snapshot in (found, wanted):  # how many samples the base's run had seen is not a matter of ranks
            snapshot.rest["counters"].pop("global_samples")
        zero3.assert_same(found, wanted)
        if native:
            assert names(root / "out") == names(root / "native" / f"checkpoint-{base}") | {*TOLD}
    check_files(root / "out", report)
    check_report(report, choice, base)
    shutil.rmtree(root)


def check_files(out: Path, report: llmtailor.compose.plan.Report) -> None:
    """Every file is there as planned, the zips are sound, and the manifest's checksums are those of the bytes."""
    manifest = json.loads((out / "llmtailor.json").read_text())
    assert names(out) == {row.path for row in report.files} | {*TOLD}
    for entry in manifest["files"]:
        data = (out / entry["path"]).read_bytes()
        assert (len(data), f"{zlib.crc32(data):08x}") == (entry["num_bytes"], entry["crc32"])
    for path in out.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    with pickled_as_deepspeed():
        snapshot = zero3.load(out)
    tied = snapshot.rest["tied"]
    for row in manifest["parts"]:
        states = [
            (state, tensor.numel() * tensor.element_size(), zlib.crc32(raw(tensor)))
            for state, tensor in snapshot.states.items()
            if str(part_of(tied.get(state.param, state.param))) == row["part"].removeprefix("layer ")
        ]
        # weights are rounded masters, and may go by other names: they are no part of the digest
        assert row["digest"] == part_digest([one for one in states if one[0].kind != WEIGHT])
        assert row["num_bytes"] == sum(num_bytes for _, num_bytes, _ in states)


def check_report(report, choice, base) -> None:
    told = {row.part.removeprefix("layer "): row for row in report.parts}
    assert set(told) == {str(part) for part in choice}
    for part, step in choice.items():
        row = told[str(part)]
        assert (row.step, row.staleness, row.is_whole) == (step, base - step, True)
        assert row.source.endswith(f"checkpoint-{step}")
    assert report.num_bytes == sum(row.num_bytes for row in report.files)
    assert [row.is_base for row in report.sources].count(True) == 1
