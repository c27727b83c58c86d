"""Checkpoints that don't say which params they hold, read for a training that is at hand.

``optimizer.pt`` numbers params in the order of the optimizer's groups, and torch's ``load_state_dict`` gives each state
to the param in its place; so the live optimizer says which param a number is. This reads any optimizer of torch's form,
also one whose states are not elementwise, and any adapter of PEFT. It shows that the files were loaded, not that they
are of this model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.attestation.pieces import Names, with_pieces
from llmtailor.checkpoint.index import TRAINER, CheckpointIndex, Form, TensorEntry, TrainState
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup
from llmtailor.codes import Code
from llmtailor.containers.json import FileTrees, get, read_step, read_tensor
from llmtailor.containers.safetensors import read_header
from llmtailor.containers.torch_file import read_torch_file
from llmtailor.containers.unpickle import as_number, as_tensor
from llmtailor.errors import PathIn, Problems, SourceError, UnsupportedCheckpoint, damaged
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.files import rank_of
from llmtailor.frameworks.read import read_trainer_files
from llmtailor.model.dtypes import FLOATING
from llmtailor.model.parts import Param
from llmtailor.model.roles import BUFFER, KIND_OF_ROLE, WEIGHT, State


@dataclass(frozen=True, slots=True)
class Positions:
    """What of a live training says which params a checkpoint holds."""

    params: Mapping[str, Param]
    groups: Sequence[Sequence[str | None]]
    """The params of each group of the optimizer, in its order; None for one that is not the model's"""
    stored: Mapping[str, tuple[str, str]] | None = None
    """Of an adapted model: param or buffer -> the file of an adapter that holds it, and its name there"""
    saved_as: Names | None = None
    """Param or buffer -> what it is in the weight files; None if that is unknown"""
    tied: Mapping[str, str] = field(default_factory=dict)


def index_by_position(root: Path, live: Positions) -> tuple[CheckpointIndex, frozenset[str]]:
    """Return the index of a checkpoint without DeepSpeed or FSDP, each state at its place in the files; and the params
    whose weights are stored in another form, so that they can't be compared.

    Only the 4 bytes of each step are read. Raises SourceError for files that are missing or damaged, and, with
    `Code.RESUME_DIFFERS`, if they have other param groups than the training.
    """
    name, problems, trees = display_name(root), Problems(), FileTrees(root)
    trainer = read_trainer_files(trees, name, problems)
    problems.raise_if_any()
    path = trainer.framework.optimizer
    where = PathIn(name, path)
    if trainer.framework.holds_all or path not in trainer.files:
        raise damaged(where, "the file is missing", Code.FILE_MISSING)
    tree = read_torch_file(root, path, where, any_names=True).tree  # nothing of it is written anywhere
    states, groups = get(tree, "state", dict, where), get(tree, "param_groups", list, where)
    numbers = [get(group, "params", list, where) for group in groups]
    if [len(ids) for ids in numbers] != [len(names) for names in live.groups]:
        what = f"its param groups have {_counts(numbers)} params, those of the training {_counts(live.groups)}"
        fix = "give the optimizer the params that it was saved with; torch refuses to load others"
        raise SourceError.at(where, what, fix, Code.RESUME_DIFFERS)
    entries_of: dict[State, TensorEntry] = {}
    sub_groups: list[SubGroup] = []
    for group, (names, ids) in enumerate(zip(live.groups, numbers, strict=True)):
        for param, number in zip(names, ids, strict=True):
            if param is None:
                continue
            entries = states.get(number, {})
            step = entries.get("step", 0.0)
            is_known = as_number(step) is not None or as_tensor(step) is not None
            scalars = {kind: node for kind, node in entries.items() if kind != "step" and as_number(node) is not None}
            at = read_step(root, step, number, where) if is_known else 0.0
            sub_groups.append(SubGroup(group, (param,), at, scalars=scalars))
            entries_of |= {State(param, kind): entry for kind, entry in _entries(entries, where)}
    weights = {state.param: entry for state, entry in trainer.weights.items()}
    entries_of |= dict(_weights(root, name, live, weights))
    # what the model has not, unless the file may only have other names for it
    saved_as = None if live.stored is not None else live.saved_as
    known = {*live.params, *live.tied, *(piece.name for pieces in (saved_as or {}).values() for piece in pieces)}
    not_live = {
        key: Param(key, entry.shape, "frozen" if entry.dtype in FLOATING else "buffer")
        for key, entry in weights.items()
        if key not in known and saved_as is not None
    }
    entries_of |= {State(key, KIND_OF_ROLE[param.role]): weights[key] for key, param in not_live.items()}
    steps = [group.step for group in sub_groups if group.step is not None]
    index = CheckpointIndex(
        root,
        name,
        Form(TRAINER),
        world_size=max((rank + 1 for path in trainer.files if (rank := rank_of(path)) is not None), default=1),
        global_step=int(max(steps, default=0)) if trainer.global_step is None else trainer.global_step,
        precision="F32",
        params={**live.params, **not_live},
        tied=live.tied,
        held=entries_of,
        groups=tuple(
            ParamGroup(tuple(name for name in names if name is not None), hyper)
            for names, hyper in zip(live.groups, groups, strict=True)
        ),
        sub_groups=tuple(sub_groups),
        files=trainer.files,
        framework=trainer.framework.name,
        train=TrainState(trees=trainer.trees),
    )
    if live.stored is not None:
        trained = {name for name, param in live.params.items() if param.role == "trainable"}
        return index, frozenset(trained - live.stored.keys())
    return with_pieces(index, live.params, live.tied, lambda: live.saved_as)


def _counts(groups: Sequence[Sequence[Any]]) -> str:
    return " + ".join(str(len(group)) for group in groups)


def _entries(state: Any, where: str) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the tensors of a param's state; those of no plain form, such as quantized ones, can't be compared."""
    for kind, node in state.items() if isinstance(state, dict) else ():
        view = as_tensor(node)
        if kind == "step" or not isinstance(kind, str) or view is None or not view.numel:
            continue
        try:
            yield kind, read_tensor(node, kind, where).entry
        except UnsupportedCheckpoint:  # not contiguous
            continue


def _weights(
    root: Path, name: str, live: Positions, whole: Mapping[str, TensorEntry]
) -> Iterator[tuple[State, TensorEntry]]:
    files: dict[str, Mapping[str, TensorEntry]] = {}
    for param, (path, key) in (live.stored or {}).items():
        if path not in files:
            files[path] = read_header(root, path, PathIn(name, path)).tensors
        if key in files[path]:
            yield State(param, KIND_OF_ROLE[live.params[param].role]), files[path][key]
    for key, entry in whole.items():
        if key not in (live.stored or ()):
            kind = BUFFER if key in live.params and live.params[key].role == "buffer" else WEIGHT
            yield State(key, kind), entry
