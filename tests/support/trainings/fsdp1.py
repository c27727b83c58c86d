"""A loop with FSDP1, `FullyShardedDataParallel`, that saves and loads by accelerate's own functions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from trainings.common import MOMENTS


def shard(model: Any) -> Any:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def held(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what the training holds, as `train.held` does for FSDP2.

    A rank's piece of a param is a run of its elements. (``FSDP.optim_state_dict`` can gather the states as well, but
    gave other values here than the optimizer holds: torch 2.13, on CPU ranks.)
    """
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    own = {
        name.replace("_fsdp_wrapped_module.", ""): optimizer.state[param]
        for name, param in model.named_parameters()
        if param in optimizer.state
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    states: dict[str, Any] = {}
    for name, weight in weights.items():
        found = [each[name] for each in ranks if name in each]
        if found:
            whole = {kind: torch.cat([each[kind].flatten() for each in found]) for kind in MOMENTS}
            shaped = {kind: tensor.reshape(weight.shape) for kind, tensor in whole.items()}
            states[name] = {"step": found[0]["step"].clone(), **shaped}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"weights": weights, "states": states, "buffers": {}, "groups": groups}


@functools.cache
def tools() -> tuple[Any, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="SHARDED_STATE_DICT", use_orig_params=True)
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    return plugin, Accelerator(cpu=True)


def save(model: Any, optimizer: Any, out: Path) -> None:
    save_fsdp_model(*tools(), model, str(out))
    save_fsdp_optimizer(*tools(), optimizer, model, str(out))


def load(model: Any, optimizer: Any, source: Path) -> None:
    """Load with accelerate's functions, after a step that changes nothing.

    accelerate 1.15 asks an optimizer of FSDP1 for the keys to load. A fresh one has no states, so none would be loaded,
    without a word.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    load_fsdp_model(*tools(), model, str(source))
    load_fsdp_optimizer(*tools(), optimizer, model, str(source))
