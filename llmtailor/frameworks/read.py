"""The files in a checkpoint's root beside the states: weights, scheduler, random states, trainer state, config."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import ACCELERATE, CheckpointIndex, TensorEntry
from llmtailor.checkpoint.step_names import step_of
from llmtailor.codes import Code
from llmtailor.containers.json import Trees, read_json
from llmtailor.containers.safetensors import survey_weights
from llmtailor.errors import PathIn, Problems, TailorError, UnsupportedCheckpoint, attempt, damaged, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.frameworks.files import (
    ADAPTER_CONFIG,
    CONFIG,
    MANIFEST,
    SCALER,
    TRAINER_STATE,
    TRAINING_ARGS,
    adapters_among,
    is_pickled_weights,
    is_rng_file,
    is_second_models,
    may_have_adapters,
)
from llmtailor.frameworks.framework import FRAMEWORKS, Framework, detect_loader
from llmtailor.frameworks.rng import check_rng, find_swapped
from llmtailor.frameworks.scheduler import SchedulerFacts, check_scheduler, read_scheduler
from llmtailor.frameworks.trainer_state import (
    check_scaler,
    check_trainer_state,
    is_of_trainer,
    read_global_step,
    read_lags,
    read_scales_loss,
)
from llmtailor.model.roles import WEIGHT, State
from llmtailor.storage.local import FileFact, check_regular

_OPENED = (TRAINER_STATE, SCALER, CONFIG, *(one.scheduler for one in FRAMEWORKS.values()))


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """The content of the files in the checkpoint's root."""

    client: Framework
    """The loader that resumes from the checkpoint"""
    files: Mapping[str, FileFact]
    """Every regular file in the root"""
    inside: frozenset[str] = frozenset()
    """Stock files that a partial checkpoint contains in its rank shards"""
    trees: Mapping[str, Any] = field(default_factory=dict)
    """See `TrainState.trees`"""
    weights: Mapping[State, TensorEntry] = field(default_factory=dict)
    global_step: int | None = None
    """From trainer_state.json; None without the file"""
    step_lags: frozenset[int] = frozenset((0,))
    """How many steps Adam may be behind the run; see `trainer_state.read_lags`"""
    scheduler: SchedulerFacts | None = None
    """The content of the loader's scheduler file; None without it"""
    scales_loss: bool | None = None
    """Whether the run trains in fp16, by training_args.bin; None if unknown"""
    findings: tuple[Finding, ...] = ()
    has_all_weights: bool = True
    """Whether every weight file is intact"""

    @property
    def has_adapters(self) -> bool:
        """Whether PEFT has saved adapters instead of the model"""
        return bool(adapters_among(self.files))


def read_trainer_files(
    trees: Trees, name: str, problems: Problems, client: str | None = None, *, is_engines: bool = False
) -> TrainerFiles:
    """Read the files in the root. Damaged ones are added to ``problems``, missing ones become findings.

    ``client`` names the loader to judge them by; None uses the detected one, see `loader.detect_loader`. Raises
    UnsupportedCheckpoint if accelerate saved several models.
    """
    root, inside = trees.root, trees.inside
    there = sorted(root.iterdir())
    files = files_among(there)
    for entry in there:  # folders, pipes and the like under names that a resume opens, and may block on
        if (entry.name in _OPENED or is_rng_file(entry.name)) and entry.exists():
            attempt(lambda: check_regular(entry.stat().st_mode, PathIn(name, entry.name)), problems)  # noqa: B023
    findings: list[Finding] = []
    weights: dict[State, TensorEntry] = {}
    sound = len(problems.errors)
    for file in survey_weights(root, name, problems):
        weights.update({State(tensor, WEIGHT): held for tensor, held in file.tensors.items()})
    has_all_weights = len(problems.errors) == sound
    scales_loss = read_scales_loss(root, PathIn(name, TRAINING_ARGS))
    where = PathIn(name, TRAINER_STATE)
    content = attempt(lambda: read_json(root / TRAINER_STATE, where), problems) if TRAINER_STATE in files else {}
    is_the_trainers = content is None or is_of_trainer(content)
    entries = [f"{path.name}/" if path.is_dir() else path.name for path in there]
    below = [f"{path.partition('/')[0]}/" if "/" in path else path for path in inside]
    is_stated = is_the_trainers if TRAINER_STATE in files else None
    loader = FRAMEWORKS[client] if client else detect_loader([*entries, *below], is_stated, is_engines)
    if loader.name == ACCELERATE and (others := sorted(filter(is_second_models, entries))):
        what = f"accelerate has saved several models or optimizers: {some(others)}"
        fix = "leave it out; checkpoints of one model and one optimizer can be composed"
        raise UnsupportedCheckpoint.at(name, what, fix)
    if not weights and has_all_weights and not inside and not adapters_among(files) and loader.saves_model:
        what = "there are no weights in safetensors form (ZeRO-3: stage3_gather_16bit_weights_on_model_save is off)"
        if any(map(is_pickled_weights, files)):
            what = "the weights are in pytorch_model.bin form, which is left out"
        fix = "no action needed: resuming does not read them, and llmtailor rebuilds them from the master weights"
        findings.append(Finding(name, what, fix, Code.WEIGHTS_MISSING))
    global_step, scheduler = None, None
    if TRAINER_STATE in files and content is not None:
        global_step = attempt(lambda: read_global_step(content, where), problems)
        if global_step is not None:
            findings += check_trainer_state(content, where)
    saved_as: dict[str, str] = {}
    known: dict[str, Any] = {}
    whole, optimizer = (loader.optimizer, "") if loader.holds_all else ("", loader.optimizer)
    in_root = [path for path in inside if "/" not in path and path != optimizer]
    for path in (*files, *in_root):
        where, is_rng = PathIn(name, path), is_rng_file(path)
        try:
            if path == CONFIG:
                read_json(root / path, where)
            elif path in inside or is_rng or path in (loader.scheduler, SCALER, whole):
                decoded = trees.read(path, where)
                known[path] = decoded.tree
                if is_rng and decoded.archive is not None:
                    saved_as[path] = f"{decoded.archive}{Path(path).suffix}"
                if is_rng and (is_the_trainers or path.endswith(".pkl")):
                    findings += check_rng(root, decoded.tree, where, is_accelerates=path.endswith(".pkl"))
                elif path == loader.scheduler:
                    findings += check_scheduler(decoded.tree, where)
                    facts = read_scheduler(decoded.tree)
                    if not facts.lengths:
                        raise damaged(where, "the scheduler state holds no learning rates", Code.FIELD_MISSING)
                    scheduler = facts if loader.counts_steps else replace(facts, num_steps=None)
                elif path == SCALER:
                    findings += check_scaler(decoded.tree, scales_loss, where)
        except TailorError as error:
            problems.add(error)
    if loader.state and loader.state not in files:
        fix = f"copy it back; {loader.title} can't resume without it"
        findings.append(Finding(PathIn(name, loader.state), "the file is missing", fix, Code.FILE_MISSING, ERROR))
    findings += find_swapped(saved_as, name, may_repeat=MANIFEST in files)
    return TrainerFiles(
        client=loader,
        files=files,
        inside=frozenset(inside),
        trees=known,
        weights=weights,
        global_step=global_step,
        step_lags=read_lags(content or {}),
        scheduler=scheduler,
        scales_loss=scales_loss,
        findings=tuple(findings),
        has_all_weights=has_all_weights,
    )


def files_among(there: Sequence[Path]) -> dict[str, FileFact]:
    """Return the files among the entries of a checkpoint's root, and, unless they are of a whole model, those in the
    folders of adapters."""
    files = {path.name: fact for path in there if (fact := file_fact(path)) is not None}
    folders = (
        path for path in there if may_have_adapters(files) and path.is_dir() and (path / ADAPTER_CONFIG).is_file()
    )
    inner = {f"{path.parent.name}/{path.name}": path for folder in folders for path in sorted(folder.iterdir())}
    return files | {name: fact for name, path in inner.items() if (fact := file_fact(path)) is not None}


def adapters_of(index: CheckpointIndex) -> dict[str, str]:
    """Return the adapters in a checkpoint; see `files.adapters_among`."""
    return adapters_among(index.files)


def file_fact(path: Path) -> FileFact | None:
    """Return size and time of a regular file, following links; None for anything else."""
    try:
        status = path.stat()
    except FileNotFoundError:  # a dangling link
        return None
    return FileFact.of(status) if stat.S_ISREG(status.st_mode) else None


def compare_global_step(trainer: TrainerFiles, root: Path, name: str, step: float) -> Iterator[Finding]:
    """Yield a finding if trainer_state.json is of another step than the optimizer, which may be intended."""
    stated = trainer.global_step
    if stated is None or stated == step:
        return
    what = f"global_step is {stated}, but the optimizer's states are from step {int(step)}"
    if step > stated or step_of(root) == step:
        fix = "silent: data order and step count follow the former; copy the file of this save"
        yield Finding(PathIn(name, TRAINER_STATE), what, fix, Code.STEPS_DIFFER, ERROR)
    else:
        fix = "no action needed if steps were skipped (fp16), or the run was once resumed without its optimizer"
        yield Finding(PathIn(name, TRAINER_STATE), what, fix, Code.STEPS_DIFFER, WARNING)


def read_config(index: CheckpointIndex) -> dict[str, Any]:
    """Return the content of ``config.json``; empty without the file. Raises SourceError for a damaged one."""
    path = FRAMEWORKS[index.client].settings + CONFIG
    return read_json(index.root / path, PathIn(index.name, path)) if path in index.files else {}
