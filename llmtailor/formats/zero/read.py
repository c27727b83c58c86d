"""From a folder with DeepSpeed shards to a `CheckpointIndex`, for any ZeRO stage.

It also checks that the shards and the Trainer's files around them come from one save, and that a stock resume accepts
them. What a resume does was checked against deepspeed 0.19.8 and transformers 5.23, by damaging checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex, Survey
from llmtailor.codes import Code
from llmtailor.errors import PathIn, Problems, SourceError
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.format import FileTrees, Trees
from llmtailor.formats.scheduler import compare_scheduler
from llmtailor.formats.trainer import (
    MANIFEST,
    SCALER,
    SCHEDULER,
    TRAINER_STATE,
    TrainerFiles,
    find_lost_rng,
    read_trainer_files,
)
from llmtailor.formats.zero.common import Saved, attempt, file_facts, optimizer_name, precision, read_settings
from llmtailor.formats.zero.contradictions import Shards, find_contradictions
from llmtailor.formats.zero.files import LATEST, ShardFiles, survey_shard_files
from llmtailor.formats.zero.read3 import read_zero3
from llmtailor.formats.zero.read12 import read_zero12

_MIXED = "copy the whole tag folder again; its files come from different saves"


def check_steps(root: Path, tag: str, saved: Saved, name: str) -> None:
    """Raise SourceError unless model states and optimizer states come from the same save.

    Nothing in the files says so directly: the tag counts global steps, and so do the model states, and Adam has
    made a step for each that was not skipped. A composite may mix steps; its manifest says which.
    """
    place, counters = PathIn(name, tag), saved.counters
    tag_step = tag.removeprefix("global_step")
    if tag_step.isdigit() and int(tag_step) != counters.global_steps:
        what = f"the model states are from step {counters.global_steps}, but the tag folder says {tag_step}"
        raise SourceError.at(place, what, _MIXED, Code.STEPS_DIFFER)
    steps = {one.step for one in saved.sub_groups}
    expected = counters.global_steps - counters.skipped_steps  # fp16: no step when the gradients overflow
    if not steps or expected in steps or ((root / MANIFEST).is_file() and 0 not in steps):
        return
    what = (
        f"the model states are from step {expected} (without skipped ones), the optimizer states from step "
        f"{max(steps):g}"
    )
    raise SourceError.at(place, what, _MIXED, Code.STEPS_DIFFER)


def find_oddities(root: Path, files: ShardFiles, trainer: TrainerFiles, saved: Saved, name: str) -> list[Finding]:
    """Return findings on what makes a resume fail, or change, without preventing reading."""
    return [
        *trainer.findings,
        *saved.findings,
        *find_contradictions(Shards(saved, files, (root / MANIFEST).is_file()), name),
        *_stray(root, files, name),
        *_folder(root, files, trainer, saved, name),
        *_scheduler(trainer, files, saved, name),
        *_trainer_state(trainer, saved, name),
        *find_lost_rng(trainer, saved.world_size, name),
    ]


def _folder(root: Path, files: ShardFiles, trainer: TrainerFiles, saved: Saved, name: str) -> Iterator[Finding]:
    if (root / files.tag).is_dir() and not any(root.glob("global_step*")):
        what = f"the tag folder is {files.tag}, but the Trainer looks for one whose name begins with global_step"
        fix = f"rename it to global_step{saved.counters.global_steps}, and write that into latest"
        yield Finding(PathIn(name, files.tag), what, fix, Code.FILE_NAME, ERROR)
    if SCALER in trainer.files:
        what, fix = "DeepSpeed keeps the loss scale itself", "a resume fails if it finds this file; remove it"
        yield Finding(PathIn(name, SCALER), what, fix, Code.FIELD_UNKNOWN, ERROR)
    bf16 = saved.ds_config.get("bf16")
    enabled = bf16.get("enabled") if isinstance(bf16, dict) else None
    if isinstance(enabled, bool) and enabled != files.is_bf16:
        named, run = ("have", "off") if files.is_bf16 else ("lack", "on")
        what = f"the optimizer shards {named} the prefix bf16_, but the run that saved them had bf16 {run}"
        fix = "DeepSpeed looks for only one of these names; rename the files as they were saved"
        yield Finding(PathIn(name, files.tag), what, fix, Code.PRECISION, ERROR)


def _stray(root: Path, files: ShardFiles, name: str) -> Iterator[Finding]:
    """Yield findings on stray files: DeepSpeed opens and counts all that match a pattern."""
    for path in sorted((root / files.tag).glob("*mp_rank_*_model_states.pt")):
        kind = path.name.partition("mp_rank_")[0]
        if f"{files.tag}/{path.name}" not in files.model and (bool(kind) == files.is_zero3):
            what = "DeepSpeed mistakes this file for another model-parallel rank's, and refuses to resume"
            fix = "move it out of the tag folder"
            yield Finding(PathIn(name, f"{files.tag}/{path.name}"), what, fix, Code.FILE_NAME, ERROR)


def _scheduler(trainer: TrainerFiles, files: ShardFiles, saved: Saved, name: str) -> Iterator[Finding]:
    """Yield findings on the scheduler. The Trainer keeps it in scheduler.pt, DeepSpeed in the model states."""
    counters, where, inside = saved.counters, PathIn(name, SCHEDULER), PathIn(name, files.model[0])
    groups = [group.hyper for group in saved.groups]
    expected = counters.global_steps - counters.skipped_steps
    if trainer.scheduler is not None:
        yield from compare_scheduler(trainer.scheduler, where, groups, expected)
    if counters.scheduler is not None:
        yield from compare_scheduler(counters.scheduler, inside, groups, expected)
    elif "scheduler" in saved.ds_config:
        what = "the run had a DeepSpeed scheduler, but the model states hold none"
        yield Finding(inside, what, "a resume fails; copy them again", Code.SCHEDULER_MISSING, ERROR)
    elif trainer.scheduler is None and not any(SCHEDULER in names for names in (trainer.files, trainer.inside)):
        fix = "a resume with a Trainer scheduler will fail; copy the file back"
        yield Finding(where, "there is no scheduler state", fix, Code.SCHEDULER_MISSING, ERROR)


def _trainer_state(trainer: TrainerFiles, saved: Saved, name: str) -> Iterator[Finding]:
    if trainer.global_step not in (None, saved.counters.global_steps):
        what = f"global_step is {trainer.global_step}, but DeepSpeed's is {saved.counters.global_steps}"
        fix = "data order and step count would follow the former; copy the file of this save"
        yield Finding(PathIn(name, TRAINER_STATE), what, fix, Code.STEPS_DIFFER, ERROR)


def detects(root: Path) -> bool:
    """Return whether a folder has what DeepSpeed leaves in the root of a checkpoint."""
    return (root / LATEST).exists() or any(root.glob("global_step*"))


def survey(root: Path, name: str) -> Survey:
    """Index a Trainer checkpoint with DeepSpeed shards; no tensor byte is read except the 4 bytes of each ``step``.

    Raises SourceError or UnsupportedCheckpoint for any other folder; the survey reports damage.
    """
    problems = Problems()
    files = survey_shard_files(root, name, problems)
    return survey_shards(FileTrees(root), files, name, problems)


def survey_shards(trees: Trees, files: ShardFiles | None, name: str, problems: Problems) -> Survey:
    """Index shards, wherever they are; ``files`` is None if nothing is known of them."""
    root = trees.root
    trainer = read_trainer_files(trees, name, problems)
    if files is None:
        return Survey(None, problems)
    facts = file_facts(root, (*files.optim, *files.model))  # before reading, so that no later change goes unnoticed
    read = read_zero3 if files.is_zero3 else read_zero12
    saved = read(trees, files, name, problems)
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
        sub_groups=saved.sub_groups,
        settings=read_settings(saved.ds_config, files.is_bf16, saved.variant),
        variant=saved.variant,
        files={**trainer.files, **facts},
        findings=tuple(find_oddities(root, files, trainer, saved, name)),
        module=saved.module,
        unreadable=saved.unreadable,
        train=replace(saved.train, trees=trainer.trees),
    )
    return Survey(index, problems, saved.unreadable)
