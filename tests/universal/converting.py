"""Universal checkpoints made by llmtailor, and by DeepSpeed's own script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import llmtailor
from llmtailor.recipe import Recipe


def convert(source: Path, out: Path, dtype: str | None = None, **options: object) -> Path:
    llmtailor.merge(Recipe("convert", "", source, (), dtype, None), out, llmtailor.Options(**options))
    state = out / "trainer_state.json"
    if not (source / state.name).exists():  # made; to be completed, as a note says
        state.write_text(json.dumps(json.loads(state.read_text()) | {"logging_steps": 1, "save_steps": 4}))
    return out


def by_deepspeed(source: Path, out: Path) -> Path:
    """Run ``ds_to_universal`` on a copy, of which only the universal checkpoint stays."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.copytree(source, out)
    tag = (out / "latest").read_text()
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    switches = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    folders = {"input_folder": str(out / tag), "output_folder": str(out / f"{tag}_universal")}
    ds_to_universal.main(SimpleNamespace(**folders, **workers, **switches))
    shutil.rmtree(out / tag)
    (out / "latest").unlink()
    return out
