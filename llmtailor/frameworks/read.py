"""The files in a checkpoint's root beside the states: weights, scheduler, random states, trainer state, config."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from llmtailor.frameworks.framework import FRAMEWORKS, Framework, detect_framework
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

    framework: Framework
    """The framework that resumes from the checkpoint"""
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
    """The content of the framework's scheduler file; None without it"""
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
    trees: Trees, name: str, problems: Problems, framework: str | None = None, *, is_engines: bool = False
) -> TrainerFiles:
    """Read the files in the root. Damaged ones are added to ``problems``, missing ones become findings.

    ``framework`` is the one to judge them by; None uses the detected one, see `framework.detect_framework`. Raises
    UnsupportedCheckpoint if accelerate saved several models.
    """
    there = sorted(trees.root.iterdir())
    files = files_among(there)
    _check_openable(there, name, problems)
    sound = len(problems.errors)
    held = [file.tensors for file in survey_weights(trees.root, name, problems)]
    weights = {State(tensor, WEIGHT): entry for tensors in held for tensor, entry in tensors.items()}
    has_all_weights = len(problems.errors) == sound
    scales_loss = read_scales_loss(trees.root, PathIn(name, TRAINING_ARGS))
    where = PathIn(name, TRAINER_STATE)
    content = attempt(lambda: read_json(trees.root / TRAINER_STATE, where), problems) if TRAINER_STATE in files else {}
    is_trainers = content is None or is_of_trainer(content)
    entries = [f"{path.name}/" if path.is_dir() else path.name for path in there]
    below = [f"{path.partition('/')[0]}/" if "/" in path else path for path in trees.inside]
    is_stated = is_trainers if TRAINER_STATE in files else None
    own = FRAMEWORKS[framework] if framework else detect_framework([*entries, *below], is_stated, is_engines)
    _refuse_several(own, entries, name)
    findings = []
    if not weights and has_all_weights and not (trees.inside or adapters_among(files)) and own.saves_model:
        findings.append(_without_weights(files, name))
    global_step = None
    if TRAINER_STATE in files and content is not None:
        global_step = attempt(lambda: read_global_step(content, where), problems)
        findings += check_trainer_state(content, where) if global_step is not None else ()
    read = _RootFiles(trees, name, own, is_trainers, scales_loss, findings)
    optimizer = "" if own.holds_all else own.optimizer
    for path in (*files, *(path for path in trees.inside if "/" not in path and path != optimizer)):
        attempt(lambda: read.read(path), problems, TailorError)  # noqa: B023
    if own.state and own.state not in files:
        fix = f"copy it back; {own.title} can't resume without it"
        findings.append(Finding(PathIn(name, own.state), "the file is missing", fix, Code.FILE_MISSING, ERROR))
    findings += find_swapped(read.saved_as, name, may_repeat=MANIFEST in files)
    return TrainerFiles(
        framework=own,
        files=files,
        inside=frozenset(trees.inside),
        trees=read.trees_by_path,
        weights=weights,
        global_step=global_step,
        step_lags=read_lags(content or {}),
        scheduler=read.scheduler,
        scales_loss=scales_loss,
        findings=tuple(findings),
        has_all_weights=has_all_weights,
    )


def _check_openable(there: Iterable[Path], name: str, problems: Problems) -> None:
    """Report folders, pipes and the like under names that a resume opens, and may block on."""
    for entry in there:
        if (entry.name in _OPENED or is_rng_file(entry.name)) and entry.exists():
            attempt(lambda: check_regular(entry.stat().st_mode, PathIn(name, entry.name)), problems)  # noqa: B023


def _refuse_several(framework: Framework, entries: Iterable[str], name: str) -> None:
    if framework.name == ACCELERATE and (others := sorted(filter(is_second_models, entries))):
        what = f"accelerate has saved several models or optimizers: {some(others)}"
        fix = "leave it out; checkpoints of one model and one optimizer can be composed"
        raise UnsupportedCheckpoint.at(name, what, fix)


def _without_weights(files: Iterable[str], name: str) -> Finding:
    what = "there are no weights in safetensors form (ZeRO-3: stage3_gather_16bit_weights_on_model_save is off)"
    if any(map(is_pickled_weights, files)):
        what = "the weights are in pytorch_model.bin form, which is left out"
    fix = "no action needed: resuming does not read them, and llmtailor rebuilds them from the master weights"
    return Finding(name, what, fix, Code.WEIGHTS_MISSING)


@dataclass(slots=True)
class _RootFiles:
    """Reads one file after another."""

    trees: Trees
    name: str
    framework: Framework
    is_trainers: bool
    scales_loss: bool | None
    findings: list[Finding]
    trees_by_path: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerFacts | None = None
    saved_as: dict[str, str] = field(default_factory=dict)
    """File of random states -> the name that it was saved under"""

    def read(self, path: str) -> None:
        """Read one file, if it is one that a resume opens. Raises TailorError for a damaged one."""
        where, own = PathIn(self.name, path), self.framework
        if path == CONFIG:
            read_json(self.trees.root / path, where)
        elif is_rng_file(path):
            self._read_rng(path, where)
        elif path == own.scheduler:
            self._read_scheduler(self._tree(path, where), where)
        elif path == SCALER:
            self.findings += check_scaler(self._tree(path, where), self.scales_loss, where)
        elif path in self.trees.inside or (own.holds_all and path == own.optimizer):
            self._tree(path, where)

    def _tree(self, path: str, where: PathIn) -> Any:
        self.trees_by_path[path] = self.trees.read(path, where).tree
        return self.trees_by_path[path]

    def _read_rng(self, path: str, where: PathIn) -> None:
        decoded, is_accelerates = self.trees.read(path, where), path.endswith(".pkl")
        self.trees_by_path[path] = decoded.tree
        if decoded.archive is not None:
            self.saved_as[path] = f"{decoded.archive}{Path(path).suffix}"
        if self.is_trainers or is_accelerates:
            self.findings += check_rng(self.trees.root, decoded.tree, where, is_accelerates=is_accelerates)

    def _read_scheduler(self, tree: Any, where: PathIn) -> None:
        self.findings += check_scheduler(tree, where)
        facts = read_scheduler(tree)
        if not facts.lengths:
            raise damaged(where, "the scheduler state holds no learning rates", Code.FIELD_MISSING)
        self.scheduler = facts if self.framework.counts_steps else replace(facts, num_steps=None)


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
    path = FRAMEWORKS[index.framework].settings + CONFIG
    return read_json(index.root / path, PathIn(index.name, path)) if path in index.files else {}
