"""A rank of ``--resume-smoke``, started by torchrun: resumes with stock classes and reports the resulting state.

``python -m llmtailor.verify.smoke_worker TASK.json FOLDER`` writes ``FOLDER/rank-R.json``. Nothing of this package is
used to read the checkpoint, so its reader is tested as well. The only module here that imports torch.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import transformers

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Refusal(Exception):
    """A trial resume is impossible with this transformers and config.json, which says nothing about the checkpoint."""


def build_model(task: dict[str, Any]) -> Any:
    """Build the model from config.json with the class it names; no code from the checkpoint is run."""
    config = transformers.AutoConfig.from_pretrained(task["root"], trust_remote_code=False, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    kinds: list[Any] = [getattr(transformers, name, None) for name in names]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
    if not kinds:
        raise Refusal(f"transformers {transformers.__version__} has no model class {', '.join(names) or '?'}")
    model = kinds[0](config)
    for name, param in model.named_parameters():
        param.requires_grad = name not in task["frozen"]
    return model


def build_optimizer(model: Any, task: dict[str, Any]) -> torch.optim.Optimizer:
    """Build AdamW with the param groups of the checkpoint."""
    params = dict(model.named_parameters())
    listed = [name for group in task["groups"] for name in group["params"]]
    trained = {name for name, param in params.items() if param.requires_grad}
    if trained != set(listed):
        other = sorted(trained ^ set(listed))
        what = "the model built from config.json has different params than the checkpoint"
        raise Refusal(f"{what}: {', '.join(other[:3])}{' ...' if len(other) > 3 else ''}")
    return torch.optim.AdamW(
        [{"params": [params[name] for name in group["params"]], **group["hyper"]} for group in task["groups"]]
    )


def fragment(param: str, kind: str, begin: int, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "param": param,
        "kind": kind,
        "begin": begin,
        "end": begin + tensor.numel(),
        "dtype": str(tensor.dtype),
        "crc": zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()),
    }


def flat_tensors(zero: Any) -> list[torch.Tensor]:
    """Return this rank's masters, one tensor per sub-group; ZeRO-3, ZeRO-1/2 and BF16_Optimizer differ in the name."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(list(flats) for name in names if (flats := getattr(zero, name, None)))


def flat_states(zero: Any, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the masters and the optimizer's elementwise states of one sub-group."""
    states = {kind: value for kind, value in zero.optimizer.state.get(flat, {}).items() if kind != "step"}
    return {"master": flat, **{kind: value for kind, value in states.items() if value.numel() >= flat.numel()}}


def own_part(param: Any, rank: int) -> tuple[int, int]:
    """Return which elements of a param a rank has under ZeRO-3."""
    part = param.partition_numel()
    return min(rank * part, param.ds_numel), min((rank + 1) * part, param.ds_numel)


def partitioned(zero: Any, module: Any, names: dict[int, str], rank: int) -> Iterator[dict[str, Any]]:
    """Yield ZeRO-3 states: every param is partitioned separately; the engine's sub-groups give their order."""
    for params, flat in zip(zero.fp16_groups, flat_tensors(zero), strict=True):
        states, at = flat_states(zero, flat), 0
        for param in params:
            begin, end = own_part(param, rank)
            for kind, tensor in states.items():
                yield fragment(names[id(param)], kind, begin, tensor[at : at + end - begin])
            yield fragment(names[id(param)], "module", begin, param.ds_tensor.view(-1)[: end - begin])
            at += param.partition_numel()
    for name, param in module.named_parameters():
        if not param.requires_grad:
            begin, end = own_part(param, rank)
            yield fragment(name, "frozen", begin, param.ds_tensor.view(-1)[: end - begin])


def vectors(zero: Any, module: Any, names: dict[int, str], rank: int) -> Iterator[dict[str, Any]]:
    """Yield ZeRO-1/2 states: a param group is one vector, cut into equal partitions."""
    groups = getattr(zero, "round_robin_bit16_groups", None) or zero.bf16_groups
    all_offsets = getattr(zero, "round_robin_bit16_offsets", None)
    for group, (params, flat) in enumerate(zip(groups, flat_tensors(zero), strict=True)):
        states, low, at = flat_states(zero, flat), rank * flat.numel(), 0
        for number, param in enumerate(params):
            offset = all_offsets[group][number] if all_offsets else at
            begin, end = max(low, offset), min(low + flat.numel(), offset + param.numel())
            for kind, tensor in states.items() if begin < end else ():
                yield fragment(names[id(param)], kind, begin - offset, tensor[begin - low : end - low])
            at = offset + param.numel()
    for name, param in module.named_parameters() if rank == 0 else ():
        yield fragment(name, "module" if param.requires_grad else "frozen", 0, param)


def resume_deepspeed(task: dict[str, Any]) -> dict[str, Any]:
    """Resume with DeepSpeed's own engine, as the Trainer does, or accelerate, or a loop."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from transformers.integrations.deepspeed import deepspeed_load_checkpoint

    get_accelerator().is_fp16_supported = lambda: True  # nothing is computed, so fp16 on a CPU is fine
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute; gloo is enough
    model = build_model(task).float()
    optimizer = build_optimizer(model, task)
    scheduler = None if task["scheduler"] == "deepspeed" else constant_rate(optimizer, task)
    handed = scheduler if task["scheduler"] == "handed to deepspeed" else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=task["config"], lr_scheduler=handed)
    if task["is_trainers"]:
        deepspeed_load_checkpoint(engine, task["root"])
    else:
        path, _ = engine.load_checkpoint(task["root"], task["tag"])
        assert path is not None, "the engine finds no checkpoint"
    if task["scheduler"] == "trainer":
        assert scheduler is not None
        scheduler.load_state_dict(torch.load(Path(task["root"], "scheduler.pt"), weights_only=True))
    zero, names = engine.optimizer, {id(param): name for name, param in engine.module.named_parameters()}
    fragments = partitioned if engine.zero_optimization_stage() == 3 else vectors
    found = fragments(zero, engine.module, names, torch.distributed.get_rank())
    return {
        "fragments": [one for one in found if one["begin"] < one["end"]],
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        **facts(zero.optimizer, flat_tensors(zero), scheduler or engine.lr_scheduler),
    }


def resume_trainer(task: dict[str, Any]) -> dict[str, Any]:
    """Resume as the Trainer does without DeepSpeed: by its own methods, because these silently skip things."""
    model = build_model(task).to(_DTYPES[task["precision"]])
    optimizer = build_optimizer(model, task)
    scheduler = constant_rate(optimizer, task)
    with_cpu = transformers.TrainingArguments(output_dir=task["folder"], use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = transformers.Trainer(model=model, args=with_cpu, optimizers=(optimizer, scheduler))
    trainer._load_from_checkpoint(task["root"])
    trainer._load_optimizer_and_scheduler(task["root"])
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    moments = [
        fragment(names[id(param)], kind, 0, value)
        for param in params
        for kind, value in optimizer.state.get(param, {}).items()
        if kind != "step"
    ]
    weights = [
        fragment(name, "master" if param.requires_grad else "frozen", 0, param)
        for name, param in model.named_parameters()
    ]
    return {"fragments": weights + moments, **facts(optimizer, params, scheduler)}


def constant_rate(optimizer: torch.optim.Optimizer, task: dict[str, Any]) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0] * len(task["groups"]))


def facts(optimizer: Any, flats: Iterable[torch.Tensor], scheduler: Any) -> dict[str, Any]:
    """Return Adam's steps, the hyperparameters of the param groups, and whether the scheduler works."""
    plain = (bool, int, float, str, type(None), list, tuple)
    steps = [optimizer.state.get(flat, {}).get("step") for flat in flats]
    return {
        "steps": [None if step is None else float(step) for step in steps],
        "groups": [
            {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
            for group in optimizer.param_groups
        ],
        "scheduler": try_step(scheduler),
    }


def try_step(scheduler: Any) -> str | None:
    """Return why the scheduler can't step, or None: lists of a wrong length show only then."""
    try:
        scheduler.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(task_file: Path, folder: Path) -> None:
    task = json.loads(task_file.read_text())
    rank = int(os.environ.get("RANK", "0"))
    result: dict[str, Any] = {"problem": None, "refusal": None}
    try:
        result |= (resume_deepspeed if task["stage"] else resume_trainer)(task)
    except Refusal as error:
        result["refusal"] = str(error)
    except Exception as error:
        traceback.print_exc()
        result["problem"] = f"{type(error).__name__}: {error}"
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    if result["problem"] is None and torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # a failure makes torchrun stop the ranks that wait for this one; the interpreter's teardown is skipped, because a
    # gloo thread sometimes aborts the process in it
    os._exit(0 if result["problem"] is None else 1)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
