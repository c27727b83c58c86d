#!/usr/bin/env bash
# Measure what saving costs a training: in the background, with training stopped, by torch's async_save, by the Trainer.
#
#   ./benchmarks/bench_save.sh                                     25 M params (0.3 GB a save), 2 CPU ranks, ZeRO-3 and plain
#   ./benchmarks/bench_save.sh --hidden-size 1536 --rounds 3       larger
#   ./benchmarks/bench_save.sh --stages 2 --ranks 4                another stage of ZeRO, more ranks
#   ./benchmarks/bench_save.sh --device cuda --hidden-size 2048 --num-layers 16 --tokens 2048
#   ./benchmarks/bench_save.sh --every 10 --stages 0 --ranks 1 --steps 40     one, two and three saves in flight
#   ./benchmarks/bench_save.sh --help
#
# It works in ./bench-run/save (or --work DIR), and takes that away again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_venv.sh
source "$here/../scripts/setup_venv.sh"
exec python "$here/bench_save.py" "$@"
