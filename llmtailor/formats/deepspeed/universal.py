"""DeepSpeed universal checkpoints: reader and layout. Verified against DeepSpeed 0.19.8.

::

    latest_universal                                    the tag, as text
    TAG/zero/PARAM/{fp32,exp_avg,exp_avg_sq}.pt         a tensor, or {param: tensor, cat_dim: 0}
    TAG/zero/PARAM/step.pt                              Adam's step; none if ds_to_universal made it from ZeRO-3
    TAG/zero/optimizer_state.pt                         hyperparameters, loss scaler; see `read_global_state`
    TAG/[zero_pp_rank_R_]mp_rank_00_model_states.pt     as ZeRO saved them

``ds_to_universal`` flattens the tensors of ZeRO-3, so shapes come from ``param_shapes`` of the model states. From
ZeRO-1/2 it also writes ``fp32.pt`` for frozen params, buffers and tied names, which a resume does not read; here these
come from the model states. Tensors merged from tensor-parallel ranks have other keys beside ``param`` and are refused.

The model states are those of the output's stage. A run in the other kind of stage opens a file of another name first,
so a copy without params has that name. What each stage then reads of ``zero/`` `read_global_state` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import BF16_OPTIMIZER, PLAIN, UNIVERSAL, CheckpointIndex, EngineTrees, TensorEntry
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.checkpoint.optimizer import OptimizerLayout, differing, without_names
from llmtailor.checkpoint.placement import Extent
from llmtailor.checkpoint.step_names import UNIVERSAL_SUFFIX
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.codes import Code
from llmtailor.containers.json import FileTrees, Tensor, Trees, as_dict, check_kind, get, read_step, read_tensor
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.containers.unpickle import Ordered, state_tensor
from llmtailor.errors import (
    COPY_CHECKPOINT,
    PathIn,
    Problem,
    Problems,
    SourceError,
    UnsupportedCheckpoint,
    attempt,
    counted,
    damaged,
    some,
)
from llmtailor.findings import WARNING, Finding
from llmtailor.formats.deepspeed.files import (
    ShardFiles,
    count_models,
    model_name,
    read_tag,
    refuse_other_parallelism,
)
from llmtailor.formats.deepspeed.read import EngineStates, first_of, fit_models, uses_round_robin
from llmtailor.formats.deepspeed.shards import (
    STATES,
    ZERO12,
    OptimShard,
    ShardReader,
    read_model_shard,
    read_param_group,
    read_stage,
    section,
)
from llmtailor.formats.deepspeed.write import (
    DS_VERSION,
    RankFiles,
    ZeroTarget,
    clipping_node,
    lay_out_engine,
    make_stage,
    model_states,
    scaling_nodes,
    step_nodes,
    unknown,
)
from llmtailor.formats.format import Draft
from llmtailor.frameworks.files import ENGINE_FILES, LATEST, LATEST_UNIVERSAL, MANIFEST
from llmtailor.frameworks.read import file_fact, read_trainer_files
from llmtailor.frameworks.stock_fields import check_fields, facts_of_rank
from llmtailor.model.parts import Param
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER, State
from llmtailor.storage.local import FileFact, list_entries

FOLDER, GLOBAL_STATE, STEP = "zero", "optimizer_state.pt", "step"
NAME_OF = {MASTER: "fp32"}
"""Kinds of state whose files have another name"""
_REQUIRED = (MASTER, EXP_AVG, EXP_AVG_SQ)
_KEYS = {"param", "cat_dim"}
_SCALING = {"loss_scaler", "dynamic_loss_scale", "overflow"}
_Shapes = Mapping[str, tuple[int, ...]]


def detects(root: Path) -> bool:
    """Return whether a folder is, or was, a universal checkpoint; one beside a ZeRO checkpoint does not count."""
    if not root.is_dir() or (root / LATEST).exists():
        return False
    return (root / LATEST_UNIVERSAL).exists() or bool(_tags(root))


def _tags(root: Path) -> list[str]:
    return [path.parent.name for path in root.glob(f"*/{FOLDER}") if path.is_dir()]


def read_global_state(trees: Trees, path: str, where: str) -> OptimShard:
    """Return the content of ``optimizer_state.pt``, which has no flat tensors, and may lack steps.

    All read ``loss_scaler``, ``dynamic_loss_scale`` and ``overflow``; ZeRO-1/2 also ``clip_grad``, ``ds_version`` and
    ``param_groups``; ZeRO-3 ``optimizer_state_dict.state[0].step`` and ``optimizer_state_dict.param_groups[0]``, for
    all groups. Raises SourceError.
    """
    tree = as_dict(trees.read(path, where).tree, "the file", where)
    groups = tuple(read_param_group(trees.root, group, where) for group in get(tree, "param_groups", list, where))
    owned = [flat_id for ids, _ in groups for flat_id in ids]
    if owned != list(range(len(owned))) or not owned:
        raise damaged(where, f"the param groups own the sub-groups {owned}, in this order", Code.FIELD_CONFLICT)
    steps, step_is_tensor = {}, True
    inner = as_dict(tree.get("optimizer_state_dict", {}), "optimizer_state_dict", where)
    for flat_id, state in as_dict(inner.get("state", {}), "state", where).items():
        node = as_dict(state, f"state[{flat_id}]", where).get(STEP)
        if flat_id in owned and node is not None:
            steps[flat_id] = read_step(trees.root, node, flat_id, where)
            step_is_tensor = not isinstance(node, (int, float))
    outer = {key: value for key, value in tree.items() if key not in STATES and key != "param_groups"}
    stage = read_stage(tree, (1, 2, 3), "of a universal checkpoint", where)
    read = _SCALING if stage == 3 else _SCALING | {"clip_grad", "ds_version"}
    table = tuple(one for one in ZERO12 if len(one.path) > 1 and one.path[1] in read)
    wrapped = {"optimizer_state_dict": outer}
    return OptimShard(
        path=path,
        rest=outer,
        facts=facts_of_rank(wrapped, table),
        findings=tuple(check_fields(wrapped, table, where)),
        stage=stage,
        variant=PLAIN if "zero_stage" in tree else BF16_OPTIMIZER,
        groups=groups,
        steps=steps,
        step_is_tensor=step_is_tensor,
    )


@dataclass(frozen=True, slots=True)
class _StoredParam:
    tensors: Mapping[str, Tensor | None]
    """Kind -> its tensor; None for a file that is missing or damaged"""
    step: float | None
    step_is_tensor: bool


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a universal checkpoint; see `Reader`."""
    problems, trees, findings = Problems(), FileTrees(root), list[Finding]()
    tag = read_tag(root, name, LATEST_UNIVERSAL, _tags(root), problems)
    trainer = read_trainer_files(trees, name, problems, framework, is_engines=True)
    if tag is None:
        return Draft(problems)
    facts = dict(_files_in(root, f"{tag}/"))
    refuse_other_parallelism([path.rpartition("/")[2] for path in facts if path.count("/") == 1], PathIn(name, tag))
    path, place = f"{tag}/{FOLDER}/{GLOBAL_STATE}", PathIn(name, tag)
    where = PathIn(name, path)
    known = attempt(lambda: read_global_state(trees, path, where), problems)
    if known is None:
        return Draft(problems)
    count = count_models(file.rpartition("/")[2] for file in facts) if known.stage == 3 else 1
    model_paths = tuple(f"{tag}/{model_name(rank, known.stage)}" for rank in range(count))
    files = ShardFiles(tag, False, (path,), model_paths, known.stage == 3)
    read_model = partial(read_model_shard, is_adapter=trainer.has_adapters)
    model = ShardReader(trees, files, name, problems, findings).read_all(read_model, files.model, {})
    model = fit_models(files, model, name, problems, trainer)
    usual = first_of(model)
    if usual is None:
        return Draft(problems)
    if files.is_zero3 and count != usual.world_size:
        saved = counted(usual.world_size, "rank")
        what = f"there are model states of {counted(count, 'rank')}, but they say that {saved} saved them"
        problems.add(SourceError.at(place, what, COPY_CHECKPOINT, Code.FILE_MISSING))
    if (have := len(usual.param_shapes)) != (owned := sum(len(ids) for ids, _ in known.groups)):
        what = f"the param groups own {owned} sub-groups, but the model states describe {have}"
        problems.add(damaged(where, what, Code.FIELD_CONFLICT))
        return Draft(problems)
    reader = _UniversalReader(name, trees, f"{tag}/{FOLDER}/", facts, problems)
    stored = {param: reader.read(param, shape) for shapes in usual.param_shapes for param, shape in shapes.items()}
    steps = [reader.step(flat_id, shapes, stored, known.steps) for flat_id, shapes in enumerate(usual.param_shapes)]
    config = section(usual.rest, "ds_config")
    if uses_round_robin(config, known.stage, known.variant) and not (root / MANIFEST).is_file():
        what = "ds_to_universal 0.19.8 mixes up the params of a run with round_robin_gradients"
        fix = "use the checkpoint that it was made from; llmtailor convert --to universal makes another"
        problems.add(SourceError.at(place, what, fix))
    are_tensors = [one.step_is_tensor for one in stored.values() if one.step is not None]
    version = known.rest.get("ds_version", usual.rest.get("ds_version"))
    optim = replace(
        known,
        ds_config=config,
        steps=dict(enumerate(steps)),
        scalars=({},) * len(steps),
        step_is_tensor=[*are_tensors, known.step_is_tensor][0],
    )
    return EngineStates(
        format=UNIVERSAL,
        root=root,
        name=name,
        files=replace(files, is_bf16=section(config, "bf16").get("enabled") is True),
        optim=optim,
        model=model,
        trained=[*reader.placed(usual.param_shapes, stored)],
        rests=[{"ds_config": config, "ds_version": version, "optimizer_state_dict": known.rest}],
        facts=facts,
        unreadable=reader.unreadable,
        findings=[*findings, *known.findings, *_other_steps(known.steps.get(0), steps, where)],
        trainer=trainer,
        problems=problems,
    ).draft()


def _files_in(root: Path, folder: str) -> Iterator[tuple[str, FileFact]]:
    for entry in list_entries(root / folder):
        path = folder + entry
        if entry.endswith("/"):
            yield from _files_in(root, path)
        elif fact := file_fact(root / path):
            yield path, fact


def _other_steps(first: float | None, steps: Sequence[float], where: str) -> Iterator[Finding]:
    if first is not None and (others := sorted({*steps} - {first})):
        what = f"Adam's steps are {', '.join(f'{step:g}' for step in (first, *others))}"
        fix = f"a resume with ZeRO-3 takes {first:g} for all params; ZeRO-1 and ZeRO-2 keep them"
        yield Finding(where, what, fix, Code.STEPS_DIFFER, WARNING)


class _UniversalReader:
    def __init__(self, name: str, trees: Trees, folder: str, facts: Mapping[str, FileFact], problems: Problems):
        self.name, self.trees, self.folder, self.facts, self.problems = name, trees, folder, facts, problems
        self.unreadable: set[str] = set()
        self.named: dict[str, list[str]] = {}
        """Folder of a param -> the stems of its ``.pt`` files"""
        for path in facts:
            if path.endswith(".pt"):
                above, _, file = path.rpartition("/")
                self.named.setdefault(above, []).append(file.removesuffix(".pt"))

    def path(self, param: str, kind: str) -> str:
        return f"{self.folder}{param}/{NAME_OF.get(kind, kind)}.pt"

    def read(self, param: str, shape: tuple[int, ...]) -> _StoredParam:
        names = self.named.get(f"{self.folder}{param}", [])
        kinds = (*_REQUIRED, *(one for one in names if one not in (STEP, *NAME_OF.values(), *_REQUIRED)))
        tensors = {
            kind: attempt(lambda: self._read_tensor(self.path(param, kind), kind, shape), self.problems)  # noqa: B023
            for kind in kinds
        }
        step, is_tensor = None, True
        if STEP in names:
            path = self.path(param, STEP)
            node = attempt(lambda: self.trees.read(path, PathIn(self.name, path)).tree, self.problems)
            is_tensor = not isinstance(node, (int, float))
            if node is not None:
                step = attempt(lambda: read_step(self.trees.root, node, 0, PathIn(self.name, path)), self.problems)
        return _StoredParam(tensors, step, is_tensor)

    def _read_tensor(self, path: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        where = PathIn(self.name, path)
        if kind not in _REQUIRED:
            check_kind(kind, where)
        if path not in self.facts:
            what = "the file is missing; a resume fails, or Adam restarts"
            raise damaged(where, what, Code.FILE_MISSING)
        decoded, stem = self.trees.read(path, where), Path(path).stem
        if decoded.archive in {*NAME_OF.values(), *_REQUIRED} and decoded.archive != stem:
            what = f"the file was saved as {decoded.archive}.pt, so it holds another state"
            raise SourceError.at(where, what, "rename the files of this folder as they were saved", Code.FILE_SWAPPED)
        node = decoded.tree
        if isinstance(node, dict):
            if others := sorted(str(key) for key in node.keys() - _KEYS):
                what = f"it was merged from tensor- or expert-parallel ranks ({some(others)})"
                raise UnsupportedCheckpoint.at(where, what, "leave it out; only ZeRO's parallelism can be composed")
            node = node.get("param")
        tensor = read_tensor(node, "param", where)
        numel = Param("", shape, "trainable").numel
        if tensor.numel != numel or tensor.shape not in (shape, (numel,)):
            what = f"it has shape {list(tensor.shape)} instead of {list(shape)}"
            raise damaged(where, what, Code.STATE_SIZE)
        return replace(tensor, shape=shape)

    def step(
        self,
        flat_id: int,
        shapes: _Shapes,
        stored: Mapping[str, _StoredParam],
        general_steps: Mapping[int, float | None],
    ) -> float:
        """Return the step of a sub-group; add to the problems if its params have different ones."""
        where = PathIn(self.name, f"{self.folder}{GLOBAL_STATE}")
        own = {param: stored[param].step for param in shapes}
        stated = {step for step in own.values() if step is not None}
        if len(stated) > 1 or (stated and None in own.values()):
            which = ", ".join(f"{step:g}" for step in sorted(stated))
            lacking = [param for param, step in own.items() if step is None]
            what = f"params of one group have the steps {which}" + (f", {some(lacking)} none" if lacking else "")
            place = PathIn(self.name, f"{self.folder}{next(iter(own))}")
            self.problems.add(damaged(place, f"{what}; a resume refuses that", Code.STEPS_DIFFER))
        general = general_steps.get(flat_id, next(iter(general_steps.values()), None))
        if stated and general is not None and general not in stated:
            what = f"the step of sub-group {flat_id} is {general:g}, but {STEP}.pt of its params says {min(stated):g}"
            self.problems.add(SourceError.at(where, what, COPY_CHECKPOINT, Code.STEPS_DIFFER))
        if not stated and general is None:
            what = f"neither {GLOBAL_STATE} nor {STEP}.pt of the params has the step of sub-group {flat_id}"
            self.problems.add(damaged(where, what, Code.STATE_MISSING))
        return min(stated) if stated else general or 0.0

    def placed(
        self, shapes_of: Sequence[_Shapes], stored: Mapping[str, _StoredParam]
    ) -> Iterator[tuple[Param, str, TensorEntry]]:
        """Yield the place of each state; for an unreadable one, only the element ranges are right."""
        kinds = dict.fromkeys(kind for one in stored.values() for kind in one.tensors)
        for param, shape in (item for shapes in shapes_of for item in shapes.items()):
            for kind in kinds:
                tensor = stored[param].tensors.get(kind)
                if tensor is None:
                    self.unreadable.add(path := self.path(param, kind))
                    tensor = Tensor("F32", shape, Extent(path, 0, 0))
                yield Param(param, shape, "trainable"), kind, tensor.entry


_PARAMS = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
_MAX_NAME_BYTES = 255


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Lay out a composite's files; see `Writer`."""
    _check_base(base)
    layouts, notices = lay_out_engine(base, wanted, _lay_out_states)
    return [one for one in layouts if one.path not in ENGINE_FILES], [*notices, *_losses(base, wanted.layout)]


def _check_base(base: CheckpointIndex) -> None:
    problems = []
    trained = [param for group in base.group_params for param in group]
    moments = _REQUIRED[1:]
    if lacking := [param for param in trained if any(State(param, kind) not in base.held for kind in moments)]:
        what = f"it has no {' or '.join(moments)} of {some(lacking)}, which a universal checkpoint needs"
        problems.append(Problem(base.name, what, "use a later checkpoint as base, or another format for its optimizer"))
    single = [param for one in base.sub_groups if one.scalars or one.step is None for param in one.params]
    if single and not lacking:
        what = f"its optimizer keeps scalars, or counts no steps, of {some(single)}: the format has no place for that"
        problems.append(Problem(base.name, what, "use another format for its optimizer"))
    no_name = re.compile(r"\.{0,2}|.*[/\0].*", re.DOTALL)
    if unfit := [one for one in trained if no_name.fullmatch(one) or len(one.encode()) > _MAX_NAME_BYTES]:
        what = f"a universal checkpoint has a folder for each param, but no folder can be called {some(unfit)}"
        problems.append(Problem(base.name, what, "stay with another format"))
    if problems:
        raise UnsupportedCheckpoint(problems)


def _lay_out_states(target: ZeroTarget, engine: EngineTrees) -> Iterator[FileLayout]:
    tag = f"{target.tag}{UNIVERSAL_SUFFIX}"
    if target.framework.finds(target.tag) and not target.framework.finds(tag):
        tag = target.tag
    yield FileLayout(LATEST_UNIVERSAL, (Bytes(tag.encode(), "the tag"),))
    models = RankFiles(target, engine).layouts(tag, (model_states,))
    yield next(models)
    other = {**model_states(target, engine, 0, 0), **dict.fromkeys(_PARAMS), "module": Ordered()}
    yield lay_out_torch_file(f"{tag}/{model_name(0, 3 if target.layout.stage < 3 else 1)}", other)
    yield from models
    rest = next(tree for tree in engine.optim if tree is not None)
    yield lay_out_torch_file(f"{tag}/{FOLDER}/{GLOBAL_STATE}", _global_state(target, rest))
    for number, one in enumerate(target.layout.sub_groups):
        for param in one.params:
            folder = f"{tag}/{FOLDER}/{param}"
            shape = target.base.params[param].shape
            for kind in (MASTER, *target.kinds_in(one)):
                state = State(param, kind)
                tensor = state_tensor(state, target.dtype(state), shape)
                yield lay_out_torch_file(f"{folder}/{NAME_OF.get(kind, kind)}.pt", {"cat_dim": 0, "param": tensor})
            for name, node in step_nodes(target, number).items():
                yield lay_out_torch_file(f"{folder}/{name}.pt", node)


def _global_state(target: ZeroTarget, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of ``optimizer_state.pt``; ``rest`` is the base's ``optim_states``, whose unknown keys are kept.

    ZeRO-3 gives the options of the first group there to all groups, so it lists only those that all groups share; the
    others come from the run's config.
    """
    outer, layout = rest["optimizer_state_dict"], target.layout
    groups = [{**group.hyper, "params": layout.of_group(at)} for at, group in enumerate(layout.groups)]
    unlike = {"params", *differing([group.hyper for group in layout.groups])}
    common = [{key: value for key, value in group.items() if key not in unlike} for group in groups]
    shared = [{**group, "params": own["params"]} for group, own in zip(common, groups, strict=True)]
    is_bf16 = target.base.zero.settings.fp32_gradients and layout.stage == 1  # BF16_Optimizer states no stage
    is_kept = bool(target.base.form.stage) and (target.base.form.stage == 3) == (layout.stage == 3)
    return {
        **unknown(outer, is_kept),
        **({} if is_bf16 else {"zero_stage": make_stage(layout.stage)}),
        **scaling_nodes(outer, is_needed=True),  # ZeRO-3 reads it
        **clipping_node(rest),
        "ds_version": rest.get("ds_version") or DS_VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {number: step_nodes(target, number) for number in range(len(layout.sub_groups))},
            "param_groups": shared,
        },
    }


def _losses(base: CheckpointIndex, layout: OptimizerLayout) -> Iterator[Problem]:
    """Yield notices on facts that the format can't express."""
    fix = "no action needed if the model of the run that resumes has them; else use --to deepspeed"
    if lost := [param.name for param in base.params.values() if param.role != "trainable"]:
        what = f"a resume loads neither frozen params nor buffers from a universal checkpoint: {some(lost)}"
        yield Problem(base.name, what, fix)
    if len({one.step for one in layout.sub_groups}) > 1:
        what = f"a resume with ZeRO-3 gives all params one step, {layout.sub_groups[0].step:g}"
        yield Problem(base.name, what, "resume with ZeRO-1 or ZeRO-2, which keep the step of each group")
    if unlike := differing([without_names(group.hyper) for group in layout.groups]):
        what = f"the param groups differ in {', '.join(unlike)}, which a resume with ZeRO-3 takes from its own config"
        yield Problem(base.name, what, "resume with the options of the run that saved it")
    if base.zero.settings.round_robin:
        what = "a resume with round_robin_gradients mixes up the params of a universal checkpoint (DeepSpeed 0.19.8)"
        yield Problem(base.name, what, "turn round_robin_gradients off in the run that resumes")
    count = len(layout.sub_groups)
    if count > 1 and base.train.step_is_tensor:
        what = (
            f"a resume with ZeRO-3 and torch's AdamW counts {count} steps in each, because DeepSpeed 0.19.8 gives one "
            f"counter to all {count} sub-groups; the bias correction is wrong until the step is high"
        )
        yield Problem(base.name, what, "resume with ZeRO-1 or ZeRO-2, or use --to deepspeed")
    kinds = {state.kind for state in base.held if state.param in base.steps()}
    if others := sorted(kinds - {MASTER, EXP_AVG, EXP_AVG_SQ, "weight"}):
        what = f"a resume with ZeRO-3 does not load {', '.join(others)}"
        yield Problem(base.name, what, "resume with ZeRO-1 or ZeRO-2")
