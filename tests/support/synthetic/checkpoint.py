"""Writes the files of a checkpoint."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from synthetic.layout import DEFAULT_SUB_GROUP_SIZE, Layout, Shape, Values, affine_map, flat_bytes
from synthetic.torch_files import LossScaler, ZeroStageEnum, save_with_data

SHARD_BYTES = 5_000_000_000
"""Weights above this are spread over several safetensors files."""


def make_checkpoint(
    root: Path, shape: Shape, layout: Layout, step: int, *, sparse: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a checkpoint; one of several tensor-parallel ranks must be sparse."""
    assert layout.tp == 1 or sparse
    tag = f"global_step{step}"
    (root / tag).mkdir(parents=True)
    values = Values(step)
    for rank in range(layout.world_size):
        dp_rank, tp_rank = divmod(rank, layout.tp)
        own = layout.of_tp_rank(tp_rank)
        _write_optim_states(root / tag, own, dp_rank, values, sparse, tp_rank)
        _write_model_states(root / tag, shape, layout, dp_rank, step, tp_rank)
        rng = {
            "python": random.Random(rank).getstate(),
            "numpy": np.random.RandomState(rank).get_state(),
            "cpu": torch.Generator().manual_seed(rank).get_state(),
        }
        torch.save(rng, root / (f"rng_state_{rank}.pth" if layout.world_size > 1 else "rng_state.pth"))
    _write_weights(root, layout, values, sparse, shard_bytes)
    num_groups = len(layout.weight_decay)
    scheduler = {
        "base_lrs": [1e-4] * num_groups,
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [1e-4] * num_groups,
        "lr_lambdas": [None] * num_groups,
    }
    torch.save(scheduler, root / "scheduler.pt")
    torch.save({"placeholder": "the pickled TrainingArguments of a real run"}, root / "training_args.bin")
    (root / "latest").write_text(tag)
    _write_json(root / "config.json", shape.config())
    _write_json(root / "generation_config.json", {"_from_model_config": True, "transformers_version": "5.23.0"})
    _write_json(root / "trainer_state.json", _trainer_state(step))


def _write_optim_states(
    folder: Path, layout: Layout, rank: int, values: Values, sparse: bool, tp_rank: int = 0
) -> None:
    ds_ids = {name: number for number, name in enumerate(layout.shapes)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    masters, storages = [], []
    for number, flat in enumerate(layout.flat_ids):
        numel = layout.flat_numel(flat)
        # Never touched, so these take address space and no memory.
        state[number] = {
            "step": torch.tensor(float(values.step)),
            "exp_avg": torch.empty(numel),
            "exp_avg_sq": torch.empty(numel),
        }
        master = torch.empty(numel, requires_grad=True)
        master.ds_id = f"{ds_ids[flat.params[0]]}_{ds_ids[flat.params[-1]]}"
        masters.append(master)
        storages.append((4, [memoryview(np.float32(values.step).tobytes())]))
        storages += [(numel * 4, flat_bytes(layout, flat, kind, rank, values)) for kind in ("exp_avg", "exp_avg_sq")]
    storages += [
        (layout.flat_numel(flat) * 4, flat_bytes(layout, flat, "master", rank, values)) for flat in layout.flat_ids
    ]
    hyper = {
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
        "initial_lr": 1e-4,
    }
    groups = [
        {
            "weight_decay": decay,
            **hyper,
            "params": [number for number, flat in enumerate(layout.flat_ids) if flat.group == group],
        }
        for group, decay in enumerate(layout.weight_decay)
    ]
    tree = {
        "optimizer_state_dict": {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": layout.world_size,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": masters,
        },
        **_deepspeed_facts(layout),
    }
    path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_{tp_rank:02}_optim_states.pt"
    save_with_data(tree, path, storages, sparse)


def _write_model_states(folder: Path, shape: Shape, whole: Layout, rank: int, step: int, tp_rank: int) -> None:
    layout, tied = whole.of_tp_rank(tp_rank), {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}
    tree = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in [*layout.shapes, *tied]),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(layout.shapes[name])) for name in flat.params) for flat in layout.flat_ids
        ],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": tied if rank == tp_rank == 0 else {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": step * 2 * whole.world_size,
        "dp_world_size": layout.world_size,
        "mp_world_size": whole.tp,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": whole.tp},
        **_deepspeed_facts(layout),
    }
    if whole.tp > 1:
        info = {"affine_map": {"version": 1, "params": affine_map(whole)}, "autotp_unsupported_parameter_patterns": {}}
        tree["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.4, **info}
    torch.save(tree, folder / f"zero_pp_rank_{rank}_mp_rank_{tp_rank:02}_model_states.pt")


def _deepspeed_facts(layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    if layout.sub_group_size != DEFAULT_SUB_GROUP_SIZE:
        zero["sub_group_size"] = layout.sub_group_size
    config = {
        "train_batch_size": 2 * layout.world_size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": math.inf,
        "fp16": {"enabled": False},
    }
    return {"ds_config": config, "ds_version": "0.19.8"}


def _write_weights(root: Path, layout: Layout, values: Values, sparse: bool, shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in layout.shapes:
        num_bytes = 2 * layout.numel(name)
        if shards[-1] and num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= num_bytes
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(root / file, layout, sorted(names), values, sparse)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        numel = sum(map(layout.numel, layout.shapes))
        metadata = {"total_parameters": numel, "total_size": 2 * numel}
        _write_json(root / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})


def _write_safetensors(path: Path, layout: Layout, names: list[str], values: Values, sparse: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        end = at + 2 * layout.numel(name)
        header[name] = {"dtype": "BF16", "shape": list(layout.shapes[name]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=1 << 20) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if sparse:
            file.truncate(8 + len(text) + at)
            return
        for name in names:
            for chunk in values.stream(name, "weight", 0, layout.numel(name)):
                file.write(chunk)


def _trainer_state(step: int) -> dict[str, Any]:
    should = {f"should_{what}": what == "save" for what in ("epoch_stop", "evaluate", "log", "save", "training_stop")}
    return {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": step / 1000,
        "eval_steps": 500,
        "global_step": step,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [{"epoch": step / 1000, "learning_rate": 1e-4, "loss": 2.0, "step": step}],
        "logging_steps": 1,
        "max_steps": 1000,
        "num_input_tokens_seen": 0,
        "num_train_epochs": 1,
        "save_steps": 10,
        "stateful_callbacks": {"TrainerControl": {"args": should, "attributes": {}}},
        "total_flos": 0.0,
        "train_batch_size": 2,
        "trial_name": None,
        "trial_params": None,
    }


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
