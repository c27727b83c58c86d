"""Every field that a stock resume reads, off in every way that its row speaks of: `verify` says what the row says."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fields import Damage, damages_of, places_of
from llmtailor.findings import ERROR
from llmtailor.formats.field_tables import CODES, UNLIKE, Field, Table
from llmtailor.formats.zero.tables import MODEL, ZERO3, ZERO12
from llmtailor.verify.verify import verify_checkpoint
from real.harness import Runs
from verify.damages import STEP

RUNS = (
    (ZERO3, "*optim_states.pt", "llama llama-fp16 llama-cpu-adam"),
    (ZERO12, "*optim_states.pt", "zero2 zero2-fp16 zero1-bf16opt"),
    (MODEL, "*model_states.pt", "llama zero2 llama-ds-both"),
)
"""Which files a table is about, and runs of which some have every field"""
WITHOUT = {"max_exp_avg_sq": "no run of the tests has amsgrad", "bias_correction": "ZeRO-3 only"}
"""Fields that at most one run has, which only ``--all`` trains, and why"""
CASES = [
    pytest.param(
        table,
        pattern,
        runs,
        field,
        id=f"{table.title.split(',')[0]}-{field.name}",
        marks=pytest.mark.long if table is ZERO3 and field.path[-1] in WITHOUT else (),  # looked for in all runs
    )
    for table, pattern, runs in RUNS
    for field in table.fields
]


@pytest.mark.parametrize(("table", "pattern", "names", "field"), CASES)
def test_a_field_that_is_off_is_told(table: Table, pattern: str, names: str, field: Field, runs, tmp_path):
    checkpoint, files = _with_field(runs, names.split(), pattern, field, tmp_path)
    if checkpoint is None:
        assert field.path[-1] in WITHOUT
        return
    for damage in damages_of(field):
        if damage.way == UNLIKE and len(files) == 1:
            continue
        kept = [path.read_bytes() for path in files]
        for rank, (path, data) in enumerate(zip(files, kept, strict=True)):
            if damage.way != UNLIKE or rank == 1:
                tree = _load(data)
                assert damage.apply(tree)
                torch.save(tree, path)
        _check(checkpoint, damage, files[-1].relative_to(checkpoint).as_posix())
        for path, data in zip(files, kept, strict=True):
            path.write_bytes(data)


def _with_field(
    runs: Runs, names: list[str], pattern: str, field: Field, folder: Path
) -> tuple[Path | None, list[Path]]:
    """Return a copy of a checkpoint that has the field, and the files that it is in, which alone may be written."""
    for name in names:
        source = runs[name].checkpoint(STEP)
        found = sorted(path.relative_to(source) for path in source.glob(f"global_step*/{pattern}"))
        if [*places_of(_load((source / found[0]).read_bytes()), field.path)]:
            target = folder / source.name
            shutil.copytree(source, target)
            return target, [target / path for path in found]
    return None, []


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _check(checkpoint: Path, damage: Damage, path: str) -> None:
    verdict = verify_checkpoint(checkpoint, name="x")
    text = f"{damage}:\n" + "\n".join(map(str, verdict.findings))
    if damage.says is None:
        assert verdict.is_resumable, text
        return
    told = [finding for finding in verdict.findings if finding.path == path]
    assert told, text
    assert verdict.is_resumable == (damage.says.severity != ERROR), text
    assert damage.says.severity in {finding.severity for finding in told}, text
    if damage.way not in damage.field.told_by_reader:
        assert (damage.says.code or CODES[damage.way]) in {finding.code for finding in told}, text
