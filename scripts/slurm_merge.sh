#!/usr/bin/env bash
#SBATCH --job-name=merge
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=2:00:00
#SBATCH --requeue
# An example: many nodes share one merge, and continue with what is written if a rank dies; Slurm requeues the job if a node fails.
#
#   sbatch scripts/slurm_merge.sh merge recipe.yaml /lustre/run/checkpoint-400-merged
#   sbatch --nodes=2 scripts/slurm_merge.sh convert /lustre/run/checkpoint-400 /lustre/out/checkpoint-400 --num-gpu 512
#
# The arguments are those of llmtailor; the output must be named, in a folder that all nodes see.
#
#   ATTEMPTS   how often the command is run, if a rank dies or the disk fails (default: 3)
#   LLMTAILOR  the program (default: llmtailor)
#   LAUNCH     what starts the ranks (default: srun); not torchrun, which hides exit codes
set -euo pipefail

(($# >= 3)) || {
  echo "slurm_merge.sh: give a command of llmtailor with its output, e.g. merge recipe.yaml OUT" >&2
  exit 2
}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not take it from the job since Slurm 22.05
read -r -a launch <<<"${LAUNCH:-srun}"

for ((attempt = 1; attempt <= ${ATTEMPTS:-3}; attempt++)); do
  code=0
  "${launch[@]}" "${LLMTAILOR:-llmtailor}" "$@" --distributed || code=$?
  case $code in
    8 | 9 | 137) echo "slurm_merge.sh: attempt $attempt ended with $code" >&2 ;;  # what is written is kept
    *) exit "$code" ;;
  esac
done
exit "$code"
