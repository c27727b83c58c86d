"""Checkpoints that look as if a Trainer under DeepSpeed ZeRO-3 had written them, without training anything.

File names, key trees, pickled classes, partitioning, padding, CRCs and the agreement of bf16 weights with their fp32
masters are those of the real thing (deepspeed 0.19.8, transformers 5.23); the values are cheap pseudo-random numbers,
different in every state and step. Stock DeepSpeed loads them. ``training_args.bin`` is a placeholder, and DeepSpeed's
``zero_to_*.py`` scripts are left out.

Memory stays at some hundred MB (most of it torch itself), whatever the size: torch.save leaves the tensors' bytes
out, and they are streamed into the files afterwards.
"""

from synthetic.checkpoint import SHARD_BYTES, make_checkpoint
from synthetic.dcp import make_dcp
from synthetic.layout import DEFAULT_SUB_GROUP_SIZE, SHAPES, Layout, Shape, lay_out
from synthetic.torch_files import pickled_as_deepspeed

__all__ = [
    "DEFAULT_SUB_GROUP_SIZE",
    "SHAPES",
    "SHARD_BYTES",
    "Layout",
    "Shape",
    "lay_out",
    "make_checkpoint",
    "make_dcp",
    "pickled_as_deepspeed",
]
