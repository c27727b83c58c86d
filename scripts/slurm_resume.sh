#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# An example: train; if that fails, compose the run's newest usable state and go on from it, once. Works with full
# checkpoints, with partial ones (llmtailor.saving), and with both in one run. A job that Slurm has requeued finds its own
# partial checkpoints, and goes on from them at once.
#
# A training script around the Hugging Face Trainer that only saves partial checkpoints does not need this script:
# `llmtailor run --on-restart compose -- srun torchrun --max-restarts 3 ...` goes on by itself.
#
#   sbatch scripts/slurm_resume.sh train.py --config my.yaml
#
# The training script must take --output_dir and --resume_from_checkpoint, as scripts around the Hugging Face Trainer
# do. It is resumed only if llmtailor has succeeded: from the newest checkpoint if that is complete and undamaged, or
# else from what was composed, which is checkpoint-STEP in the run's folder if the run saves partial checkpoints.
#
#   OUTPUT_DIR   the run's folder (default: runs/$SLURM_JOB_ID)
#   NUM_GPU      default: 8
#   STRATEGY     how to choose among the run's checkpoints (default: latest); see `llmtailor recipe --help`
#   LAUNCH       what starts the training (default: srun torchrun --nproc_per_node $NUM_GPU)
set -euo pipefail

output=${OUTPUT_DIR:-runs/${SLURM_JOB_ID:-local}}
export NUM_GPU=${NUM_GPU:-8}
read -r -a launch <<<"${LAUNCH:-srun torchrun --nproc_per_node $NUM_GPU}"
# sbatch runs a copy of this file from its spool, so the repository is found through the submit folder.
scripts=$(dirname "${BASH_SOURCE[0]}")
[[ -e $scripts/start_merge.sh ]] || scripts=${SLURM_SUBMIT_DIR:-.}/scripts

resume() {
  local told='' merged=0 checkpoint
  told=$(CHECKPOINT_PATH=$output STRATEGY=${STRATEGY:-latest} "$scripts/start_merge.sh" --force --quiet) || merged=$?
  if ((merged != 0)); then
    echo "slurm_resume.sh: llmtailor ended with $merged; not resuming" >&2
    exit "$merged"
  fi
  echo "$told" >&2
  # one of "wrote CHECKPOINT" and "CHECKPOINT is complete and has the newest state of every part: nothing to merge"
  checkpoint=${told##*$'\n'}
  checkpoint=${checkpoint#wrote }
  checkpoint=${checkpoint% is complete and has *}
  "${launch[@]}" "$@" --output_dir "$output" --resume_from_checkpoint "$checkpoint"
}

code=0
if compgen -G "$output/partial/step-*/manifest.json" >/dev/null; then
  echo "slurm_resume.sh: $output has partial checkpoints; going on from them" >&2
  resume "$@" || code=$?
else
  "${launch[@]}" "$@" --output_dir "$output" || code=$?
fi
if ((code == 0)); then
  exit 0
fi
echo "slurm_resume.sh: training ended with $code; composing a checkpoint from $output" >&2
resume "$@"
