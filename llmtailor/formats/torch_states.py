"""A torch optimizer's state dict, in whatever file it is: reader and layout.

There are no separate master weights: the weights are what the optimizer updates, so the same bytes are held under
both kinds. Adam counts its ``step`` per param, so every param is its own sub-group, numbered through the groups.

The groups that are written list the names of their params: as the base's do, or else under a key of our own, which the
Trainer saves again. So the checkpoint can be read again whatever its groups are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import TRAINER, CheckpointIndex, Form, TensorEntry, TrainState, buffer_on_ranks
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.checkpoint.optimizer import SAVED_NAMES, OptimizerLayout, ParamGroup, SubGroup, with_names
from llmtailor.checkpoint.placement import AllZero
from llmtailor.checkpoint.schema import kinds_by_param
from llmtailor.checkpoint.step_names import step_of
from llmtailor.codes import Code
from llmtailor.containers.json import STEP_FORMATS, read_strict_json, read_tied
from llmtailor.containers.safetensors import WeightFile, lay_out_weight_files, lay_out_weights, read_weights
from llmtailor.containers.unpickle import Quantized, make_tensor, state_tensor
from llmtailor.errors import PathIn, SourceError, UnsupportedCheckpoint, damaged, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.format import usual_dtype
from llmtailor.formats.param_names import Fitted, ModelFacts, derived_names, fit, has_names, listed_names
from llmtailor.formats.safetensors_weights import find_adapter_files, new_weights
from llmtailor.formats.torch_optimizer import SavedOptimizer
from llmtailor.frameworks.files import MANIFEST, rank_of
from llmtailor.frameworks.read import TrainerFiles, adapters_of, compare_global_step
from llmtailor.frameworks.scheduler import read_scheduler
from llmtailor.frameworks.stock_fields import adams_first_kinds, has_adams_options, keeps_as_adam
from llmtailor.frameworks.write import carry
from llmtailor.model.dtypes import FLOATING
from llmtailor.model.parts import Param
from llmtailor.model.roles import BUFFER, FROZEN, MASTER, WEIGHT, State, is_optimizer_state

BUFFERS_KEY = "buffers"
"""Key in the metadata of a composite's safetensors: the names of buffers among the tensors, separated by commas"""
TIED_KEY = "tied"
"""Another such key, always there: JSON, tied names and the names that their values are stored under"""


def _find_stateless(index: CheckpointIndex, where: str) -> Iterator[Finding]:
    """Yield a finding on params without a state, which an optimizer of torch gives a param with its first gradient."""
    zero = {state.param for state, held in index.held.items() if held.is_all_zero}
    having = {state.param for state in index.held if is_optimizer_state(state.kind)} - zero
    params = [param for one in index.sub_groups for param in one.params]
    lacking = [param for param in params if param not in having] if having or zero else []
    if lacking:
        fix = "no action needed if it has had no gradient yet, as an unused head; else its moments are lost"
        what = f"the optimizer has no state of {some(lacking)}: a resume starts from zero moments there"
        if not having:
            what, fix = (
                "the optimizer has no states, as before its first step",
                "no action needed if it has made no step yet",
            )
        yield Finding(where, what, fix, Code.STATE_MISSING)


def make_index(
    root: Path,
    name: str,
    optimizer: SavedOptimizer,
    groups: Sequence[tuple[str, ...]],
    *,
    params: Mapping[str, Param],
    tied: Mapping[str, str],
    dtypes: Mapping[str, str],
) -> CheckpointIndex:
    """Return what is known from ``optimizer.pt`` and the names of its params: as if of one rank, in fp32.

    ``dtypes`` are those of the weights, which the moments have that do not exist yet.
    """
    usual = max(dtypes.values(), key=[*dtypes.values()].count, default="F32")
    named = step_of(root)  # of optimizers that count no steps
    sub_groups: list[SubGroup] = []
    held: dict[State, TensorEntry] = {}
    zero: dict[State, TensorEntry] = {}
    for at, (names, saved) in enumerate(zip(groups, optimizer.groups, strict=True)):
        for param, number in zip(names, saved.ids, strict=True):
            sub_groups.append(SubGroup(at, (param,), optimizer.steps[number], scalars=optimizer.scalars[number]))
            kinds = optimizer.kinds[number]
            held |= {State(param, kind): one.entry for kind, one in kinds.items()}
            for kind in adams_first_kinds(saved.hyper) if optimizer.is_zeroed and not kinds else ():
                entry = TensorEntry(dtypes.get(param, usual), params[param].shape, AllZero())
                zero[State(param, kind)] = entry
    return CheckpointIndex(
        root=root,
        name=name,
        form=Form(TRAINER),
        world_size=1,
        global_step=int(max((step for step in optimizer.steps.values() if step is not None), default=named or 0)),
        precision="F32",
        params=params,
        tied=tied,
        held=held | zero,
        groups=tuple(ParamGroup(names, saved.hyper) for names, saved in zip(groups, optimizer.groups, strict=True)),
        sub_groups=tuple(sub_groups),
        files={},
        train=TrainState(step_is_tensor=optimizer.step_is_tensor, step_dtype=optimizer.step_dtype),
    )


def index_with_weights(
    root: Path,
    where: PathIn,
    optimizer: SavedOptimizer,
    weights: Mapping[str, TensorEntry],
    model: ModelFacts | None,
    trainer: TrainerFiles,
    *,
    buffers: Collection[str],
    ties: Mapping[str, str] | None = None,
) -> tuple[CheckpointIndex, Fitted]:
    """Return the index of an optimizer and the weights that it updates, and how they fit.

    ``where`` is the optimizer's file; the weight files list ``buffers``, and maybe ``ties``. Raises SourceError if
    these and the model don't fit together.
    """
    is_named = has_names(optimizer) or model is None
    groups = listed_names(optimizer, where) if model is None or is_named else derived_names(optimizer, model, where)
    aliases = listed_aliases(root, where.checkpoint) if not trainer.has_adapters else {}
    known = fit(groups, optimizer, weights, model, where, listed=buffers, aliases=aliases)
    of_weights = {param: weight.dtype for param, weight in known.weights.items()}
    tied = known.tied if ties is None else {name: of for name, of in ties.items() if of in known.params}
    index = make_index(root, where.checkpoint, optimizer, groups, params=known.params, tied=tied, dtypes=of_weights)
    findings = [*_find_stateless(index, where)]
    if not is_named and (frozen := [param.name for param in known.params.values() if param.role == "frozen"]):
        fix = "if they were trained, their states are lost: leave this checkpoint out"
        what = f"it has no state of {some(frozen)}: assumed to be frozen"
        findings.append(Finding(where, what, fix, Code.STATE_MISSING))
    ranks = [rank_of(path) for path in trainer.files] if trainer.framework.saves_rng else []
    world_size = max((rank + 1 for rank in ranks if rank is not None), default=1)
    index = replace(
        index,
        world_size=world_size,
        global_step=index.global_step if trainer.global_step is None else trainer.global_step,
        precision=usual_dtype(weight.dtype for weight in weights.values()),
        held={**index.held, **dict(_hold_weights(known, world_size))},
        findings=tuple(findings),
        # llmtailor's weight files list the ties and the buffers, and an adapter's hold no others
        train=replace(index.train, unclear=frozenset() if ties is not None or trainer.has_adapters else known.unclear),
    )
    return index, known


def _hold_weights(known: Fitted, world_size: int) -> Iterator[tuple[State, TensorEntry]]:
    """Yield the states that the weights are: masters, frozen params and buffers."""
    for name, weight in known.weights.items():
        role = known.params[name].role
        if role != "buffer":
            yield State(name, MASTER if role == "trainable" else FROZEN), weight
            continue
        for whole in weight.place.cover(0, weight.numel):  # one file for all ranks: every rank resumes with these
            yield State(name, BUFFER), buffer_on_ranks(weight.dtype, weight.shape, (whole.extent,) * world_size)


def check_steps(index: CheckpointIndex, trainer: TrainerFiles) -> Iterator[Finding]:
    """Yield findings on steps. Optimizer and schedule are saved and restored together; only a composite may mix steps.

    A param without gradients makes no step, so its states may lag behind, but only with its whole module. One without a
    state has made none. Some optimizers skip steps of all params. Raises SourceError if the steps lag unevenly, or run
    ahead.
    """
    framework, name = trainer.framework, index.name
    counted = trainer.scheduler.num_steps if trainer.scheduler is not None else None
    lacking = {state.param for state, held in index.held.items() if held.is_all_zero}
    of_step: dict[float, list[str]] = {}
    for param, step in index.steps().items():
        if param not in lacking:
            of_step.setdefault(step, []).append(param)
    if not framework.counts_steps and (of_step or trainer.global_step is not None):
        counted = index.global_step
    elif not framework.counts_steps:  # before the first step, no schedule has counted any
        counted = read_scheduler(trainer.trees.get(framework.scheduler)).num_steps
    if counted is None or MANIFEST in trainer.files:
        return
    usual = {counted - lag for lag in trainer.step_lags}
    where = PathIn(name, framework.optimizer)
    fix = f"copy {framework.optimizer} and {framework.scheduler} again; they come from different saves"
    if not of_step:
        has_states = any(is_optimizer_state(one.kind) and not held.is_all_zero for one, held in index.held.items())
        if counted > 0 and not (keeps_nothing(index) or has_states):
            what = f"the optimizer has no states, but the schedule is at step {counted}"
            raise SourceError.at(where, what, fix, Code.STEPS_DIFFER)
    elif not usual.intersection(of_step):
        what = f"the optimizer's states are from step {max(of_step):g}, but the schedule is at step {counted}"
        if len(of_step) > 1 or max(of_step) > counted:
            raise SourceError.at(where, what, fix, Code.STEPS_DIFFER)
        why = "no action needed if the optimizer was reset, or skips steps at a learning rate of 0, as Prodigy does; "
        why += f"else {fix}"
        yield Finding(where, what, why, Code.STEPS_DIFFER, WARNING)
    for step, params in of_step.items():
        if step in usual or usual.isdisjoint(of_step):
            continue
        if step > counted or step == 0 or len(params) == 1:
            what = f"Adam's step of {some(params)} is {step:g}, but the schedule is at step {counted}"
            severity = WARNING if step < counted else ERROR
            why = "no action needed if it had no gradients in these steps" if severity == WARNING else f"silent: {fix}"
            yield Finding(where, what, why, Code.STEPS_DIFFER, severity)
    yield from compare_global_step(trainer, index.root, name, counted)


def listed_ties(root: Path, name: str) -> dict[str, str] | None:
    """Return the tied names that a composite's weight files list; None if a file was not written by llmtailor."""
    found: dict[str, str] = {}
    for file in read_weights(root, name):
        where, text = PathIn(name, file.path), file.metadata.get(TIED_KEY)
        if text is None:
            return None
        try:
            found |= read_tied(read_strict_json(text.encode()), where)
        except (ValueError, RecursionError) as error:
            raise damaged(where, f"its metadata {TIED_KEY} is not JSON ({error})") from error
    return found


def listed_aliases(root: Path, name: str) -> dict[str, str]:
    """Return the names that ``save_model`` of safetensors has left out of the weight files, and lists with the names
    that it kept."""
    return {
        alias: kept
        for file in read_weights(root, name)
        for alias, kept in file.metadata.items()
        if kept in file.tensors and alias not in file.tensors
    }


def listed_buffers(root: Path, name: str) -> set[str]:
    """Return the buffers that a composite's weight files list; other files don't distinguish them from params."""
    listed = (file.metadata.get(BUFFERS_KEY, "") for file in read_weights(root, name))
    return {buffer for names in listed for buffer in names.split(",") if buffer}


NO_STATES = "its optimizer has made no step yet, so it has no states"


def keeps_nothing(base: CheckpointIndex) -> bool:
    """Return whether an optimizer without states may be of a kind that has none, such as SGD without momentum."""
    return not any(has_adams_options(group.hyper) for group in base.groups)


def is_adam(base: CheckpointIndex) -> bool:
    """Return whether the optimizer is Adam, by its states and the options of its groups."""
    kinds = {state.kind for state in base.held if is_optimizer_state(state.kind)}
    return keeps_as_adam(kinds, {option for group in base.groups for option in group.hyper})


def written_dtype(base: CheckpointIndex, held: TensorEntry | None) -> str:
    """Return the dtype of a param's states where weights are the masters: those of a ZeRO base become fp32."""
    is_as_held = held is not None and (held.dtype not in FLOATING or not base.form.has_masters)
    return held.live_dtype if held is not None and is_as_held else "F32"


def state_nodes(base: CheckpointIndex, layout: OptimizerLayout) -> dict[str, dict[str, Any]]:
    """Return the node of each trained param's states, with the step, in the order of the groups."""
    kinds = kinds_by_param(base)
    nodes: dict[str, dict[str, Any]] = {}
    for one in layout.sub_groups:  # one for each param, through the groups
        for param in one.params:
            tensors = {
                kind: state_tensor(State(param, kind), written_dtype(base, held), held.shape)
                for kind, held in kinds.get(param, {}).items()
            }
            node: dict[str, Any] = {} if one.step is None else {"step": step_node(base, one.step, param)}
            for kind, value in one.scalars.items():
                if isinstance(value, Quantized):
                    names = [name for name in tensors if name.startswith(f"{kind}.")]
                    value = value.filled({name.removeprefix(f"{kind}."): tensors.pop(name) for name in names})
                node[kind] = value
            nodes[param] = node | tensors
    return nodes


def optimizer_tree(base: CheckpointIndex, layout: OptimizerLayout, *, is_partial: bool = False) -> dict[str, Any]:
    """Return the tree of ``optimizer.pt``, or of a partial checkpoint, with its tensors bound to states."""
    nodes, first = [], 0
    for group in layout.groups:
        listed = {**group.hyper, SAVED_NAMES: [*group.params]} if is_partial else with_names(group.hyper, group.params)
        nodes.append({**listed, "params": list(range(first, first + len(group.params)))})
        first += len(group.params)
    states = enumerate(state_nodes(base, layout).values())
    return {"state": {number: node for number, node in states if node}, "param_groups": nodes}


def step_node(base: CheckpointIndex, step: float, what: str) -> Any:
    """Return a param's step in the form of torch's AdamW, or as the number that the base has instead."""
    if not (base.form.has_masters or base.train.step_is_tensor):
        return int(step)
    dtype = "F32" if base.form.has_masters else base.train.step_dtype
    data = struct.pack(STEP_FORMATS[dtype], step if dtype in FLOATING else int(step))
    return make_tensor(dtype, (), (Bytes(data, f"step of {what}"),))


def lay_out_master_weights(base: CheckpointIndex) -> list[FileLayout]:
    """Return the weight files, which hold the master weights. Raises UnsupportedCheckpoint for an unknown adapter."""
    dtype = "F32" if base.form.has_masters else None
    if adapters_of(base):
        adapters = find_adapter_files(base)
        if adapters.unknown:
            what = f"the names of the trained params in {some(adapters.unknown)}, which a resume needs, are unknown"
            raise UnsupportedCheckpoint.at(base.name, what, "stay with DeepSpeed: use --stage 1, 2 or 3")
        layouts = [lay_out_weights(_from_originals(file, base), dtype) for file in adapters.files]
        return [*layouts, *(carry(path, base.files[path]) for path in adapters.frozen)]
    # a resume looks for the params' own names
    if base.form.has_masters or not base.has_weight_files or _is_renamed(base):
        files = new_weights(replace(base, partial=replace(base.partial, saved_as=None)), dtype=dtype)
        files = tuple(replace(file, metadata={**file.metadata, **_roles_in(file.tensors, base)}) for file in files)
    else:
        files = read_weights(base.root, base.name)
    return lay_out_weight_files(tuple(_from_originals(file, base) for file in files), None)


def _is_renamed(base: CheckpointIndex) -> bool:
    params = [param.name for param in base.params.values() if param.role != "buffer"]
    unnamed = [name for name in params if State(name, WEIGHT) not in base.held]
    return bool(unnamed) and all({State(name, MASTER), State(name, FROZEN)} & base.held.keys() for name in unnamed)


def _from_originals(file: WeightFile, base: CheckpointIndex) -> WeightFile:
    """Fill weights from the states that they copy; what has another name than any param stays a weight."""
    filled_by = {name: (State(name, WEIGHT), 0) for name in file.tensors} | dict(file.filled_by)
    for name, (weight, begin) in filled_by.items():
        states = (State(weight.param, kind) for kind in (MASTER, FROZEN, BUFFER))
        filled_by[name] = (next((state for state in states if state in base.held), weight), begin)
    return replace(file, filled_by=filled_by)


def _roles_in(shard: Container[str], base: CheckpointIndex) -> dict[str, str]:
    """Return the metadata of a weight file: buffers and tied names, which neither tensors nor config.json reveal."""
    buffers = [name for name, param in base.params.items() if name in shard and param.role == "buffer"]
    tied = {name: stored for name, stored in base.tied.items() if stored in shard}
    listed = {BUFFERS_KEY: ",".join(buffers)} if buffers else {}
    return {**listed, TIED_KEY: json.dumps(tied)}
