"""From a checkpoint without DeepSpeed, of the Trainer or of accelerate, to a `CheckpointIndex`.

There are no separate master weights: the weights are what the optimizer updates, so the same bytes are held under
both kinds. An fp32 run (``bf16=True`` is one, by autocast) has fp32 in both; a bf16 model has bf16 weights and moments.
Adam counts its ``step`` per param here, so every param is its own sub-group, numbered through the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.index import ACCELERATE, TRAINER, CheckpointIndex, Form, TensorEntry, TrainState
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup
from llmtailor.checkpoint.placement import AllZero, Contiguous, Sliced
from llmtailor.checkpoint.step_names import step_of
from llmtailor.codes import Code
from llmtailor.containers.fields import read_tied
from llmtailor.containers.json import read_json, read_strict_json
from llmtailor.containers.safetensors import SINGLE, read_weights
from llmtailor.containers.trees import FileTrees
from llmtailor.errors import PathIn, Problem, Problems, SourceError, UnsupportedCheckpoint, attempt, damaged, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.finish import Draft, usual_dtype
from llmtailor.formats.plain.ask_transformers import ModelFacts, describe_model
from llmtailor.formats.plain.names import Fitted, derived_names, fit, has_names, listed_names
from llmtailor.formats.plain.optimizer import SavedOptimizer, read_optimizer
from llmtailor.formats.weights import read_adapter
from llmtailor.loaders.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    MANIFEST,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    TRAINER_STATE,
    is_pickled_weights,
    rank_of,
)
from llmtailor.loaders.loader import CLIENTS
from llmtailor.loaders.read import TrainerFiles, read_trainer_files
from llmtailor.loaders.scheduler import read_scheduler
from llmtailor.model.parts import Param
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, WEIGHT, State

OTHER_WEIGHTS = "pytorch_model.bin"
BUFFERS_KEY = "buffers"
"""In the metadata of a composite's safetensors: the names of buffers among the tensors, separated by commas."""
TIED_KEY = "tied"
"""In the same, also if there are none: JSON, tied names and the names that their values are stored under"""
_NOT_PLAIN = ("latest", "zero_to_fp32.py", "pytorch_model", "optimizer_0", "pytorch_model_fsdp.bin")
"""Files of a DeepSpeed or FSDP checkpoint"""
_PLAIN = (OPTIMIZER, SCHEDULER, *(CLIENTS[ACCELERATE].optimizer, CLIENTS[ACCELERATE].scheduler, "random_states_0.pkl"))


_AS_SAFETENSORS = (
    "save in safetensors form (the default of the Trainer and of accelerate); or load this checkpoint with what saved "
    "it, and save it again so"
)


def detects(root: Path) -> bool:
    """Return whether this is, or was, a checkpoint without DeepSpeed or FSDP; `survey` reports gaps."""
    if not root.is_dir() or any((root / name).exists() for name in _NOT_PLAIN) or any(root.glob("global_step*")):
        return False
    return any((root / name).exists() for name in _PLAIN)


def read(root: Path, name: str, client: str | None = None) -> Draft:
    """Read a checkpoint without DeepSpeed; no tensor byte is read except the 4 bytes of each ``step``.

    Raises UnsupportedCheckpoint for a PEFT run whose param groups don't list names.
    """
    problems, trees = Problems(), FileTrees(root)
    trainer = read_trainer_files(trees, name, problems, client)
    optimizer = attempt(lambda: read_optimizer(trees, PathIn(name, trainer.client.optimizer)), problems)
    if optimizer and ADAPTER_CONFIG in trainer.files and not has_names(optimizer):
        file = trainer.client.optimizer
        what = f"this is a PEFT run without DeepSpeed, and its {file} does not state which params it holds"
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
) -> Mapping[State, TensorEntry]:
    """Return the weights of the model, or of the trained adapter.

    Raises SourceError, or UnsupportedCheckpoint if the only ones are those of ``torch.save``.
    """
    is_adapter = ADAPTER_CONFIG in trainer.files
    has_weights = ADAPTER in trainer.files if is_adapter else trainer.weights or not trainer.has_all_weights
    if not has_weights and (pickled := next(filter(is_pickled_weights, sorted(trainer.files)), None)):
        what = "the only weights are in this file, which a resume reads, but llmtailor does not"
        raise UnsupportedCheckpoint.at(PathIn(name, pickled), what, _AS_SAFETENSORS)
    if not is_adapter:
        return trainer.weights
    trained = [param for group in optimizer.groups for param in group.names or ()] if optimizer else []
    return {State(param, WEIGHT): held for param, held in read_adapter(root, name, trained).items()}


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
    root: Path,
    name: str,
    optimizer: SavedOptimizer,
    trainer: TrainerFiles,
    stored: Mapping[State, TensorEntry],
) -> CheckpointIndex:
    """Return the index. Raises SourceError if optimizer, weights and model don't fit together."""
    where = PathIn(name, trainer.client.optimizer)
    findings: list[Finding] = []
    ties = listed_ties(root, name) if has_names(optimizer) and ADAPTER_CONFIG not in trainer.files else None
    model = _ask_model(root, name, optimizer, trainer, findings) if ties is None else None
    if has_names(optimizer):
        groups = listed_names(optimizer, where)
    else:
        assert model is not None
        groups = derived_names(optimizer, model, where)
    weights = {state.param: held for state, held in stored.items()}
    known = fit(groups, optimizer, weights, model, listed_buffers(root, name), where)
    of_weights = {param: weights[weight].dtype for param, weight in known.weight_of.items()}
    tied = known.tied if ties is None else {name: of for name, of in ties.items() if of in known.params}
    index = make_index(root, name, optimizer, groups, known.params, tied, of_weights)
    findings += find_stateless(index, where)
    if not has_names(optimizer):
        findings += frozen_by_guess(known.params, where)
    if renamed := [param for param in known.params if param not in weights]:
        what = f"the weight files have other names for {some(renamed)} than the model, so a resume does not find them"
        from_this = "from this one, transformers 5.23 keeps the initial values"
        fix = f"save with llmtailor.saving, or under DeepSpeed; {from_this}"
        if all(param in known.weight_of for param in renamed):
            fix = "resume from a copy with the model's own names: llmtailor convert makes it"
        findings.append(Finding(name, what, fix, Code.WEIGHTS_NAMES, ERROR))
    world_size = _world_size(trainer.files)
    return replace(
        index,
        world_size=world_size,
        global_step=index.global_step if trainer.global_step is None else trainer.global_step,
        precision=usual_dtype(weight.dtype for weight in stored.values()),
        held={**index.held, **dict(hold_weights(weights, known, world_size))},
        findings=tuple(findings),
    )


def frozen_by_guess(params: Mapping[str, Param], where: str) -> Iterator[Finding]:
    """Yield a finding on params without a state, if nothing but that says that they are frozen."""
    if frozen := [param.name for param in params.values() if param.role == "frozen"]:
        fix = "if they were trained, their states are lost: leave this checkpoint out"
        what = f"it has no state of {some(frozen)}: assumed to be frozen"
        yield Finding(where, what, fix, Code.STATE_MISSING)


def find_stateless(index: CheckpointIndex, where: str) -> Iterator[Finding]:
    """Yield a finding on params without a state, which an optimizer of torch gives a param with its first gradient."""
    lacking = dict.fromkeys(state.param for state, held in index.held.items() if held.is_all_zero)
    if lacking:
        fix = "nothing, if it has had no gradient yet, as in an unused head; if it was trained, its moments are lost"
        what = f"the optimizer has no state of {some(lacking)}: a resume starts from zero moments there"
        if len(lacking) == len(index.steps()):
            what, fix = "the optimizer has no states, as before its first step", "nothing, if it has made no step yet"
        yield Finding(where, what, fix, Code.STATE_MISSING)


def make_index(
    root: Path,
    name: str,
    optimizer: SavedOptimizer,
    groups: Sequence[tuple[str, ...]],
    params: Mapping[str, Param],
    tied: Mapping[str, str],
    dtypes: Mapping[str, str],
) -> CheckpointIndex:
    """Return what is known from ``optimizer.pt`` and the names of its params: as if of one rank, in fp32.

    ``dtypes`` are those of the weights, which the moments have that do not exist yet.
    """
    usual = max(dtypes.values(), key=[*dtypes.values()].count, default="F32")
    owned = [
        (at, param, number)
        for at, (names, saved) in enumerate(zip(groups, optimizer.groups, strict=True))
        for param, number in zip(names, saved.ids, strict=True)
    ]
    return CheckpointIndex(
        root=root,
        name=name,
        form=Form(TRAINER),
        world_size=1,
        global_step=int(max(optimizer.steps.values())),
        precision="F32",
        params=params,
        tied=tied,
        held={
            State(param, kind): TensorEntry(one.dtype, one.shape, Contiguous(one.extent, ITEMSIZE[one.dtype]))
            for _, param, number in owned
            for kind, one in optimizer.kinds[number].items()
        }
        | {
            State(param, kind): TensorEntry(dtypes.get(param, usual), params[param].shape, AllZero())
            for _, param, number in owned
            if not optimizer.kinds[number]
            for kind in optimizer.zeroed
        },
        groups=tuple(ParamGroup(names, saved.hyper) for names, saved in zip(groups, optimizer.groups, strict=True)),
        sub_groups=tuple(SubGroup(at, (param,), optimizer.steps[number]) for at, param, number in owned),
        files={},
        train=TrainState(optimizer.step_is_tensor),
    )


def _check_complete(trainer: TrainerFiles, weights: Mapping[State, TensorEntry] | None, name: str) -> None:
    """Raise SourceError for missing files without which a resume fails or silently drops the optimizer."""
    problems = []
    if trainer.client.needs_scheduler and trainer.client.scheduler not in trainer.files:
        what = "the file is missing; without it a resume silently loads neither the schedule nor the optimizer"
        fix = "copy it back, or leave this checkpoint out"
        problems.append(Problem(PathIn(name, SCHEDULER), what, fix, Code.FILE_MISSING))
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
    if ADAPTER_CONFIG in trainer.files:  # nothing is tied, and the base model is not here
        return None
    named = {param for group in optimizer.groups for param in group.names or ()}
    config = read_json(root / CONFIG, PathIn(name, CONFIG)) if CONFIG in trainer.files else {}
    # the config must say so: without it, the class's own default counts
    if named == {state.param for state in trainer.weights} and config.get("tie_word_embeddings") is False:
        return None
    try:
        return describe_model(root, name)
    except SourceError as error:
        fix = "nothing, if the model has neither; otherwise install a transformers that knows it"
        what = f"tied names and buffers are not known ({error.problems[0].what})"
        findings.append(Finding(name, what, fix, Code.MODEL_UNKNOWN))
        return None


def hold_weights(
    weights: Mapping[str, TensorEntry], known: Fitted, world_size: int
) -> Iterator[tuple[State, TensorEntry]]:
    """Yield the states that the weights are: masters, frozen params and buffers."""
    for name, weight_name in known.weight_of.items():
        weight, role = weights[weight_name], known.params[name].role
        if role != "buffer":
            yield State(name, MASTER if role == "trainable" else FROZEN), weight
            continue
        for whole in weight.place.cover(0, weight.numel):  # one file for all ranks: every rank resumes with these
            copies = Sliced((whole.extent,) * world_size, 0, weight.numel, ITEMSIZE[weight.dtype])
            yield State(name, BUFFER), TensorEntry(weight.dtype, (world_size, *weight.shape), copies)


def check_steps(index: CheckpointIndex, trainer: TrainerFiles) -> Iterator[Finding]:
    """Yield findings on steps. Optimizer and schedule are saved and restored together; only a composite may mix steps.

    A param without gradients makes no step, so its states may lag behind, but only with its whole module. One without a
    state has made none. Raises SourceError if no state is of the schedule's step.
    """
    client, name = trainer.client, index.name
    counted = trainer.scheduler.num_steps if trainer.scheduler is not None else None
    lacking = {state.param for state, held in index.held.items() if held.is_all_zero}
    of_step: dict[float, list[str]] = {}
    for param, step in index.steps().items():
        if param not in lacking:
            of_step.setdefault(step, []).append(param)
    if not client.counts_steps and (of_step or trainer.global_step is not None):
        counted = index.global_step
    elif not client.counts_steps:  # before the first step, no schedule has counted any
        counted = read_scheduler(trainer.trees.get(client.scheduler)).num_steps
    if counted is None or MANIFEST in trainer.files:
        return
    usual = {counted - lag for lag in trainer.step_lags}
    where = PathIn(name, client.optimizer)
    fix = f"copy {client.optimizer} and {client.scheduler} again; they come from different saves"
    if not of_step:
        if counted > 0:
            what = f"the optimizer has no states, but the schedule is at step {counted}"
            raise SourceError.at(where, what, fix, Code.STEPS_DIFFER)
    elif not usual.intersection(of_step):
        what = f"the optimizer's states are from step {max(of_step):g}, but the schedule is at step {counted}"
        raise SourceError.at(where, what, fix, Code.STEPS_DIFFER)
    for step, params in of_step.items():
        if step in usual:
            continue
        if step > counted or step == 0 or len(params) == 1:
            what = f"Adam's step of {some(params)} is {step:g}, but the schedule is at step {counted}"
            severity = WARNING if step < counted else ERROR
            why = "nothing, if it had no gradients in these steps" if severity == WARNING else f"silent: {fix}"
            yield Finding(where, what, why, Code.STEPS_DIFFER, severity)
    if trainer.global_step not in (None, counted):
        what = f"global_step is {trainer.global_step}, but optimizer and schedule are at step {counted}"
        is_sure = counted > (trainer.global_step or 0) or step_of(index.root) == counted
        fix = "nothing, if steps were skipped (fp16) or the run was once resumed without its optimizer"
        if is_sure:
            fix = "silent: data order and step count follow the former; copy the file of this save"
        yield Finding(PathIn(name, TRAINER_STATE), what, fix, Code.STEPS_DIFFER, ERROR if is_sure else WARNING)


def _world_size(files: Iterable[str]) -> int:
    return max((rank + 1 for path in files if (rank := rank_of(path)) is not None), default=1)


def listed_ties(root: Path, name: str) -> dict[str, str] | None:
    """Return the tied names that a composite's weight files list; None if a file was not written by llmtailor."""
    found: dict[str, str] = {}
    for file in read_weights(root, name):
        if (text := file.metadata.get(TIED_KEY)) is None:
            return None
        where = PathIn(name, file.path)
        try:
            found |= read_tied(read_strict_json(text.encode()), where)
        except (ValueError, RecursionError) as error:
            raise damaged(where, f"its metadata {TIED_KEY} is not JSON ({error})") from error
    return found


def listed_buffers(root: Path, name: str) -> set[str]:
    """Return the buffers that a composite's weight files list; others don't tell them from params."""
    listed = (file.metadata.get(BUFFERS_KEY, "") for file in read_weights(root, name))
    return {buffer for names in listed for buffer in names.split(",") if buffer}
