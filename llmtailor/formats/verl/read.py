"""Checkpoints of verl's FSDP2 runs: files of each rank, see `dcp.rank_files`.

Seen with torch 2.13; the files were made by the calls of verl's FSDPCheckpointManager::

    model_world_size_W_rank_R.pt          {param: DTensor}, buffers are whole
    optim_world_size_W_rank_R.pt          {state: {id: {step, exp_avg, ..}}, param_groups: [{.., params: [ids]}]}
    extra_state_world_size_W_rank_R.pt    {lr_scheduler, rng}
    fsdp_config.json, huggingface/        FSDP_version and world_size; config.json and the tokenizer

The ids count the params of the model in its order, without buffers and second names of tied params: these share their
storage with the first. Shapes must confirm that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import RANKS, VERL
from llmtailor.checkpoint.optimizer import NAME_KEYS
from llmtailor.checkpoint.placement import Extent
from llmtailor.codes import Code
from llmtailor.containers.dcp import KeyPath
from llmtailor.containers.dtensor import as_piece
from llmtailor.containers.json import Tensor, as_dict, check_name, get, is_count, read_json
from llmtailor.containers.unpickle import as_ints, as_tensor
from llmtailor.errors import (
    COPY_CHECKPOINT,
    PathIn,
    Problems,
    SourceError,
    UnsupportedCheckpoint,
    attempt,
    counted,
    some,
)
from llmtailor.findings import WARNING, Finding
from llmtailor.formats.composite import read_composite
from llmtailor.formats.dcp.index import Folders, draft_of
from llmtailor.formats.dcp.keys import GROUPS, STATE
from llmtailor.formats.dcp.rank_files import OLD_FSDP, USE_FSDP2, RankFileReader, refuse_flat, walk_optimizer
from llmtailor.formats.format import Draft
from llmtailor.formats.param_names import ModelFacts, compare_shapes, derived_names, has_names, listed_names
from llmtailor.formats.torch_optimizer import SavedGroup, SavedOptimizer
from llmtailor.frameworks.files import VERL_CONFIG, VERL_RANK
from llmtailor.frameworks.write import LR_SCHEDULER

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
"""What verl's files hold, in their names"""


def verl_file(kind: str, ranks: int, rank: int) -> str:
    return f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def _has_rank_files(root: Path) -> bool:
    """Return whether a folder has files of verl's ranks."""
    return any(VERL_RANK.fullmatch(path.name) for path in root.iterdir())


def _models_in(root: Path) -> list[str]:
    """Return the folders with files of verl's ranks in the folder of a step: of the actor, the critic."""
    return [name for name in ("actor", "critic") if (root / name).is_dir() and _has_rank_files(root / name)]


def detects(root: Path) -> bool:
    """Return whether a folder has files of verl's ranks, or the folders of its models."""
    return root.is_dir() and (_has_rank_files(root) or bool(_models_in(root)))


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a checkpoint; see `Reader`. Raises UnsupportedCheckpoint for the folder of several models."""
    if models := _models_in(root):
        what = f"it is a step of verl with the checkpoints of {some(models)}"
        raise UnsupportedCheckpoint.at(name, what, f"name one of them: {name}/{models[0]}")
    problems = Problems()
    manifest = attempt(lambda: read_composite(root, name), problems)
    return draft_of(root, name, _read_files(root, name, problems), manifest, problems)


def _read_files(root: Path, name: str, problems: Problems) -> Folders | None:
    """Read the files of all ranks; None if they can't be used. Damage is added to ``problems``.

    Raises UnsupportedCheckpoint for those of FSDP1, and for param groups whose params are not known.
    """
    ranks = _verl_ranks(root, name)
    files = {kind: [verl_file(kind, ranks, rank) for rank in range(ranks)] for kind in (MODEL, OPTIMIZER, EXTRA)}
    reader = RankFileReader(root, name, problems)
    model = reader.read_model(files[MODEL])
    if not any((root / path).exists() for path in files[OPTIMIZER]):
        what = "it holds no optimizer states, only weights"
        fix = "use a full checkpoint: verl's checkpoint.save_contents must name model, optimizer and extra"
        problems.add(SourceError.at(name, what, fix, Code.NO_CHECKPOINT))
        return None
    if model is None:
        return None
    shapes = {str(stored.path[-1]): stored.held.shape for stored in model.tensors.values()}
    names = _Names({name: shape for name, shape in shapes.items() if name not in reader.others})
    optimizer = reader.read(files[OPTIMIZER], lambda tree, where: walk_optimizer(names.given(tree, where), where))
    if optimizer is None:
        return None
    there = [path for path in files[EXTRA] if (root / path).exists()]
    read = {path: attempt(lambda: reader.tree(path), problems) for path in there}  # noqa: B023
    extra = {path: tree for path, tree in read.items() if isinstance(tree, dict)}
    findings = []
    if lost := len(files[EXTRA]) - len(there):
        what = f"{counted(lost, 'rank')} of it {'have' if lost > 1 else 'has'} no {EXTRA} file: schedule, random states"
        fix = "verl can't load it, unless checkpoint.load_contents leaves extra out; copy the files back"
        findings.append(Finding(name, what, fix, Code.SCHEDULER_MISSING, WARNING))
    objects: dict[str, tuple[KeyPath, Any]] = {**optimizer.objects, **reader.roles}
    schedule = extra.get(files[EXTRA][0], {}).get("lr_scheduler")
    for key, value in (schedule if isinstance(schedule, dict) else {}).items():
        path: KeyPath = (LR_SCHEDULER, check_name(key, "the scheduler's state", PathIn(name, files[EXTRA][0])))
        objects[f"{LR_SCHEDULER}.{key}"] = (path, value)
    optimizer = replace(optimizer, objects=objects, findings=tuple(findings))
    return Folders(VERL, optimizer, model, RANKS, reader.mesh, names.groups, extra)


def _verl_ranks(root: Path, name: str) -> int:
    """Return the number of ranks. Raises UnsupportedCheckpoint for FSDP1, and SourceError if several numbers fit."""
    found = {int(match[2]) for path in root.iterdir() if (match := VERL_RANK.fullmatch(path.name))}
    stated = {}
    if (root / VERL_CONFIG).exists():
        stated = read_json(root / VERL_CONFIG, PathIn(name, VERL_CONFIG))
    if stated.get("FSDP_version") == 1:
        raise UnsupportedCheckpoint.at(name, OLD_FSDP, USE_FSDP2)
    ranks = stated.get("world_size")
    if is_count(ranks) and ranks in found:
        return int(ranks)
    if len(found) > 1:
        what = f"it has files of {some(sorted(map(str, found)))} ranks, and {VERL_CONFIG} does not say which count"
        raise SourceError.at(name, what, "move those of the other save away", Code.FILE_UNKNOWN)
    return found.pop()


class _Names:
    """The names behind the ids of verl's optimizers, in the files of all ranks."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes = shapes
        """Of the model's params, in its order"""
        self.groups: tuple[tuple[str, ...], ...] = ()
        """The params of each group, in its order"""
        self._ids: list[tuple[int, ...]] = []

    def given(self, tree: Any, where: str) -> dict[str, Any]:
        """Return an optimizer's state dict with names instead of ids, without the params that it has no states of.

        verl gives its optimizer all params of the model, frozen ones too.

        Raises SourceError if they don't fit the model, and UnsupportedCheckpoint if they are ambiguous.
        """
        groups = [as_dict(group, "a param group", where) for group in get(tree, GROUPS, list, where)]
        state = get(tree, STATE, dict, where)
        ids = [as_ints(group.get("params")) or () for group in groups]
        if not self.groups:
            self._ids, self.groups = ids, self._derived(groups, ids, state, where)
        elif ids != self._ids:
            raise SourceError.at(where, "its param groups have other ids", COPY_CHECKPOINT, Code.RANKS_DIFFER)
        name_of = {
            number: name
            for own, names in zip(ids, self.groups, strict=True)
            for number, name in zip(own, names, strict=True)
        }
        if extra := [f"{number}" for number in state if number not in name_of]:
            what = f"it holds the states of id {some(extra)}, which no param group owns"
            raise SourceError.at(where, what, COPY_CHECKPOINT, Code.FIELD_UNKNOWN)
        states = {name_of[number]: kinds for number, kinds in state.items() if kinds}
        return {STATE: states, GROUPS: [*map(partial(_of_trained, states), groups, self.groups)]}

    def _derived(
        self,
        groups: Sequence[Mapping[str, Any]],
        ids: Sequence[tuple[int, ...]],
        state: Mapping[Any, Any],
        where: str,
    ) -> tuple[tuple[str, ...], ...]:
        listed = [next((group[key] for key in NAME_KEYS if isinstance(group.get(key), list)), None) for group in groups]
        saved = SavedOptimizer(
            tuple(
                SavedGroup(
                    own, None if names is None else tuple(check_name(one, "a param", where) for one in names), group
                )
                for own, names, group in zip(ids, listed, groups, strict=True)
            ),
            {number: _shapes(state.get(number), where) for own in ids for number in own},
            {},
            {},
            True,
        )
        all_ids = [number for own in ids for number in own]
        if has_names(saved):
            found = listed_names(saved, where)
            names = [name for group in found for name in group]
            unknown = [name for name in names if name not in self.shapes]
            if unknown or [*map(len, found)] != [*map(len, ids)]:
                what = f"the param groups list {some(unknown)}, which the model lacks" if unknown else "ids lack names"
                raise SourceError.at(where, what, COPY_CHECKPOINT, Code.FIELD_CONFLICT)
            if problems := compare_shapes(all_ids, [*map(saved.shape, all_ids)], names, self.shapes, where):
                raise SourceError(problems)
            return found
        if len(groups) > 1:
            what = f"it has {len(groups)} param groups without names: nothing says which params are in each"
            raise UnsupportedCheckpoint.at(where, what, "give the optimizer model.named_parameters(), as torch allows")
        return derived_names(saved, ModelFacts(self.shapes, frozenset(), {}, frozenset()), where)


def _of_trained(states: Collection[str], group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a param group with the names of its params, and where it lists names, of those with states only."""
    trained = [name for name in names if name in states]
    return {key: trained if key in NAME_KEYS else value for key, value in group.items()} | {"params": trained}


def _shapes(kinds: Any, where: str) -> dict[str, Tensor]:
    """Return a param's states with the shape of the whole tensor, and no place."""
    values = as_dict(kinds or {}, "the state of a param", where)
    for kind, value in values.items():
        if view := as_tensor(value):
            refuse_flat(f"{kind}", kind, view.shape, where)
    pieces = {str(kind): as_piece(value, str(kind), where) for kind, value in values.items()}
    nowhere = Extent("", 0, 0)
    return {kind: Tensor(one.view.storage.dtype, one.shape, nowhere) for kind, one in pieces.items() if one is not None}
