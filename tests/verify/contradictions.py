"""A damage for every row of `llmtailor.formats.zero.contradictions.CONTRADICTIONS`, by its title."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import edit
from verify.damages import inner, masters, on_models, on_ranks, optim, outer

Tree = Any
Damage = Callable[[Path, Path], None]


def on_scalers(change: Callable[[Tree], object]) -> Damage:
    """Edit the optim_states of all ranks, with DeepSpeed's own classes: the stand-ins lack one."""

    def apply(checkpoint: Path, _: Path) -> None:
        for rank in (0, 1):
            path = optim(checkpoint, rank)
            tree = torch.load(path, weights_only=False)
            change(tree)
            torch.save(tree, path)

    return apply


def groups(tree: Tree) -> list[dict[str, Any]]:
    return list(inner(tree)["param_groups"])


def states(tree: Tree) -> list[dict[str, Any]]:
    return list(inner(tree)["state"].values())


def one_step_more(tree: Tree) -> None:
    states(tree)[0]["step"] += 1


def round_masters(tree: Tree) -> None:
    masters(tree)[:] = [master.detach().bfloat16() for master in masters(tree)]


def moments_as_ints(tree: Tree) -> None:
    for state in states(tree):
        state["exp_avg"] = state["exp_avg"].int()


def fragments_as_fp16(tree: Tree) -> None:
    for name, fragment in tree["frozen_param_fragments"].items():
        tree["frozen_param_fragments"][name] = fragment.half()


def call_it_fp32(checkpoint: Path, _: Path) -> None:
    """Have the checkpoint say that the run was in fp32, so that what is bf16 has been rounded."""
    for rank in (0, 1):
        path = optim(checkpoint, rank)
        edit(path, lambda tree: tree["ds_config"].update(bf16={"enabled": False}))
        path.rename(path.with_name(path.name.removeprefix("bf16_")))


def module_as_ints(tree: Tree) -> None:
    for name, tensor in tree["module"].items():
        tree["module"][name] = tensor.int()


def module_as_fp16(tree: Tree) -> None:
    for name, tensor in tree["module"].items():
        tree["module"][name] = tensor.half()


def keep_maxima(tree: Tree) -> None:
    for state in states(tree):
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()


def stop_adapting(tree: Tree) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    outer(tree)["loss_scaler"] = LossScaler(outer(tree)["loss_scaler"].cur_scale)


def scale_for_nothing(tree: Tree) -> None:
    outer(tree)["loss_scaler"].cur_scale = 1024.0


def scaler_of_step_0(tree: Tree) -> None:
    outer(tree)["loss_scaler"].cur_iter = 0


def decay_the_norms(tree: Tree) -> None:
    decaying, resting = groups(tree)
    decaying["weight_decay"], resting["weight_decay"] = 0.0, decaying["weight_decay"]


DAMAGES: dict[str, list[tuple[tuple[str, ...], Damage]]] = {
    "Adam's steps of flat ids that differ, in no composite": [(("llama", "zero2"), on_ranks(one_step_more))],
    "masters in another dtype than fp32": [(("llama", "zero2", "zero1-bf16opt"), on_ranks(round_masters))],
    "moments, or the module of ZeRO-1/2, that are not floating-point numbers": [
        (("llama", "zero2"), on_ranks(moments_as_ints)),
        (("zero2",), on_models(module_as_ints)),
    ],
    "frozen params in fewer bits than the run has": [(("llama-frozen", "zero2-frozen"), call_it_fp32)],
    "frozen params in another format, or the module of ZeRO-1/2 in another dtype": [
        (("llama-frozen", "zero2-frozen"), on_models(fragments_as_fp16)),
        (("zero2",), on_models(module_as_fp16)),
    ],
    "max_exp_avg_sq with amsgrad off": [(("llama", "zero2"), on_ranks(keep_maxima))],
    "weight decay on norms and biases alone": [(("llama", "zero2"), on_ranks(decay_the_norms))],
    "maximize in some param groups only": [
        (("llama", "zero2"), on_ranks(lambda tree: groups(tree)[1].update(maximize=True)))
    ],
    "maximize in all param groups": [
        (("llama", "zero2"), on_ranks(lambda tree: [group.update(maximize=True) for group in groups(tree)]))
    ],
    "param groups with different betas, eps, amsgrad or bias_correction": [
        (("llama", "zero2"), on_ranks(lambda tree: groups(tree)[0].update(eps=1e-3))),
        (("llama",), on_ranks(lambda tree: groups(tree)[1].update(betas=(0.5, 0.999)))),
    ],
    "a static loss scaler in a run with a dynamic one": [(("llama-fp16", "zero2-fp16"), on_scalers(stop_adapting))],
    "a loss scale other than 1 without fp16": [(("llama", "zero2"), on_ranks(scale_for_nothing))],
    "a loss scaler of another step": [(("llama-fp16", "zero2-fp16"), on_scalers(scaler_of_step_0))],
    "clip_grad other than gradient_clipping of ds_config, ZeRO-1/2": [
        (("zero2", "zero1-bf16opt"), on_ranks(lambda tree: outer(tree).update(clip_grad=0.25)))
    ],
}
