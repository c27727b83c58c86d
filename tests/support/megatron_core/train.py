"""Train with the real Megatron-core on CPU ranks: ``train.py JSON``, started once for each rank.

Megatron-core names CUDA devices in its code, so a private copy of the installed package says ``cpu`` instead
(`private_copy`). Two more lines differ: without TransformerEngine it can't load its own ``fully_reshardable``
optimizer (it asks for a ``step`` of each param), nor route experts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, LAYERS, VOCAB, WORDS = 4, 2, 4, 16, 24, 3, 52, 50
LENGTH = 8


def private_copy(package: Path, out: Path) -> Path:
    """Copy megatron-core to ``out/megatron``, with the names of CUDA devices replaced."""
    shutil.copytree(package, out / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for path in out.rglob("*.py"):
        if "fsdp" in path.parts:
            continue
        text = changed = path.read_text()
        changed = re.sub(r"""device=(['"])cuda\1""", 'device="cpu"', changed)
        changed = changed.replace("torch.cuda.current_device()", "'cpu'")
        changed = re.sub(r"torch\.cuda\.(Float|BFloat16|Half)Tensor", r"torch.\1Tensor", changed)
        changed = re.sub(r"\.cuda\([^()]*\)", ".cpu()", changed)
        changed = changed.replace("te_general_gemm is not None", "False")
        changed = changed.replace(
            "dst_tensors[key].copy_(tensors[key])", "key in tensors and dst_tensors[key].copy_(tensors[key])"
        )
        if changed != text:
            path.write_text(changed)
    return out


def train(told: dict[str, Any]) -> None:
    """Train, from a checkpoint if one is named, and save; the first rank of the last stage writes the losses."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=told["tp"],
        pipeline_model_parallel_size=told["pp"],
        expert_model_parallel_size=told["ep"],
    )
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    torch.manual_seed(1234)
    arch, dtype = told["arch"], getattr(torch, told["dtype"])
    experts = 4 if arch == "mixtral" else None
    more = (
        {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 20} if experts else {}
    )
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        tensor_model_parallel_size=told["tp"],
        pipeline_model_parallel_size=told["pp"],
        pipeline_dtype=dtype,
        num_layers_in_first_pipeline_stage=1 if told["pp"] > 1 else None,
        expert_model_parallel_size=told["ep"],
        use_cpu_initialization=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch == "qwen2",
        qk_layernorm=arch == "qwen3",
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0,
        attention_dropout=0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **(more if experts else {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(experts, qk_layernorm=arch == "qwen3", normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=16,
        share_embeddings_and_output_weights=told["tied"],
        position_embedding_type="rope",
        pre_process=is_first,
        post_process=is_last,
    ).to(dtype)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
    )
    options = OptimizerConfig(
        lr=1e-2,
        weight_decay=0.1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(options, [wrapped])
    metadata = {
        "distrib_optim_sharding_type": told["sharding"],
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "non_homogeneous_layers": told["by_layer"],
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }

    def state(is_loading: bool) -> dict[str, Any]:
        own = model.sharded_state_dict(metadata=metadata)
        return {"model": own, "optimizer": optimizer.sharded_state_dict(own, is_loading=is_loading, metadata=metadata)}

    def step(number: int) -> float:
        seed = 100 * number + parallel_state.get_data_parallel_rank()
        words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        passed = torch.empty(LENGTH, 2, HIDDEN, dtype=dtype)  # from one stage to the next
        if not is_first:
            distributed.recv(passed, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(passed.requires_grad_())
        labels = words[:, 1:] if is_last else None
        found = wrapped(words[:, :-1], torch.arange(LENGTH).repeat(2, 1), mask, labels=labels)
        if is_last:
            loss = found.float().mean()
            loss.backward()
        else:
            after = parallel_state.get_pipeline_model_parallel_next_rank()
            distributed.send(found.detach().contiguous(), after)
            grads = torch.empty_like(found)
            distributed.recv(grads, after)
            found.backward(grads)
        if not is_first:
            distributed.send(passed.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
        finalize_model_grads([wrapped])
        optimizer.step()
        return float(loss) if is_last else 0.0

    first = 0
    if told["load"]:
        step(77)  # torch's Adam has no states before
        found = dist_checkpointing.load({**state(True), "iteration": None}, told["load"])
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["iteration"]
    losses = [step(number) for number in range(first, first + told["steps"])]
    if told["save"]:
        content = {**state(False), "iteration": first + told["steps"], "checkpoint_version": 3.0}
        distributed.barrier()
        dist_checkpointing.save(content, told["save"], content_metadata=metadata)
    if is_last and not (parallel_state.get_data_parallel_rank() or parallel_state.get_tensor_model_parallel_rank()):
        Path(told["losses"]).write_text(json.dumps(losses))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, os.environ["MEGATRON_COPY"])
    train(json.loads(sys.argv[1]))
