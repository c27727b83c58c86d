"""What stock software reads and llmtailor does not: it is no damage, and is called what it is."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import edit
from llmtailor.codes import Code
from llmtailor.errors import UnsupportedCheckpoint
from llmtailor.findings import ERROR, WARNING
from llmtailor.verify.verify import verify_checkpoint
from verify.damages import STEP

OPTIM = f"global_step{STEP}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = f"global_step{STEP}/zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.fixture
def checkpoint(runs, tmp_path) -> Path:
    path = tmp_path / f"checkpoint-{STEP}"
    shutil.copytree(runs["llama"].checkpoint(STEP), path)
    return path


def deflate(path: Path) -> None:
    with zipfile.ZipFile(path) as source:
        content = [(info.filename, source.read(info)) for info in source.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in content:
            target.writestr(name, data)
    torch.load(path, weights_only=False)  # stock reads it


def save_as_before_1_6(path: Path) -> None:
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)


FORMS = pytest.mark.parametrize(("form", "code"), [(deflate, Code.COMPRESSED), (save_as_before_1_6, Code.LEGACY)])
"""Those that stock reads, and llmtailor doesn't"""


@FORMS
@pytest.mark.parametrize("path", ["scheduler.pt", "rng_state_0.pth"])
def test_another_form_of_a_file_of_the_trainer_is_no_damage(checkpoint: Path, path: str, form: Any, code: Code):
    form(checkpoint / path)
    verdict = verify_checkpoint(checkpoint, name="x", deep=True)
    assert [(one.code, one.path, one.severity) for one in verdict.findings] == [(code, path, WARNING)]
    assert verdict.is_resumable and "torch.save" in verdict.findings[0].fix


@FORMS
def test_another_form_of_a_file_that_no_resume_reads_is_not_even_told(checkpoint: Path, form: Any, code: Code):
    form(checkpoint / "training_args.bin")
    assert not verify_checkpoint(checkpoint, name="x", deep=True).findings


@FORMS
@pytest.mark.parametrize("paths", [[OPTIM], [MODEL], [OPTIM, OPTIM.replace("rank_1", "rank_0")]])
def test_states_in_another_form_can_not_be_judged(checkpoint: Path, paths: list[str], form: Any, code: Code):
    for path in paths:
        form(checkpoint / path)
    with pytest.raises(UnsupportedCheckpoint) as refused:
        verify_checkpoint(checkpoint, name="x")
    assert {(one.code, one.path) for one in refused.value.problems} == {(code, path) for path in paths}


def test_tensors_that_do_not_lie_in_one_piece_can_not_be_judged(checkpoint: Path):
    def change(tree: Any) -> None:
        masters = tree["optimizer_state_dict"]["fp32_flat_groups"]
        masters[1] = torch.stack([masters[1].detach()] * 2, dim=1)[:, 0]

    edit(checkpoint / OPTIM, change)
    with pytest.raises(UnsupportedCheckpoint, match="not contiguous") as refused:
        verify_checkpoint(checkpoint, name="x")
    assert {(one.code, one.path) for one in refused.value.problems} == {(Code.STATE_LAYOUT, OPTIM)}


def test_compressed_states_beside_a_damage_are_not_called_damaged(checkpoint: Path):
    deflate(checkpoint / OPTIM)
    (checkpoint / "latest").unlink()
    verdict = verify_checkpoint(checkpoint, name="x")
    found = {(one.code, one.severity) for one in verdict.findings}
    assert found == {(Code.COMPRESSED, WARNING), (Code.FILE_NAME, ERROR)}
