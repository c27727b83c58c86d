#!/usr/bin/env bash
# Measure what partial saves cost in quality, and write the figures of benchmarks/fidelity.md.
#
#   ./benchmarks/study.sh            five seeds: many hours on 2 cores
#   ./benchmarks/study.sh 2          two seeds: some hours
#
# Small Llamas and a Mixtral learn bytes, fail, and go on from what each policy has saved. Results are kept in ./study-run, one file
# each, so that a stopped study goes on. See benchmarks/fidelity.md.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_venv.sh
source "$here/../scripts/setup_venv.sh"
seeds=${1:-5}
cells=$PWD/study-run
export PYTHONPATH=$here DS_ACCELERATOR=cpu
python -m study.check
python -m study.run "$cells" deep,continued 0-"$seeds" &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
python -m study.run "$cells" wide,experts 0-"$seeds"
wait "$other"
trap - EXIT
python -m study.precision "$cells" 1e-5:1,1e-5:2,1e-5:10,1e-6:1 0-"$seeds" &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
python -m study.precision "$cells" tuned:1,tuned:2,tuned:10 0-"$seeds"
wait "$other"
trap - EXIT
python -m study.failures "$cells" young,fast,deep,lion 0-"$seeds" &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
python -m study.failures "$cells" wide,experts,continued,muon 0-"$seeds"
wait "$other"
trap - EXIT
torchrun --standalone --nproc_per_node 1 -m study.zero3 "$cells" 0-"$seeds"
python -m study.figures "$cells"
