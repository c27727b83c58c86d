"""Make synthetic checkpoints.

    python tests/support/synthetic OUT --shape 1b --world-size 2 --steps 100,200
    python tests/support/synthetic OUT --shape 8b --world-size 8 --num-checkpoints 8 --sparse

makes OUT/checkpoint-100 and so on, for measuring and for tests without DeepSpeed. With --sparse the tensors' bytes stay
holes: 8 B parameters then take no space on disk, which is enough for whatever does not depend on the speed of the disk.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from synthetic import DEFAULT_SUB_GROUP_SIZE, SHAPES, SHARD_BYTES, lay_out, make_checkpoint, make_dcp  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Make synthetic ZeRO-3 Trainer checkpoints.")
    parser.add_argument("out", type=Path, help="the folder that gets the checkpoint-N folders")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model (default: tiny)")
    parser.add_argument("--layers", type=int, help="a number of layers other than the shape's, for small disks")
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--tp", type=int, default=1, help="of these, tensor-parallel ranks, with --sparse (default: 1)")
    parser.add_argument("--format", choices=["deepspeed", "dcp"], default="deepspeed", help="dcp: FSDP2 (sparse)")
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
    layout = lay_out(shape, options.world_size, options.groups, options.sub_group_size, options.tp)
    if options.steps:
        steps = [int(step) for step in options.steps.split(",")]
    else:
        steps = [100 * number for number in range(1, options.num_checkpoints + 1)]
    for step in steps:
        root = options.out / f"checkpoint-{step}"
        if root.exists():
            parser.error(f"{root} exists")
        began = time.monotonic()
        if options.format == "dcp":
            make_dcp(root, shape, options.tp, options.world_size // options.tp, step)
        else:
            make_checkpoint(root, shape, layout, step, sparse=options.sparse, shard_bytes=options.shard_bytes)
        num_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        print(f"{root}: {num_bytes / 1e9:.3f} GB in {time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
