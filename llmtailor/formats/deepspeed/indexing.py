"""From a folder with DeepSpeed shards to a `CheckpointIndex`, whatever the ZeRO stage."""

from __future__ import annotations

from pathlib import Path

from llmtailor.core.index import CheckpointIndex, Survey
from llmtailor.errors import Problems
from llmtailor.formats.deepspeed.common import attempt, file_facts, optimizer_name, precision, read_settings
from llmtailor.formats.deepspeed.files import survey_shard_files
from llmtailor.formats.deepspeed.findings import check_steps, find_oddities
from llmtailor.formats.deepspeed.zero3 import read_zero3
from llmtailor.formats.deepspeed.zero12 import read_zero12
from llmtailor.formats.trainer import read_trainer_files


def survey_deepspeed(root: Path, name: str) -> Survey:
    """Index a Trainer checkpoint with DeepSpeed shards; no tensor byte is read but the 4 bytes of each ``step``.

    Raises SourceError, or UnsupportedCheckpoint, if this is none; what is damaged is told by the survey.
    """
    problems = Problems()
    files = survey_shard_files(root, name, problems)
    trainer = read_trainer_files(root, name, problems)
    if files is None:
        return Survey(None, problems)
    facts = file_facts(root, (*files.optim, *files.model))  # before reading, so that no later change goes unnoticed
    read = read_zero3 if files.is_zero3 else read_zero12
    saved = read(root, files, name, problems)
    if saved is None:
        return Survey(None, problems)
    attempt(lambda: check_steps(root, files.tag, saved, name), problems)
    index = CheckpointIndex(
        root=root,
        name=name,
        format=f"deepspeed-zero{saved.stage}",
        stage=saved.stage,
        world_size=saved.world_size,
        global_step=saved.counters.global_steps,
        skipped_steps=saved.counters.skipped_steps,
        tag=files.tag,
        precision=precision(files.is_bf16, saved.ds_config),
        optimizer=optimizer_name(saved),
        params=saved.params,
        tied=saved.tied,
        held={**saved.held, **trainer.weights},
        groups=saved.groups,
        flat_ids=saved.flat_ids,
        group_params=saved.group_params,
        settings=read_settings(saved.ds_config, files.is_bf16, saved.variant),
        variant=saved.variant,
        files={**trainer.files, **facts},
        findings=tuple(find_oddities(root, files, trainer, saved, name)),
        module=saved.module,
        unreadable=saved.unreadable,
    )
    return Survey(index, problems, saved.unreadable)
