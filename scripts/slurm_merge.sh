#!/usr/bin/env bash
#SBATCH --job-name=merge
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=2:00:00
#SBATCH --requeue
# An example: many nodes share one merge, and continue with what is written if a rank dies (torchrun --max-restarts); Slurm
# requeues the job if a node fails.
#
#   sbatch scripts/slurm_merge.sh merge recipe.yaml /lustre/run/checkpoint-400-merged
#   sbatch --nodes=2 scripts/slurm_merge.sh convert /lustre/run/checkpoint-400 /lustre/out/checkpoint-400 --num-gpu 512
#
# The arguments are those of llmtailor; the output is in a folder that all nodes see.
#
#   LLMTAILOR  the module (default: llmtailor)
#   LAUNCH     what starts the ranks (default: srun torchrun, one rank per node, which start again 3 times)
set -euo pipefail

(($# >= 2)) || {
  echo "slurm_merge.sh: give a command of llmtailor, e.g. merge recipe.yaml OUT" >&2
  exit 2
}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not take it from the job since Slurm 22.05
nodes=${SLURM_JOB_NUM_NODES:-1}
first=${SLURM_JOB_NODELIST:-localhost}
if ((nodes > 1)); then
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
rendezvous="--rdzv_backend=c10d --rdzv_endpoint=$first:29400 --rdzv_id=${SLURM_JOB_ID:-0}"
read -r -a launch <<<"${LAUNCH:-srun torchrun --nnodes=$nodes --nproc_per_node=1 --max-restarts=3 $rendezvous}"
exec "${launch[@]}" -m "${LLMTAILOR:-llmtailor}" "$@" --distributed
