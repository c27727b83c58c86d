"""Make checkpoints that look as if a Trainer under DeepSpeed ZeRO-3 had written them, without training anything.

    python scripts/synthetic.py OUT --shape 1b --world-size 2 --steps 100,200
    python scripts/synthetic.py OUT --shape 8b --world-size 8 --num-checkpoints 8 --sparse

makes OUT/checkpoint-100 and so on, for measuring and for tests without DeepSpeed. File names, key trees, pickled
classes, partitioning, padding, CRCs and the agreement of bf16 weights with their fp32 masters are those of the real
thing (deepspeed 0.19.8, transformers 5.23); the values are cheap pseudo-random numbers, different in every state and
step. Stock DeepSpeed loads them.
``training_args.bin`` is a placeholder, and DeepSpeed's ``zero_to_*.py`` scripts are left out.

Memory stays at some hundred MB (most of it torch itself), whatever the size: torch.save leaves the tensors' bytes
out, and they are streamed into the files afterwards. With --sparse they stay holes: 8 B parameters then take no
space on disk, which is enough for whatever does not depend on the speed of the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
import sys
import time
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch
from isal import isal_zlib

DEFAULT_SUB_GROUP_SIZE = 10**9
SHARD_BYTES = 5_000_000_000
"""Weights above this are spread over several safetensors files."""


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a config.json says of a model's size."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    rope_theta: float

    def params(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes in the order of ``model.named_parameters()``."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for number in range(self.num_layers):
            layer = {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
            }
            if self.model_type == "qwen3":
                layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
            layer |= {
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }
            shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def config(self) -> dict[str, Any]:
        """Return what config.json holds."""
        return {
            "architectures": [self.architecture],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": 2048,
            "model_type": self.model_type,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "transformers_version": "5.23.0",
            "use_cache": False,
            "vocab_size": self.vocab_size,
        }


LLAMA, QWEN3 = ("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")
SHAPES = {
    "tiny": Shape(*LLAMA, 64, 64, 128, 4, 4, 2, 16, tied=False, rope_theta=1e4),  # the model of demo_train.py
    "0.6b": Shape(*QWEN3, 151_936, 1024, 3072, 28, 16, 8, 128, tied=True, rope_theta=1e6),  # Qwen3-0.6B
    "1b": Shape(*LLAMA, 128_256, 2048, 8192, 16, 32, 8, 64, tied=True, rope_theta=5e5),  # Llama-3.2-1B
    "8b": Shape(*LLAMA, 128_256, 4096, 14_336, 32, 32, 8, 128, tied=False, rope_theta=5e5),  # Llama-3.1-8B
}


# --- the layout: param groups, flat ids, slices ----------------------------------------------------------------------


@dataclass(frozen=True)
class FlatId:
    """One flat tensor per rank: the slices of these params, one after the other."""

    group: int
    params: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How ZeRO-3 lays out a model over the ranks."""

    shapes: dict[str, tuple[int, ...]]
    world_size: int
    weight_decay: tuple[float, ...]
    """Of each param group."""
    flat_ids: tuple[FlatId, ...]
    sub_group_size: int

    def numel(self, param: str) -> int:
        return math.prod(self.shapes[param])

    def part(self, param: str) -> int:
        """Return the elements of the slice that each rank holds, padding included."""
        return -(-self.numel(param) // self.world_size)

    def flat_numel(self, flat: FlatId) -> int:
        return sum(self.part(param) for param in flat.params)


def lay_out(
    shape: Shape, world_size: int, groups: str = "default", sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
) -> Layout:
    """Group the params as the Trainer does (``default``) or layer by layer (``layer``), and cut into sub-groups."""
    shapes = shape.params()
    grouped: dict[tuple[Any, ...], list[str]] = {}
    for name in shapes:
        decays = "norm" not in name
        if groups == "layer":
            words = name.split(".")
            number = int(words[2]) if words[1] == "layers" else -1
            # No-decay groups first; in each half the modules outside of layers by name, then the layers.
            key: tuple[Any, ...] = (decays, number, "" if number >= 0 else name)
        else:
            key = (not decays,)
        grouped.setdefault(key, []).append(name)
    ordered = [grouped[key] for key in sorted(grouped)]
    layout = Layout(
        shapes, world_size, tuple(0.0 if "norm" in names[0] else 0.1 for names in ordered), (), sub_group_size
    )
    flat_ids = []
    for group, names in enumerate(ordered):
        collected: list[str] = []
        whole = sum(map(layout.part, names)) <= sub_group_size
        for name in names:
            collected.append(name)
            if not whole and sum(map(layout.part, collected)) >= sub_group_size:
                flat_ids.append(FlatId(group, tuple(collected)))
                collected = []
        if collected:
            flat_ids.append(FlatId(group, tuple(collected)))
    return replace(layout, flat_ids=tuple(flat_ids))


# --- the values ------------------------------------------------------------------------------------------------------


class Values:
    """Pseudo-random elements of every state: a block of numbers, read from a place that depends on the state."""

    BLOCK = 1_000_003

    def __init__(self, step: int):
        self.step = step
        normal = np.random.default_rng(0).standard_normal(self.BLOCK).astype(np.float32)
        master = normal * np.float32(0.02)
        weight = torch.from_numpy(master).to(torch.bfloat16).view(torch.int16).numpy()
        # Each block twice in a row, so that any run of BLOCK elements is contiguous.
        self._blocks = {
            "master": np.tile(master, 2),
            "weight": np.tile(weight, 2),
            "exp_avg": np.tile(normal * np.float32(1e-3), 2),
            "exp_avg_sq": np.tile((normal * np.float32(1e-3)) ** 2, 2),
        }

    def stream(self, param: str, kind: str, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of elements ``begin``..``end``. A weight is its master, rounded to bf16."""
        seed = f"{self.step} {param} {'master' if kind == 'weight' else kind}"
        shift = zlib.crc32(seed.encode())
        block = self._blocks[kind]
        while begin < end:
            at = (begin + shift) % self.BLOCK
            num = min(end - begin, self.BLOCK)
            yield memoryview(block[at : at + num]).cast("B")
            begin += num


def flat_bytes(layout: Layout, flat: FlatId, kind: str, rank: int, values: Values) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor of one rank."""
    # DeepSpeed saves uninitialised memory behind the masters, and zeros behind the moments.
    padding = np.float32(1e31 if kind == "master" else 0).tobytes()
    for param in flat.params:
        part, numel = layout.part(param), layout.numel(param)
        begin, end = min(rank * part, numel), min((rank + 1) * part, numel)
        yield from values.stream(param, kind, begin, end)
        if end - begin < part:
            yield memoryview(padding * (part - (end - begin)))


# --- torch.save files ------------------------------------------------------------------------------------------------


class ZeroStageEnum(IntEnum):
    """Stands in for DeepSpeed's enum; its pickle says the same."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    """Stands in for DeepSpeed's static loss scaler; its pickle says the same."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class fragment_address:
    """Stands in for DeepSpeed's record of where a param lies (ZeRO-1/2)."""


STAND_INS: dict[str, type] = {
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
}


@contextmanager
def pickled_as_deepspeed() -> Iterator[None]:
    """Have the stand-ins pickled under the names of DeepSpeed's classes."""
    real = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for path, stand_in in STAND_INS.items():
        words = path.split(".")
        for depth in range(1, len(words) + 1):
            name = ".".join(words[:depth])
            sys.modules[name] = ModuleType(name)
        setattr(sys.modules[path], stand_in.__name__, stand_in)
        stand_in.__module__ = path
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(real)


def save_with_data(tree: Any, path: Path, storages: Iterable[tuple[int, Iterable[memoryview]]], sparse: bool) -> None:
    """torch.save `tree`, whose tensors are never read, and stream the bytes of its storages into the file.

    `storages` are sizes and bytes in the order in which pickling meets them.
    """
    with torch.serialization.skip_data(), pickled_as_deepspeed():
        torch.save(tree, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        directory = archive.start_dir
    checksums: dict[str, int] = {}
    with path.open("r+b", buffering=1 << 20) as file:
        for key, (num_bytes, chunks) in enumerate(storages):
            info = records[f"data/{key}"]
            assert info.file_size == num_bytes, f"{path}: storage {key} has {info.file_size} bytes, not {num_bytes}"
            start = info.header_offset
            file.seek(start)
            header = file.read(30)
            start += 30 + sum(struct.unpack("<HH", header[26:]))
            crc = _fill(file, start, num_bytes, chunks, sparse)
            checksums[info.filename] = crc
            if info.flag_bits & 8:  # the CRC stands behind the data
                file.seek(start + num_bytes)
                assert file.read(4) == b"PK\x07\x08", f"{path}: no data descriptor behind {info.filename}"
                file.write(struct.pack("<I", crc))
            else:
                file.seek(info.header_offset + 14)
                file.write(struct.pack("<I", crc))
        _patch_directory(file, directory, checksums)


def _fill(file: BinaryIO, start: int, num_bytes: int, chunks: Iterable[memoryview], sparse: bool) -> int:
    """Write `chunks` at `start` (or leave the hole as it is) and return their CRC-32."""
    crc = 0
    if sparse and num_bytes > 4:  # `step` is written all the same
        zeros = memoryview(bytes(min(num_bytes, 16 << 20)))
        for at in range(0, num_bytes, len(zeros)):
            crc = isal_zlib.crc32(zeros[: num_bytes - at], crc)
        return crc
    file.seek(start)
    for chunk in chunks:
        crc = isal_zlib.crc32(chunk, crc)
        file.write(chunk)
    assert file.tell() == start + num_bytes
    return crc


def _patch_directory(file: BinaryIO, at: int, checksums: dict[str, int]) -> None:
    """Set CRCs in the zip's central directory."""
    while True:
        file.seek(at)
        entry = file.read(46)
        if entry[:4] != b"PK\x01\x02":
            return
        name_length, extra_length, comment_length = struct.unpack("<HHH", entry[28:34])
        name = file.read(name_length).decode()
        if name in checksums:
            file.seek(at + 16)
            file.write(struct.pack("<I", checksums[name]))
        at += 46 + name_length + extra_length + comment_length


# --- the checkpoint --------------------------------------------------------------------------------------------------


def make_checkpoint(
    root: Path, shape: Shape, layout: Layout, step: int, *, sparse: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write one checkpoint folder."""
    tag = f"global_step{step}"
    (root / tag).mkdir(parents=True)
    values = Values(step)
    for rank in range(layout.world_size):
        _write_optim_states(root / tag, layout, rank, values, sparse)
        _write_model_states(root / tag, shape, layout, rank, step)
        rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
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


def _write_optim_states(folder: Path, layout: Layout, rank: int, values: Values, sparse: bool) -> None:
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
    path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    save_with_data(tree, path, storages, sparse)


def _write_model_states(folder: Path, shape: Shape, layout: Layout, rank: int, step: int) -> None:
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}
    tree = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in [*layout.shapes, *tied]),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(layout.shapes[name])) for name in flat.params) for flat in layout.flat_ids
        ],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": tied if rank == 0 else {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": step * 2 * layout.world_size,
        "dp_world_size": layout.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        **_deepspeed_facts(layout),
    }
    torch.save(tree, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


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


# --- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Make synthetic ZeRO-3 Trainer checkpoints.")
    parser.add_argument("out", type=Path, help="the folder that gets the checkpoint-N folders")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model (default: tiny)")
    parser.add_argument("--layers", type=int, help="a number of layers other than the shape's, for small disks")
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--groups", choices=["default", "layer"], default="default", help="param groups")
    parser.add_argument("--sub-group-size", type=int, default=DEFAULT_SUB_GROUP_SIZE, help="elements per rank (1e9)")
    parser.add_argument("--steps", help="of the checkpoints, such as 100,200")
    parser.add_argument("--num-checkpoints", type=int, default=2, help="without --steps: 100, 200, ...")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="of a safetensors file (default: 5e9)")
    parser.add_argument("--sparse", action="store_true", help="leave the tensors' bytes as holes in the files")
    options = parser.parse_args()

    shape = SHAPES[options.shape]
    if options.layers:
        shape = replace(shape, num_layers=options.layers)
    layout = lay_out(shape, options.world_size, options.groups, options.sub_group_size)
    if options.steps:
        steps = [int(step) for step in options.steps.split(",")]
    else:
        steps = [100 * number for number in range(1, options.num_checkpoints + 1)]
    for step in steps:
        root = options.out / f"checkpoint-{step}"
        if root.exists():
            parser.error(f"{root} exists")
        began = time.monotonic()
        make_checkpoint(root, shape, layout, step, sparse=options.sparse, shard_bytes=options.shard_bytes)
        num_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        print(f"{root}: {num_bytes / 1e9:.3f} GB in {time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
