#!/usr/bin/env bash
# Measure `llmtailor merge` against `cp -r` of the same number of bytes, side by side, and its peak memory.
#
#   ./benchmarks/bench_merge.sh                                    8 GB checkpoints (the shape of Qwen3-0.6B)
#   ./benchmarks/bench_merge.sh --shape 1b --rounds 5              larger
#   ./benchmarks/bench_merge.sh --layers 8 --sources 2 8           smaller (4 GB), and from more checkpoints
#   ./benchmarks/bench_merge.sh --work /mnt/xfs --ranks 4 16       what clones save, on XFS or Btrfs
#   ./benchmarks/bench_merge.sh --shape 8b --sparse --dry-run      planning 112 GB, without the disk for it
#   ./benchmarks/bench_merge.sh --help
#
# It makes synthetic checkpoints in ./bench-run (or --work DIR) and takes them away again unless told to --keep.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_venv.sh
source "$here/../scripts/setup_venv.sh"
exec python "$here/bench_merge.py" "$@"
