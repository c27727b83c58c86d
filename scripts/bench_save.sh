#!/usr/bin/env bash
# Measure what a save costs a training: partial saves, the Trainer's own, and a plain write of the same bytes.
#
#   ./scripts/bench_save.sh                                     127 M params (1.8 GB a checkpoint), 2 CPU ranks
#   ./scripts/bench_save.sh --hidden-size 1536 --rounds 3       larger
#   ./scripts/bench_save.sh --stage 2 --ranks 4                 another stage of ZeRO, more ranks
#   ./scripts/bench_save.sh --help
#
# It works in ./bench-run/save (or --work DIR), and takes that away again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_venv.sh
source "$here/setup_venv.sh"
exec python "$here/bench_save.py" "$@"
