"""From a plain base to DeepSpeed shards: what a ZeRO run would have written, where there is no tree to carry over.

Counters, ds_config and loss scaler are made up as DeepSpeed 0.19.8 makes them. What a resume takes from its own config
is left out rather than invented: ``clip_grad`` and ``global_samples``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex, Held
from llmtailor.checkpoint.layout import FileLayout, Literal
from llmtailor.checkpoint.optimizer import Target
from llmtailor.containers.pickle_nodes import Call, Global, Ordered, make_tensor
from llmtailor.containers.torch_zip import lay_out_torch_file
from llmtailor.errors import UnsupportedCheckpoint, some
from llmtailor.formats.trainer import ADAPTER_CONFIG
from llmtailor.formats.zero import write3 as target3
from llmtailor.formats.zero import write12 as target12
from llmtailor.formats.zero.base_trees import Carried
from llmtailor.formats.zero.files import LATEST, WHOLE_MODEL
from llmtailor.model.states import BUFFER, FROZEN, MASTER, WEIGHT, State

DS_VERSION = "0.19.8"
_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_NOT_MOMENTS = {WEIGHT, MASTER, FROZEN, BUFFER}


def lay_out_shards_from_plain(
    base: CheckpointIndex, target: Target, steps: Sequence[float], precision: str
) -> Iterator[FileLayout]:
    """Yield the layouts of all shard files, and of ``latest``, of a composite whose base is a plain checkpoint.

    ``precision`` is that of the run which shall resume: BF16, or F32. Masters and moments are fp32 in either.
    """
    _check(base, precision)
    view = zero_view(base, precision)
    tag = f"global_step{base.global_step}"
    carried = _carried(view, target, precision)
    yield FileLayout(LATEST, (Literal(tag.encode(), "the tag"),))
    optim_tree = target3.optim_tree if target.stage == 3 else target12.optim_tree
    prefix = "bf16_" if precision == "BF16" else ""
    for rank in range(target.world_size):
        tree = optim_tree(view, target, rank, steps, carried)
        tree["optimizer_state_dict"].pop("clip_grad", None)
        yield lay_out_torch_file(f"{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", tree)
    for rank in range(target.world_size if target.stage == 3 else 1):
        tree = _model_tree(view, target, precision)
        if target.stage == 3:
            name, tree = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", target3.model_tree(tree, view, target, rank)
        else:
            name, tree = WHOLE_MODEL, target12.model_tree(tree, view, target)
        yield lay_out_torch_file(f"{tag}/{name}", tree)


def _check(base: CheckpointIndex, precision: str) -> None:
    if precision == "F16":
        what = "an fp16 run of DeepSpeed needs the state of its loss scaler, which a checkpoint without DeepSpeed lacks"
        raise UnsupportedCheckpoint.at(base.name, what, "resume in bf16")
    if ADAPTER_CONFIG in base.files:
        what = "it is an adapter of PEFT, and does not tell in which precision the model below it was trained"
        raise UnsupportedCheckpoint.at(base.name, what, "stay without DeepSpeed")
    unnamed = [param for group in base.group_params for param in group if State(param, MASTER) not in base.held]
    if unnamed:
        what = (
            f"the weights' files have other names for {some(unnamed)} than the model, so there are no masters of them"
        )
        fix = "stay without DeepSpeed; or train on with a run that saves the params' own names"
        raise UnsupportedCheckpoint.at(base.name, what, fix)


def zero_view(base: CheckpointIndex, precision: str) -> CheckpointIndex:
    """Return an index as a ZeRO run of that precision would have it: fp32 states, and frozen params in the model's.

    For layouts only: the dtypes are those of the slots, no longer those on disk.
    """

    def dtype(state: State, held: Held) -> str:
        if state.kind in (WEIGHT, BUFFER):
            return held.dtype
        return precision if state.kind == FROZEN else "F32"

    held = {state: replace(one, dtype=dtype(state, one)) for state, one in base.held.items()}
    return replace(base, held=held, precision=precision, variant="plain")


def _carried(view: CheckpointIndex, target: Target, precision: str) -> Carried:
    trained = view.flat_ids[0].params[0]
    kinds = tuple(state.kind for state in view.held if state.param == trained and state.kind not in _NOT_MOMENTS)
    return Carried(
        stage=target.stage,
        around={"ds_config": _config(target, precision), "ds_version": DS_VERSION},
        more={},
        loss_scaler=Call(_SCALER, (), new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True),
        dynamic_loss_scale=False,
        overflow=False,
        clip_grad=0.0,
        kinds=kinds,
        has_state=True,
        step_is_tensor=True,
    )


def _config(target: Target, precision: str) -> dict[str, Any]:
    return {
        "bf16": {"enabled": precision == "BF16"},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": target.stage},
    }


def _model_tree(view: CheckpointIndex, target: Target, precision: str) -> dict[str, Any]:
    """Return ``model_states`` before params are bound to states."""
    names = [*view.params, *view.tied]
    return {
        "module": Ordered((name, make_tensor(precision, (0,), ())) for name in names),
        "buffer_names": [param.name for param in view.params.values() if param.role == "buffer"],
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": view.skipped_steps,
        "global_steps": view.global_step,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(target, precision),
        "ds_version": DS_VERSION,
    }
