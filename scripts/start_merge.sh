#!/usr/bin/env bash
# Compose a checkpoint from a job script, for instance after a training step has failed:
#
#   OUTPUT_PATH=$RUN/checkpoint-400-composed CONFIG_YML=recipe.yaml NUM_GPU=8 scripts/start_merge.sh
#
# From a recipe:
#   CONFIG_YML                   the recipe
# From LLMTailor's update log (JSON lines, {"step": n, "flag": [ids]}); CONFIG_YML, if set, gets the recipe made of it:
#   CHECKPOINT_PATH              the run's folder, which holds checkpoint-N
#   LAYER_WISE_CHECKPOINT_JSON   the log
#   FAILURE_STEP                 nothing later is used
#   TOTAL_LAYERS                 layers of the model; checked (optional)
#   BASE_CHECKPOINT              the checkpoint for parts that the log does not name (optional)
# From a run's folder alone, with full or partial checkpoints:
#   CHECKPOINT_PATH, FAILURE_STEP (optional), STRATEGY (default: latest)
#   OUTPUT_PATH may be left out then. The newest state of a run with partial checkpoints becomes checkpoint-STEP in the
#   run's folder, where a resume looks for it; nothing is written if the newest checkpoint is complete. The last line
#   says which it is.
# A training script around the Hugging Face Trainer that only saves partial checkpoints does not need this script:
# `llmtailor run --on-restart compose -- ...`, or attach(..., on_restart="compose"), goes on by itself.
# In any case:
#   OUTPUT_PATH                  the checkpoint folder to make
#   NUM_GPU                      the world size of the output (default: that of the base checkpoint)
#   COPY_TOKENIZER               0 or false leaves the tokenizer files out (default: they are copied)
#   LLMTAILOR                    the program to run (default: llmtailor on PATH, else the one in the repository's .venv)
#
# Further arguments go to `llmtailor merge`: --dry-run, --force, --quiet ...
# The exit code is llmtailor's; 2 if a variable is missing or off.
set -euo pipefail

fail() {
  echo "start_merge.sh: $1" >&2
  exit 2
}

[[ -n ${CONFIG_YML:-}${CHECKPOINT_PATH:-} ]] ||
  fail "neither CONFIG_YML nor CHECKPOINT_PATH is set: name a recipe, e.g. CONFIG_YML=configs/parity.yaml, or a run's folder"
[[ -n ${OUTPUT_PATH:-} || -z ${CONFIG_YML:-}${LAYER_WISE_CHECKPOINT_JSON:-} ]] ||
  fail "OUTPUT_PATH is not set: name the checkpoint folder to make"

program=${LLMTAILOR:-llmtailor}
if ! command -v "$program" >/dev/null; then
  program=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/llmtailor
  if [[ -n ${LLMTAILOR:-} || ! -x $program ]]; then
    fail "${LLMTAILOR:-llmtailor} is not installed here: activate its environment, or set LLMTAILOR to the program"
  fi
fi

choice=()
if [[ -n ${LAYER_WISE_CHECKPOINT_JSON:-} ]]; then
  [[ -n ${CHECKPOINT_PATH:-} ]] || fail "CHECKPOINT_PATH is not set: name the folder that holds checkpoint-N"
  [[ -n ${FAILURE_STEP:-} ]] || fail "FAILURE_STEP is not set: give the last step to be used"
  choice=(--from-flags "$LAYER_WISE_CHECKPOINT_JSON" --at "$FAILURE_STEP")
  [[ -z ${TOTAL_LAYERS:-} ]] || choice+=(--total-layers "$TOTAL_LAYERS")
  [[ -z ${BASE_CHECKPOINT:-} ]] || choice+=(--base "$BASE_CHECKPOINT")
elif [[ -z ${CONFIG_YML:-} ]]; then
  [[ -z ${FAILURE_STEP:-} ]] || choice=(--at "$FAILURE_STEP")
  choice+=(--strategy "${STRATEGY:-latest}")
fi

if [[ -z ${CONFIG_YML:-} ]]; then
  arguments=(merge --run "$CHECKPOINT_PATH" "${choice[@]}")
  [[ -z ${OUTPUT_PATH:-} ]] || arguments+=("$OUTPUT_PATH")
else
  if ((${#choice[@]})); then
    "$program" recipe "$CHECKPOINT_PATH" "${choice[@]}" --output "$CONFIG_YML" --force
  fi
  arguments=(merge "$CONFIG_YML" "$OUTPUT_PATH")
fi
[[ -z ${NUM_GPU:-} ]] || arguments+=(--num-gpu "$NUM_GPU")
case ${COPY_TOKENIZER:-1} in
  0 | false | no) arguments+=(--no-copy-tokenizer) ;;
  1 | true | yes) ;;
  *) fail "COPY_TOKENIZER is '$COPY_TOKENIZER': it must be 1 or 0" ;;
esac
exec "$program" "${arguments[@]}" "$@"
