"""From a partial checkpoint to a `CheckpointIndex`.

Its rank shards contain the object trees of the stock files, so everything except the places of the trained params'
states is read as from stock files. States left out by the save are listed as absent, with known shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex, Survey, TensorEntry, TrainState
from llmtailor.checkpoint.optimizer import ParamGroup, ZeroSettings
from llmtailor.checkpoint.placement import Absent, Sliced
from llmtailor.errors import PathIn, Problem, Problems, SourceError
from llmtailor.findings import Finding
from llmtailor.formats.format import attempt
from llmtailor.formats.partial.manifest import bundle_name, frozen_name
from llmtailor.formats.partial.read import Partial, looks_partial, open_partial
from llmtailor.formats.plain.optimizer import SavedOptimizer, read_optimizer
from llmtailor.formats.plain.read import number_params
from llmtailor.formats.scheduler import compare_scheduler
from llmtailor.formats.trainer import OPTIMIZER, SCHEDULER, read_trainer_files
from llmtailor.formats.zero.files import ShardFiles
from llmtailor.formats.zero.read import survey_shards
from llmtailor.model.parts import Param
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, State
from llmtailor.storage.local import FileFact

_ABSENT = Absent()
_KEPT = (FROZEN, BUFFER)
_FIX = "leave this checkpoint out; its save is damaged"


def detects(root: Path) -> bool:
    """Return whether a folder is a partial checkpoint, or the place of an unfinished one."""
    return looks_partial(root)


def survey(root: Path, name: str) -> Survey:
    """Index a partial checkpoint; no tensor byte is read except the 4 bytes of each ``step``."""
    problems = Problems()
    return Survey(attempt(lambda: _index(root, name), problems), problems)


def _index(root: Path, name: str) -> CheckpointIndex:
    """Return the index. Raises SourceError with every problem of every file."""
    partial = open_partial(root, name)
    manifest = partial.manifest
    index = _index_zero(partial) if manifest.stage else _index_plain(partial)
    stated = (index.stage, index.global_step, index.world_size, index.precision)
    if stated != (manifest.stage, manifest.step, manifest.world_size, manifest.precision):
        what = "the step, stage, world size or precision of its object trees differs from manifest.json"
        raise SourceError.at(name, what, _FIX)
    params = {param: Param(param, fact.shape, fact.role) for param, fact in manifest.params.items()}
    if (dict(index.params), dict(index.tied)) != (params, dict(manifest.tied)):
        raise SourceError.at(name, "the params of its object trees are not those that manifest.json lists", _FIX)
    return replace(
        index,
        format=f"partial-{index.format}",
        held=_place(index.held, partial),
        files={path.name: FileFact.of(path.stat()) for path in sorted(root.iterdir()) if path.is_file()},
        inside=frozenset(partial.tree_of),
        saved_as=partial.manifest.saved_as,
        module={},
    )


def _place(held: Mapping[State, TensorEntry], partial: Partial) -> dict[State, TensorEntry]:
    """Return the trained params' states with their actual places. Raises SourceError if the trees don't match them."""
    placed: dict[State, TensorEntry] = {}
    problems = []
    chosen = {param for names in partial.manifest.params_of.values() for param in names}
    for state, described in held.items():
        if state.kind in _KEPT:
            placed[state] = described
            continue
        fragment = partial.fragments.get(state)
        placed[state] = fragment or replace(described, place=_ABSENT)
        if fragment and (fragment.dtype, fragment.shape) != (described.dtype, described.shape):
            what = f"{state.kind} of {state.param} does not match its object tree"
            problems.append(Problem(partial.name, what, _FIX))
        elif described.numel and (fragment is not None) != (state.param in chosen):
            lacks = "lack" if state.param in chosen else "hold"
            what = f"its rank shards {lacks} {state.kind} of {state.param}, which contradicts manifest.json"
            problems.append(Problem(partial.name, what, _FIX))
    if not partial.fragments.keys() <= held.keys():
        problems.append(Problem(partial.name, "its rank shards hold states that its object trees don't mention", _FIX))
    if problems:
        raise SourceError(problems)
    return placed


def _index_zero(partial: Partial) -> CheckpointIndex:
    """Index a save of training under DeepSpeed; `formats.zero.read` has the layout of the stock files."""
    shards, manifest = partial.manifest.shards, partial.manifest
    optim, model = tuple(shards["optim"]), tuple(shards["model"])
    files = ShardFiles(manifest.tag, shards["is_bf16"], optim, model, manifest.stage == 3)
    return survey_shards(partial, files, partial.name, Problems()).sound_index()


def _index_plain(partial: Partial) -> CheckpointIndex:
    """Index a save of training without DeepSpeed; `formats.plain.read` has the layout of the stock files."""
    manifest, root, name = partial.manifest, partial.root, partial.name
    optimizer = read_optimizer(partial, PathIn(name, OPTIMIZER))
    problems = Problems()
    trainer = read_trainer_files(partial, name, problems)
    problems.raise_if_any()
    groups = tuple(group.names or () for group in optimizer.groups)
    params = {param: Param(param, fact.shape, fact.role) for param, fact in manifest.params.items()}
    _check_names(groups, params, name)
    steps = [optimizer.steps[number] for saved in optimizer.groups for number in saved.ids]
    compared: list[Finding] = []
    if trainer.scheduler is not None:
        hyper = [saved.hyper for saved in optimizer.groups]
        compared = compare_scheduler(trainer.scheduler, PathIn(name, SCHEDULER), hyper, None)
    return CheckpointIndex(
        root=root,
        name=name,
        format="trainer",
        stage=0,
        world_size=manifest.world_size,
        global_step=manifest.step,
        skipped_steps=0,
        tag="",
        precision=manifest.precision,
        optimizer="torch AdamW" if "betas" in optimizer.groups[0].hyper else "unknown",
        params=params,
        tied=manifest.tied,
        held=_hold(partial, optimizer, groups, params),
        groups=tuple(ParamGroup(names, saved.hyper) for names, saved in zip(groups, optimizer.groups, strict=True)),
        sub_groups=number_params(groups, steps),
        settings=ZeroSettings(),
        variant="plain",
        files=trainer.files,
        findings=(*trainer.findings, *optimizer.findings, *compared),
        train=TrainState(optimizer.step_is_tensor, tuple(params), trainer.trees),
    )


def _check_names(groups: tuple[tuple[str, ...], ...], params: Mapping[str, Param], name: str) -> None:
    trained = {param for group in groups for param in group}
    if trained != {param.name for param in params.values() if param.role == "trainable"}:
        raise SourceError.at(name, "its optimizer's params differ from its manifest's", _FIX)


def _hold(
    partial: Partial, optimizer: SavedOptimizer, groups: tuple[tuple[str, ...], ...], params: Mapping[str, Param]
) -> dict[State, TensorEntry]:
    held: dict[State, TensorEntry] = {}
    for names, saved in zip(groups, optimizer.groups, strict=True):
        for param, number in zip(names, saved.ids, strict=True):
            fact = partial.manifest.params[param]
            held[State(param, MASTER)] = TensorEntry(fact.dtype, fact.shape, _ABSENT)
            for kind, tensor in optimizer.kinds[number].items():
                held[State(param, kind)] = TensorEntry(tensor.dtype, tensor.shape, _ABSENT)
    world_size = partial.manifest.world_size
    bundle, frozen = partial.files[bundle_name(0, world_size)], partial.files.get(frozen_name(0, 1))
    for one in params.values():
        if one.role == "buffer":
            tensor_held = bundle.tensors[f"{BUFFER}/{one.name}"]
            for whole in tensor_held.place.cover(0, tensor_held.numel):  # rank 0's, for all ranks, as in the Trainer
                itemsize = ITEMSIZE[tensor_held.dtype]
                copies = Sliced((whole.extent,) * world_size, 0, tensor_held.numel, itemsize)
                held[State(one.name, BUFFER)] = TensorEntry(tensor_held.dtype, (world_size, *one.shape), copies)
        elif one.role == "frozen" and frozen is not None:
            held[State(one.name, FROZEN)] = frozen.tensors[one.name]
    return held
