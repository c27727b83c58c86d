"""From DeepSpeed's shards to a `CheckpointIndex`, for any ZeRO stage, in files or in a partial checkpoint.

Also the checks that ZeRO's and universal checkpoints share: whether the shards and the Trainer's files around them
come from one save, and whether a stock resume accepts them. What a resume does was checked against deepspeed 0.19.8
and transformers 5.23, by damaging checkpoints.

What ZeRO's and universal checkpoints have in common: the engine's state, and the files beside its own.

Everything that is not a state (hyperparameters, loss scaler, counters, ds_config, DeepSpeed's classes by name) is
copied from the base. If the base was trained without DeepSpeed, it is what DeepSpeed 0.19.8 would have written; what a
resume takes from its own config is left out rather than invented: ``clip_grad``, ``global_samples`` and, but for
ZeRO-3, the loss scaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    FSDP,
    LIGHTNING,
    CheckpointIndex,
    Form,
    TrainState,
    ZeroFacts,
)
from llmtailor.checkpoint.layout import FileLayout
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup, ZeroSettings, round_robin
from llmtailor.checkpoint.step_names import step_of_tag
from llmtailor.codes import Code
from llmtailor.containers.json import Trees
from llmtailor.errors import PathIn, Problem, Problems, SourceError, UnsupportedCheckpoint, attempt, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.common.lightning import check_engine, is_from_lightning, regrouped
from llmtailor.formats.deepspeed_common.files import ShardFiles, write_latest
from llmtailor.formats.deepspeed_common.shards import section
from llmtailor.formats.deepspeed_common.states import Ranks, Shards, find_contradictions, read_ranks, uses_round_robin
from llmtailor.formats.deepspeed_common.write import ZeroTarget, new_engine
from llmtailor.formats.format import Draft
from llmtailor.formats.provenance import read_manifest
from llmtailor.formats.weights import lay_out_missing_weights
from llmtailor.loaders.files import ADAPTER_CONFIG, LATEST, LATEST_UNIVERSAL, MANIFEST, SCALER, TRAINER_STATE
from llmtailor.loaders.loader import LOADERS
from llmtailor.loaders.read import TrainerFiles, file_fact, read_trainer_files
from llmtailor.loaders.scheduler import SchedulerFacts, compare_scheduler, regroup_scheduler
from llmtailor.loaders.write import Wanted, lay_out_trainer_files, params_on_disk, scheduler_for, synthesize_files
from llmtailor.model.roles import MASTER, WEIGHT, State

_MIXED = "copy the whole tag folder again; its files come from different saves"


def read_shards(
    trees: Trees, files: ShardFiles | None, name: str, problems: Problems, client: str | None = None
) -> Draft:
    """Read shards, wherever they are; ``files`` is None if nothing is known of them."""
    root = trees.root
    trainer = read_trainer_files(trees, name, problems, client, is_engines=True)
    if files is None:
        return Draft(problems)
    # before reading, so that no later change goes unnoticed; others are missing, or inside a rank shard
    facts = {path: fact for path in (*files.optim, *files.model) if (fact := file_fact(root / path))}
    ranks = read_ranks(trees, files, name, problems)
    if ranks is None:
        return Draft(problems)
    if client is None and trainer.client.name == DEEPSPEED and is_from_lightning(ranks.some_model.rest):
        trainer = replace(trainer, client=LOADERS[LIGHTNING])
    config, optim, model = ranks.some_optim.ds_config, ranks.some_optim, ranks.some_model
    dealt = model.world_size if uses_round_robin(config, optim.stage, optim.variant) else 1
    cut = (optim.groups, model.param_shapes, optim.steps, optim.gaps)
    groups, sub_groups = order_groups(*cut, dealt_to=dealt)
    index = CheckpointIndex(
        root=root,
        name=name,
        form=Form(DEEPSPEED, optim.stage, optim.variant),
        world_size=model.world_size,
        global_step=model.global_steps,
        precision="BF16" if files.is_bf16 else "F16" if section(config, "fp16").get("enabled") is True else "F32",
        params=ranks.params,
        tied={tied: stored for tied, stored in model.tied.items() if stored in ranks.params},
        held=ranks.held,
        groups=groups,
        sub_groups=sub_groups,
        files=facts,
        zero=ZeroFacts(
            files.tag,
            model.skipped_steps,
            read_settings(config, files.is_bf16, optim.variant),
            ranks.hold_module(),
        ),
        unreadable=ranks.unreadable,
        train=TrainState(
            optim.step_is_tensor,
            tuple(model.rest["module"]),
            optim=tuple(None if shard is None else shard.rest for shard in ranks.optim),
            model=tuple(None if shard is None else shard.rest for shard in ranks.model),
        ),
        findings=(*ranks.findings, *_of_ranks(ranks, PathIn(name, files.tag))),
    )

    def check(index: CheckpointIndex) -> Iterator[Finding]:
        yield from check_folder(index, files, trainer, config)
        if trainer.client.name == LIGHTNING:
            yield from check_engine(model.rest, PathIn(name, files.model[0]))
        yield from check_save(index, files, trainer, config, optim.facts, model.scheduler, problems)

    return Draft(problems, index, trainer, check)


def check_save(
    index: CheckpointIndex,
    files: ShardFiles,
    trainer: TrainerFiles,
    config: Mapping[str, Any],
    facts: Mapping[str, object],
    scheduler: SchedulerFacts | None,
    problems: Problems,
) -> Iterator[Finding]:
    """Yield findings on files that are not of one save; Adam's steps of another save are added to the problems.

    ``facts`` are those on the optimizer's file, ``scheduler`` is DeepSpeed's own.
    """
    attempt(lambda: check_steps(index, trainer.step_lags), problems)
    shards = Shards(index, files, config, facts, (index.root / MANIFEST).is_file(), trainer.step_lags)
    yield from find_contradictions(shards, index.name)
    yield from find_strays(index.root, files, index.name)
    yield from check_schedulers(index, trainer, PathIn(index.name, files.model[0]), scheduler, "scheduler" in config)
    if trainer.global_step not in (None, index.global_step):
        what = f"global_step is {trainer.global_step}, but DeepSpeed's is {index.global_step}"
        fix = "data order and step count would follow the former; copy the file of this save"
        yield Finding(PathIn(index.name, TRAINER_STATE), what, fix, Code.STEPS_DIFFER, ERROR)


def order_groups(
    owned_by: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    steps: Sequence[float],
    gaps: Sequence[tuple[int, ...]] = (),
    *,
    dealt_to: int,
) -> tuple[tuple[ParamGroup, ...], tuple[SubGroup, ...]]:
    """Return the param groups, in the optimizer's order, and the sub-groups.

    ``owned_by`` has the sub-groups of each param group and its hyperparameters; ``shapes`` and ``steps`` are those of
    each sub-group, ``gaps`` the elements of alignment after each of its params. ``dealt_to`` is the number of ranks
    that ``round_robin_gradients`` has dealt out the params of a group to, which is undone.
    """
    group_of = {flat_id: group for group, (owned, _) in enumerate(owned_by) for flat_id in owned}
    gaps = gaps if any(any(row) for row in gaps) else ((),) * len(shapes)
    cut = tuple(
        SubGroup(group_of[flat_id], tuple(params), step, gap)
        for flat_id, (params, step, gap) in enumerate(zip(shapes, steps, gaps, strict=True))
    )
    dealt = (zip(round_robin(len(one.params), dealt_to), one.params, strict=True) for one in cut)
    orders = [tuple(name for _, name in sorted(numbered)) for numbered in dealt]
    groups = (
        ParamGroup(tuple(name for flat_id in owned for name in orders[flat_id]), hyper) for owned, hyper in owned_by
    )
    return tuple(groups), cut


def read_settings(config: Mapping[str, Any], is_bf16: bool, variant: str) -> ZeroSettings:
    """Return the settings that decide the layout, from the ``ds_config`` in a checkpoint."""
    zero = section(config, "zero_optimization")
    gradients = section(config, "data_types").get("grad_accum_dtype")
    offloaded = section(zero, "offload_optimizer").get("device") == "cpu"
    size = zero.get("sub_group_size")
    known = type(size) is int or (isinstance(size, float) and math.isfinite(size))  # JSON may have 1e9
    fp32_gradients = variant == "bf16_optimizer" or (is_bf16 and not offloaded and gradients in ("fp32", "float32"))
    return ZeroSettings(
        sub_group_size=int(size) if known else ZeroSettings().sub_group_size,  # type: ignore[arg-type]
        round_robin=zero.get("round_robin_gradients") is True,
        parameter_alignment=bool(zero.get("parameter_alignment")),
        fp32_gradients=fp32_gradients,
    )


def check_steps(index: CheckpointIndex, lags: frozenset[int]) -> None:
    """Raise SourceError unless model states and optimizer states come from the same save.

    Nothing in the files says so directly: DeepSpeed's own tag counts global steps, and so do the model states, and Adam
    has made a step for each that was not skipped. A composite may mix steps, or reset them; its manifest says which.
    After it, Adam may be ``lags`` steps behind the run.
    """
    place, tag_step = PathIn(index.name, index.zero.tag), step_of_tag(index.zero.tag)
    if tag_step not in (None, index.global_step):
        what = f"the model states are from step {index.global_step}, but the tag folder says {tag_step}"
        raise SourceError.at(place, what, _MIXED, Code.STEPS_DIFFER)
    steps = {one.step for one in index.sub_groups}
    expected = index.global_step - index.zero.skipped_steps  # fp16: no step when the gradients overflow
    if not steps or any(expected - lag in steps for lag in lags):
        return
    made = read_manifest(index.root, index.name)
    if made is not None and (0 not in steps or 0 in made.steps.values()):
        return
    of_optimizer = f"the optimizer states from step {max(steps):g}"
    what = f"the model states are from step {expected} (without skipped ones), {of_optimizer}"
    raise SourceError.at(place, what, _MIXED, Code.STEPS_DIFFER)


def _of_ranks(ranks: Ranks, where: str) -> Iterator[Finding]:
    sample, world_size = ranks.some_optim, ranks.some_model.world_size
    if set(sample.partition_counts) - {world_size}:
        counts = ", ".join(map(str, sorted(set(sample.partition_counts))))
        what = f"partition_count is {counts}, but the model states say {world_size} ranks saved them"
        fix = "a resume does not read it, but DeepSpeed's tools do; copy the optim_states again"
        yield Finding(where, what, fix, Code.PARTITION_COUNT, WARNING)
    if sample.variant == "elastic" and not sample.has_group_step:
        what = "elastic checkpoints of an optimizer that keeps its step per param can't be resumed by stock DeepSpeed"
        fix = "train without elastic_checkpoint; recipes can still use this checkpoint's states"
        yield Finding(where, what, fix, Code.ELASTIC, ERROR)


def find_strays(root: Path, files: ShardFiles, name: str) -> Iterator[Finding]:
    """Yield findings on stray files: DeepSpeed opens and counts all that match a pattern."""
    known = frozenset(files.model)
    for path in sorted((root / files.folder).glob("*mp_rank_*_model_states.pt")):
        kind = path.name.partition("mp_rank_")[0]
        if f"{files.folder}{path.name}" not in known and (bool(kind) == files.is_zero3):
            what = "DeepSpeed mistakes this file for another model-parallel rank's, and refuses to resume"
            fix = "move it out of the tag folder"
            yield Finding(PathIn(name, f"{files.folder}{path.name}"), what, fix, Code.FILE_NAME, ERROR)


def check_folder(
    index: CheckpointIndex, files: ShardFiles, trainer: TrainerFiles, config: Mapping[str, Any]
) -> Iterator[Finding]:
    place, client = PathIn(index.name, files.tag), trainer.client
    is_there = (index.root / files.tag).is_dir()
    if is_there and not any(client.finds(path.name) for path in index.root.iterdir()):
        begins = "whose name begins with" if client.tag.endswith("*") else "with the name"
        what = f"the tag folder is {files.tag}, but {client.title} looks for one {begins} {client.tag.rstrip('*')}"
        fix = f"rename it to {client.default_tag.format(index.global_step)}, and write that into latest"
        yield Finding(place, what, fix, Code.FILE_NAME, ERROR)
    if (
        is_there
        and not {LATEST, LATEST_UNIVERSAL} & trainer.files.keys()
        and client.name == ACCELERATE
        and files.tag == client.tag
    ):
        what = f"the file is missing; {client.title} does not need it, but DeepSpeed's tools do"
        fix = f"write the tag into it: {write_latest(index.root / LATEST, files.tag)}"
        yield Finding(PathIn(index.name, LATEST), what, fix, Code.FILE_NAME, WARNING)
    if SCALER in trainer.files:
        what, fix = (
            "DeepSpeed keeps the loss scale itself",
            "a resume fails if it finds this file; move it out of the folder",
        )
        yield Finding(PathIn(index.name, SCALER), what, fix, Code.FIELD_UNKNOWN, ERROR)
    enabled = section(config, "bf16").get("enabled")
    if isinstance(enabled, bool) and enabled != files.is_bf16:
        named, run = ("have", "off") if files.is_bf16 else ("lack", "on")
        what = f"the optimizer shards {named} the prefix bf16_, but the run that saved them had bf16 {run}"
        fix = "DeepSpeed looks for only one of these names; rename the files as they were saved"
        yield Finding(place, what, fix, Code.PRECISION, ERROR)


def check_schedulers(
    index: CheckpointIndex, trainer: TrainerFiles, inside: PathIn, engines: SchedulerFacts | None, is_set: bool
) -> Iterator[Finding]:
    """Yield findings on DeepSpeed's own scheduler in the model states, and if the client's file is missing."""
    client = trainer.client
    if engines is not None:
        groups = [group.hyper for group in index.groups]
        yield from compare_scheduler(engines, inside, groups, index.global_step - index.zero.skipped_steps)
    elif is_set:
        what = "the run had a DeepSpeed scheduler, but the model states hold none"
        yield Finding(inside, what, "a resume fails; copy them again", Code.SCHEDULER_MISSING, ERROR)
    elif client.needs_scheduler and client.scheduler not in {*trainer.files, *trainer.inside}:
        fix = "a resume with a Trainer scheduler will fail; copy the file back"
        where = PathIn(index.name, client.scheduler)
        yield Finding(where, "there is no scheduler state", fix, Code.SCHEDULER_MISSING, ERROR)


def lay_out_engine(
    base: CheckpointIndex, wanted: Wanted, lay_out_states: Callable[[ZeroTarget, TrainState], Iterable[FileLayout]]
) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a checkpoint of DeepSpeed, whose own files ``lay_out_states`` lays out; see `lay_out`."""
    if base.form.has_masters:
        precision, dtype, leave_out = base.precision, wanted.dtype, frozenset[str]()
    else:
        precision = dtype = wanted.dtype or base.precision
        leave_out = frozenset((SCALER, LATEST))
        _check_plain_base(base, precision)
    target, train = ZeroTarget.of(base, wanted.layout, precision, wanted.client), base.train
    if not train.optim:
        train = new_engine(base, target.layout.stage, precision)
    if wanted.from_group is not None:
        where, old = f"{base.name}: lr_scheduler of the model states", len(base.groups)
        adapted = {
            id(tree): _with_scheduler(tree, where, old, wanted.from_group) for tree in train.model if tree is not None
        }
        train = replace(train, model=tuple(adapted.get(id(tree)) for tree in train.model))
    notices: list[Problem] = []
    without = {id(tree): tree for tree in train.model if tree is not None and not tree.get("lr_scheduler")}
    if wanted.client != base.client and without:  # an engine that has a scheduler can't load None; others don't look
        scheduler, about = scheduler_for(base, wanted)
        notices += about if wanted.client == DEEPSPEED else []
        given = {key: {**tree, "lr_scheduler": scheduler} for key, tree in without.items()}
        train = replace(train, model=tuple(given.get(id(tree), tree) for tree in train.model))
    states = [*lay_out_states(target, train)]
    weights: list[FileLayout] = []
    if target.client.saves_model or base.form.is_partial:
        weights, missing = lay_out_missing_weights(base, wanted.layout.stage, dtype, wanted.is_alone)
        notices += missing
    made, about = synthesize_files(base, wanted)
    notices += [*about, *_rounded_twice(base, wanted.dtype)]
    if base.form.family in (FSDP, DCP) and wanted.dtype is None:
        what = f"the run that resumes has to train in {precision}, the dtype of the params"
        notices.append(Problem(base.name, what, "for a run in bf16, use --dtype bfloat16, or dtype in the recipe"))
    return lay_out_trainer_files(base, wanted, [*states, *weights, *made], dtype, leave_out), notices


def _with_scheduler(tree: Mapping[str, Any], where: str, old: int, from_group: Sequence[int]) -> dict[str, Any]:
    found = {"lr_scheduler": regroup_scheduler(tree.get("lr_scheduler"), where, old, from_group)}
    return {**tree, **found, **regrouped(tree, where, old, from_group)}


def _check_plain_base(base: CheckpointIndex, precision: str) -> None:
    if precision == "F16":
        what = "an fp16 run of DeepSpeed needs the state of its loss scaler, which a checkpoint without DeepSpeed lacks"
        raise UnsupportedCheckpoint.at(base.name, what, "resume in bf16")
    if ADAPTER_CONFIG in base.files:
        what = "it is a PEFT adapter, and does not state the precision in which the model below it was trained"
        raise UnsupportedCheckpoint.at(base.name, what, "stay without DeepSpeed")
    unnamed = [param for group in base.groups for param in group.params if State(param, MASTER) not in base.held]
    if unnamed:
        what = f"the weight files have other names for {some(unnamed)} than the model, so they have no master weights"
        fix = "stay without DeepSpeed; or train on with a run that saves the params' own names"
        raise UnsupportedCheckpoint.at(base.name, what, fix)


def _rounded_twice(base: CheckpointIndex, dtype: str | None) -> list[Problem]:
    """Return notices on weights that can't be rounded from their master weights, as it is not known which these are."""
    if not dtype or not base.form.has_masters:
        return []
    weights = {state.param: held for state, held in base.held.items() if state.kind == WEIGHT and held.dtype != dtype}
    known = params_on_disk(base)
    unknown = [name for name in weights if name not in known]
    if not unknown:
        return []
    what = f"{some(unknown)} are rounded a second time, from the weights: their master weights are not known"
    fix = "nothing, to resume; to export the model, call trainer.save_model() after the resume"
    return [Problem("dtype", what, fix)]
