"""Checkpoints without DeepSpeed, of the Trainer or of accelerate. `torch_states` does what Lightning shares.

There are no separate master weights. An fp32 run (``bf16=True`` is one, by autocast) has fp32 weights and moments; a
bf16 model has both in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.index import ACCELERATE, CheckpointIndex, TensorEntry
from llmtailor.codes import Code
from llmtailor.containers.json import FileTrees, read_json
from llmtailor.containers.safetensors import SINGLE
from llmtailor.errors import COPY_BACK, PathIn, Problem, Problems, SourceError, UnsupportedCheckpoint, attempt, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.format import Draft
from llmtailor.formats.param_names import ModelFacts, describe_model, has_names
from llmtailor.formats.safetensors_weights import read_adapters
from llmtailor.formats.torch_optimizer import SavedOptimizer, read_optimizer
from llmtailor.formats.torch_states import (
    check_steps,
    index_with_weights,
    listed_buffers,
    listed_ties,
)
from llmtailor.frameworks.files import (
    ADAPTER,
    CONFIG,
    ENGINE_FILES,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    SEVERAL,
    Holds,
    adapters_among,
    holds,
    is_pickled_weights,
    is_sign_of,
    owner_of,
)
from llmtailor.frameworks.read import TrainerFiles, read_trainer_files

OTHER_WEIGHTS = "pytorch_model.bin"
_OF_OTHERS = (*ENGINE_FILES, "pytorch_model", "optimizer_0", "pytorch_model_fsdp.bin")
"""Files and folders of a DeepSpeed or FSDP checkpoint"""
_AS_SAFETENSORS = (
    "save in safetensors form (the default of the Trainer and of accelerate); or load this checkpoint with the program "
    "that saved it, and save it again in this form"
)


def detects(root: Path) -> bool:
    """Return whether this is, or was, a checkpoint without DeepSpeed or FSDP; `read` reports what is missing."""
    names = {path.name for path in root.iterdir()} if root.is_dir() else set()
    if names.intersection(_OF_OTHERS) or any(name.startswith("global_step") for name in names):
        return False
    return any(
        name in (OPTIMIZER, SCHEDULER) or (is_sign_of(ACCELERATE, name) and not holds(name, Holds.OBJECTS))
        for name in names
    )


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a checkpoint without DeepSpeed; see `Reader`."""
    problems, trees = Problems(), FileTrees(root)
    trainer = read_trainer_files(trees, name, problems, framework)
    optimizer = attempt(lambda: read_optimizer(trees, PathIn(name, trainer.framework.optimizer)), problems)
    if optimizer and trainer.has_adapters and not has_names(optimizer):
        what = f"a PEFT run without DeepSpeed, whose {trainer.framework.optimizer} does not say which params it holds"
        fix = "leave it out; the partial checkpoints of such a run can be composed, and full ones with DeepSpeed"
        raise UnsupportedCheckpoint.at(name, what, fix)
    weights = attempt(lambda: _weights(root, name, optimizer, trainer), problems)
    attempt(lambda: _check_complete(trainer, weights, name), problems)
    findings = [*_folder(root, trainer, name), *(optimizer.findings if optimizer else ())]
    index = None
    if optimizer is not None and weights and trainer.has_all_weights:
        index = attempt(lambda: _index(root, name, optimizer, trainer, weights), problems)
    if index is None:
        found = (*trainer.findings, *findings)
        if wrong := [finding.problem for finding in found if finding.severity == ERROR]:
            problems.add(SourceError(wrong))
        return Draft(problems)
    index = replace(index, findings=(*findings, *index.findings))
    return Draft(problems, index, trainer, lambda index: check_steps(index, trainer))


def _weights(
    root: Path, name: str, optimizer: SavedOptimizer | None, trainer: TrainerFiles
) -> Mapping[str, TensorEntry]:
    """Return the weights of the model, or of the trained adapter.

    Raises SourceError, or UnsupportedCheckpoint if the only ones are those of ``torch.save``.
    """
    is_adapter = trainer.has_adapters
    has_weights = trainer.weights or not trainer.has_all_weights
    if is_adapter:
        has_weights = all(f"{folder}{ADAPTER}" in trainer.files for folder in adapters_among(trainer.files).values())
    if not has_weights and (pickled := next(filter(is_pickled_weights, sorted(trainer.files)), None)):
        what = "the only weights are in this file, which a resume reads, but llmtailor does not"
        raise UnsupportedCheckpoint.at(PathIn(name, pickled), what, _AS_SAFETENSORS)
    if not has_weights and trainer.framework.name == ACCELERATE and (others := _other_weights(root)):
        what = f"its weights are not accelerate's own, but may be in {some(others)}, as a save hook writes them"
        fix = "leave it out: only the program that registers the hooks can read them; without hooks it can be composed"
        raise UnsupportedCheckpoint.at(name, what, fix, Code.WEIGHTS_MISSING)
    if not is_adapter:
        return {state.param: held for state, held in trainer.weights.items()}
    trained = [param for group in optimizer.groups for param in group.names or ()] if optimizer else []
    return read_adapters(root, name, trainer.files, trained)


_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def _other_weights(root: Path) -> list[str]:
    """Return the files in the root, and the folders there, that may hold a model but are not accelerate's."""
    found = []
    for path in sorted(root.iterdir()):
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        others = (one for one in inside if owner_of(one.name) not in (ACCELERATE, SEVERAL))
        if any(holds(one.name, Holds.WEIGHTS) or one.suffix in _PICKLED for one in others):
            found.append(f"{path.name}/" if path.is_dir() else path.name)
    return found


def _folder(root: Path, trainer: TrainerFiles, name: str) -> Iterator[Finding]:
    """Yield findings on files that a resume loads instead of the weights in the index."""
    if OTHER_WEIGHTS in trainer.files and SINGLE not in trainer.files and trainer.weights:
        fix = "silent: a resume loads it instead of the safetensors beside it; move the wrong ones out of the folder"
        yield Finding(PathIn(name, OTHER_WEIGHTS), "there are two sets of weights", fix, Code.FIELD_CONFLICT, ERROR)
    for path in sorted(root.iterdir()):
        if "pytorch_model_fsdp" in path.name and path.is_dir():
            fix = "a resume without FSDP fails if it finds such a folder; move it away"
            what = "the folder belongs to an FSDP checkpoint"
            yield Finding(PathIn(name, path.name), what, fix, Code.FILE_NAME, ERROR)
    if trainer.scales_loss and SCALER not in trainer.files:
        fix = "a resume starts with the scale of a new run, and skips some steps; copy it back"
        yield Finding(PathIn(name, SCALER), "the loss scale of an fp16 run is missing", fix, Code.FILE_MISSING, WARNING)


def _index(
    root: Path, name: str, optimizer: SavedOptimizer, trainer: TrainerFiles, weights: Mapping[str, TensorEntry]
) -> CheckpointIndex:
    where = PathIn(name, trainer.framework.optimizer)
    findings: list[Finding] = []
    ties = listed_ties(root, name) if has_names(optimizer) and not trainer.has_adapters else None
    model = _ask_model(root, name, optimizer, trainer, findings) if ties is None else None
    buffers = listed_buffers(root, name)
    index, known = index_with_weights(root, where, optimizer, weights, model, trainer, buffers=buffers, ties=ties)
    findings += index.findings
    by_alias = {stored for alias, stored in known.tied.items() if alias in weights}  # which a resume finds
    if renamed := [param for param in known.params if param not in weights and param not in by_alias]:
        what = f"the weight files have other names for {some(renamed)} than the model, so a resume does not find them"
        keeps = f"{_transformers()} would keep the initial values"
        fix = f"save with llmtailor.saving, or under DeepSpeed; {keeps}"
        if all(param in known.weights for param in renamed):
            fix = f"resume from a copy with the model's own names, which llmtailor convert makes; {keeps}"
        findings.append(Finding(name, what, fix, Code.WEIGHTS_NAMES, ERROR))
    return replace(index, findings=tuple(findings))


def _transformers() -> str:
    """Return the name and the version of the transformers that would resume here."""
    from importlib.metadata import PackageNotFoundError, version  # imports more than the rest of a merge

    try:
        return f"transformers {version('transformers')}"
    except PackageNotFoundError:
        return "transformers"


def _check_complete(trainer: TrainerFiles, weights: Mapping[str, TensorEntry] | None, name: str) -> None:
    """Raise SourceError for missing files without which a resume fails or silently drops the optimizer."""
    problems = []
    if trainer.framework.needs_scheduler and trainer.framework.scheduler not in trainer.files:
        what = "the file is missing; without it a resume silently loads neither the schedule nor the optimizer"
        problems.append(Problem(PathIn(name, SCHEDULER), what, COPY_BACK, Code.FILE_MISSING))
    if weights is not None and not weights:
        fix = "save in safetensors form; without DeepSpeed the weights are what the optimizer updates"
        problems.append(Problem(name, "there are no weights in safetensors form", fix, Code.WEIGHTS_MISSING))
    if problems:
        raise SourceError(problems)


def _ask_model(
    root: Path, name: str, optimizer: SavedOptimizer, trainer: TrainerFiles, findings: list[Finding]
) -> ModelFacts | None:
    """Return the model's facts if needed. If the names are known without them, a failure is only a finding."""
    if not has_names(optimizer):
        return describe_model(root, name)
    if trainer.has_adapters:  # nothing is tied, and the base model is not here
        return None
    named = {param for group in optimizer.groups for param in group.names or ()}
    config = read_json(root / CONFIG, PathIn(name, CONFIG)) if CONFIG in trainer.files else {}
    # the config must say so: without it, the class's own default counts
    if named == {state.param for state in trainer.weights} and config.get("tie_word_embeddings") is False:
        return None
    try:
        return describe_model(root, name)
    except SourceError as error:
        fix = "no action needed if the model has neither; otherwise install a transformers that knows it"
        what = f"tied names and buffers are not known ({error.problems[0].what})"
        findings.append(Finding(name, what, fix, Code.MODEL_UNKNOWN))
        return None
