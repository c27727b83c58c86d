"""The state dict of a torch optimizer: what `load_state_dict` and the next `step` read, with DeepSpeed or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR
from llmtailor.formats.resumed.kinds import ANYTHING, BETAS, DICT, FLAG, LIST, POSITIVE, RATE
from llmtailor.formats.resumed.model import EACH, Field, Says, find, has

FAILS = Says(ERROR, "a resume fails")
FAILS_AT_STEP = Says(ERROR, "a resume fails at the first step")
_EVERY_RANK_BY_ITS_OWN = Says(ERROR, "silent: every rank trains by its own")
OTHER_RUN = Says(ERROR, "resumes; but the file is of another save or run than those of the other ranks")
_DIVERGES = Says(ERROR, "silent: the weights become NaN, or move uphill")
_STEP = "torch.optim.AdamW.step"
_BY_DEFAULT = "torch.optim.Adam.__setstate__"


def optimizer_fields(*at: str) -> tuple[Field, ...]:
    """Return the fields of a state dict that lies at a path."""

    def of_adam(tree: Any) -> bool:
        return is_adam(tree, *at)

    def of_amsgrad(tree: Any) -> bool:
        return any(value is True for _, value in find(tree, (*group, "amsgrad")))

    def of_cpu_adam(tree: Any) -> bool:
        return is_cpu_adam(tree, *at)

    group, state = (*at, "param_groups", EACH), (*at, "state", EACH)
    like_adam = {"only": "Adam and its kin", "applies": of_adam}
    hyper = {"missing": FAILS_AT_STEP, "mistyped": FAILS_AT_STEP, "beyond": _DIVERGES, "unlike": _EVERY_RANK_BY_ITS_OWN}
    flag = {"mistyped": FAILS_AT_STEP, "unlike": Says(ERROR, "silent, or it fails on that rank and the others wait")}
    lost = Says(ERROR, "a resume fails at the first step", code=Code.STATE_MISSING)
    return (
        Field((*at, "param_groups"), LIST, "torch.optim.Optimizer.load_state_dict", FAILS, FAILS),
        Field((*at, "state"), DICT, "torch.optim.Optimizer.load_state_dict", FAILS, FAILS),
        Field((*group, "params"), LIST, "torch.optim.Optimizer.load_state_dict", FAILS, FAILS),
        Field((*group, "lr"), RATE, _STEP, **hyper),  # type: ignore[arg-type]
        Field((*group, "betas"), BETAS, _STEP, **hyper, **like_adam),  # type: ignore[arg-type]
        Field((*group, "eps"), POSITIVE, _STEP, **hyper, **like_adam),  # type: ignore[arg-type]
        Field((*group, "weight_decay"), RATE, _STEP, **hyper, **like_adam),  # type: ignore[arg-type]
        Field(
            (*group, "bias_correction"),
            FLAG,
            "deepspeed.ops.adam.DeepSpeedCPUAdam.step",
            missing=FAILS_AT_STEP,
            unlike=_EVERY_RANK_BY_ITS_OWN,
            only="DeepSpeedCPUAdam",
            applies=of_cpu_adam,
        ),
        Field((*group, "initial_lr"), RATE, "nobody: the scheduler has base_lrs", unlike=OTHER_RUN),
        *(
            Field((*group, key), FLAG, _BY_DEFAULT, **flag, **like_adam)  # type: ignore[arg-type]
            for key in ("amsgrad", "maximize", "differentiable")
        ),
        *(
            Field((*group, key), FLAG, _BY_DEFAULT, unlike=OTHER_RUN, **like_adam)  # type: ignore[arg-type]
            for key in ("decoupled_weight_decay", "foreach", "capturable", "fused")
        ),
        *(
            Field((*state, key), ANYTHING, _STEP, missing=lost, **like_adam)  # type: ignore[arg-type]
            for key in ("exp_avg", "exp_avg_sq")
        ),
        Field((*state, "max_exp_avg_sq"), ANYTHING, _STEP, missing=lost, only="with amsgrad", applies=of_amsgrad),
    )


def is_adam(tree: Any, *at: str) -> bool:
    """Whether a state dict is of Adam or one of its kin, by its states or its hyperparameters."""
    keys = (*at, "state", EACH), (*at, "param_groups", EACH)
    return any(has(tree, *keys[0], kind) for kind in ("exp_avg", "exp_avg_sq")) or all(
        has(tree, *keys[1], name) for name in ("betas", "weight_decay")
    )


def is_cpu_adam(tree: Any, *at: str) -> bool:
    """Whether a state dict is of DeepSpeed's Adam for the CPU: it counts steps by int, and has not torch's flags."""
    if has(tree, *at, "param_groups", EACH, "maximize"):
        return False
    steps = [value for _, value in find(tree, (*at, "state", EACH, "step"))]
    return is_adam(tree, *at) and any(type(step) is int for step in steps)


def decays_vectors_alone(groups: Sequence[Mapping[str, Any]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> bool:
    """Whether weight decay is the wrong way round: on norms and biases alone, and not on matrices.

    ``shapes`` are those of each group's params.
    """
    decaying = [index for index, group in enumerate(groups) if group.get("weight_decay")]
    resting = [index for index, group in enumerate(groups) if group.get("weight_decay") == 0]
    on = [len(shape) for index in decaying for shape in shapes[index]]
    off = [len(shape) for index in resting for shape in shapes[index]]
    return bool(on and off) and max(on) < 2 <= max(off)
