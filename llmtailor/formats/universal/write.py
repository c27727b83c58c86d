"""Layout of a DeepSpeed universal checkpoint, loadable in any ZeRO stage, on any number of ranks. `read` describes it.

The model states are those of the output's stage. A run in the other kind of stage opens a file of another name first,
so a copy without params has that name. What each stage then reads of ``zero/`` is in `read.read_global_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, TrainState
from llmtailor.checkpoint.layout import Bytes, FileLayout, Slot
from llmtailor.checkpoint.optimizer import NAME_KEYS, OptimizerLayout
from llmtailor.containers.pickle_nodes import Ordered, make_tensor
from llmtailor.containers.torch_zip import lay_out_torch_file
from llmtailor.errors import Problem, UnsupportedCheckpoint, some
from llmtailor.formats.deepspeed_common.files import UNIVERSAL, model_name
from llmtailor.formats.deepspeed_common.trees import (
    DS_VERSION,
    RankFiles,
    ZeroTarget,
    clipping_node,
    make_stage,
    model_states,
    scaling_nodes,
    step_node,
    unknown,
)
from llmtailor.formats.deepspeed_common.write import lay_out_engine
from llmtailor.formats.universal.read import FOLDER, GLOBAL_STATE, NAME_OF, STEP
from llmtailor.loaders.files import ENGINE_FILES, LATEST_UNIVERSAL
from llmtailor.loaders.write import Wanted
from llmtailor.model.states import EXP_AVG, EXP_AVG_SQ, MASTER, State

_PARAMS = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
_MAX_NAME_BYTES = 255


def check(dtype: str | None, allow_split: bool) -> None:
    """Accept any dtype and split: master weights are stored separately from the weights."""


def lay_out(base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
    """Return the layouts of a composite's files except the tokenizer's, and notices.

    Raises UnsupportedCheckpoint for a base without moments, or with names that can't be those of folders.
    """
    _check_base(base)
    layouts, notices = lay_out_engine(base, wanted, _lay_out_states)
    return [one for one in layouts if one.path not in ENGINE_FILES], [*notices, *_losses(base, wanted.layout)]


def _check_base(base: CheckpointIndex) -> None:
    problems = []
    if lacking := [param for param in base.steps() if State(param, EXP_AVG) not in base.held]:
        what = f"it has no moments of {some(lacking)}, which a universal checkpoint needs"
        problems.append(Problem(base.name, what, "use a later checkpoint as base"))
    if unfit := [param for param in base.steps() if not _is_folder_name(param)]:
        what = f"{some(unfit)} can't be the names of folders, as a universal checkpoint has them"
        problems.append(Problem(base.name, what, "stay with another format"))
    if problems:
        raise UnsupportedCheckpoint(problems)


def _is_folder_name(param: str) -> bool:
    return param not in ("", ".", "..") and not {*param} & {*"/\0"} and len(param.encode()) <= _MAX_NAME_BYTES


def _lay_out_states(target: ZeroTarget, train: TrainState) -> Iterator[FileLayout]:
    tag = f"{target.tag}{UNIVERSAL}"
    if target.client.finds(target.tag) and not target.client.finds(tag):
        tag = target.tag
    yield FileLayout(LATEST_UNIVERSAL, (Bytes(tag.encode(), "the tag"),))
    models = RankFiles(target, train).model(tag)
    yield next(models)
    other = {**model_states(target, train, 0, 0), **dict.fromkeys(_PARAMS), "module": Ordered()}
    yield lay_out_torch_file(f"{tag}/{model_name(0, 3 if target.layout.stage < 3 else 1)}", other)
    yield from models
    rest = next(tree for tree in train.optim if tree is not None)
    yield lay_out_torch_file(f"{tag}/{FOLDER}/{GLOBAL_STATE}", _global_state(target, rest))
    for number, one in enumerate(target.layout.sub_groups):
        for param in one.params:
            folder = f"{tag}/{FOLDER}/{param}"
            shape = target.base.params[param].shape
            for kind in (MASTER, *target.kinds):
                state, numel = State(param, kind), target.base.params[param].numel
                dtype = target.dtype(state)
                tensor = make_tensor(dtype, shape, (Slot(state, dtype, 0, numel),) if numel else ())
                yield lay_out_torch_file(f"{folder}/{NAME_OF.get(kind, kind)}.pt", {"cat_dim": 0, "param": tensor})
            yield lay_out_torch_file(f"{folder}/{STEP}.pt", step_node(target, number))


def _global_state(target: ZeroTarget, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of ``optimizer_state.pt``; ``rest`` is the base's ``optim_states``, whose unknown keys are kept.

    ZeRO-3 gives the options of the first group there to all groups. It gets those that are the same in all; of the
    others each group keeps its own, from the run's config.
    """
    outer, layout = rest["optimizer_state_dict"], target.layout
    groups = [{**group.hyper, "params": layout.of_group(at)} for at, group in enumerate(layout.groups)]
    unlike = {"params", *_unlike_options(layout)}
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
            "state": {number: {STEP: step_node(target, number)} for number in range(len(layout.sub_groups))},
            "param_groups": shared,
        },
    }


def _unlike_options(layout: OptimizerLayout) -> list[str]:
    """Return the hyperparameters that are not the same in all param groups."""
    first = layout.groups[0].hyper
    keys = dict.fromkeys(key for group in layout.groups for key in group.hyper)
    return [
        key for key in keys if any(key not in group.hyper or group.hyper[key] != first[key] for group in layout.groups)
    ]


def _losses(base: CheckpointIndex, layout: OptimizerLayout) -> Iterator[Problem]:
    """Yield notices on what the format can't say."""
    fix = "nothing, if the model of the run that resumes has them; else use --to deepspeed"
    if lost := [param.name for param in base.params.values() if param.role != "trainable"]:
        what = f"a resume loads neither frozen params nor buffers from a universal checkpoint: {some(lost)}"
        yield Problem(base.name, what, fix)
    if len({one.step for one in layout.sub_groups}) > 1:
        what = f"a resume with ZeRO-3 gives all params one step, {layout.sub_groups[0].step:g}"
        yield Problem(base.name, what, "resume with ZeRO-1 or ZeRO-2, which keep the step of each group")
    if unlike := [key for key in _unlike_options(layout) if key not in NAME_KEYS]:
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
