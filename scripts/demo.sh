#!/usr/bin/env bash
# The whole story on a fresh machine, without a GPU: save in half of the bytes, crash, recover, resume.
#
#   ./scripts/demo.sh
#
# Everything it makes lies in ./demo-run (and .venv); run it again to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bold='' plain=''
if [[ -t 1 ]]; then
  bold=$'\033[1m' plain=$'\033[0m'
fi
stage() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }
say() { printf '%s\n' "$*"; }
show() {
  printf '$ %s\n' "$*"
  "$@"
}

made=$PWD/demo-run
mark=$made/.made-by-the-demo
if [[ -e $made && ! -e $mark ]]; then
  echo "error: there is a $made that the demo did not make; move it away first" >&2
  exit 1
fi
rm -rf "$made"/{run,straight,composite,run.log,resumed.log,straight.log}
mkdir -p "$made"
touch "$mark"

stage "1/6  Set-up"
# shellcheck source=scripts/setup_venv.sh
source scripts/setup_venv.sh
say "Python and llmtailor: ${VIRTUAL_ENV}, $(llmtailor --version)"

# Training on two CPU ranks, in the background: its process id is $job. What it says goes to a log file.
job=''
trap '[[ -z $job ]] || kill_job' EXIT
train() {
  log=$made/$1.log
  shift
  DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1 \
    torchrun --standalone --nproc_per_node 2 scripts/demo_train.py "$@" >"$log" 2>&1 </dev/null &
  job=$!
}
failed() {
  tail -n 30 "$log" >&2
  echo "error: training failed; the whole log is $log" >&2
  exit 1
}
finish() {
  wait "$job" || { job='' && failed; }
  job=''
}
# torchrun puts its ranks into process groups of their own, so each of them is named.
kill_job() {
  local ranks
  read -r -a ranks < <(cat /proc/"$job"/task/*/children) || true # it misses a line's end
  kill -9 "$job" "${ranks[@]}"
  { wait "$job"; } 2>/dev/null || true
  job=''
}

stage "2/6  Train a tiny Llama: the unpatched Trainer, DeepSpeed ZeRO-3, bf16, 2 CPU ranks, 30 steps, a save every 5"
say "Two lines of the training script, scripts/demo_train.py, are llmtailor's:"
sed -n '/from llmtailor.saving/p; /attach(trainer/p' scripts/demo_train.py
train run --output-dir "$made/run" --save rounded --save-steps 5
until [[ -e $made/run/partial/step-00000015/manifest.json ]]; do
  kill -0 "$job" 2>/dev/null || { job='' && failed; }
  sleep 0.1
done

stage "3/6  Kill it in the middle"
kill_job
say "kill -9: torchrun and its ranks are gone. What lies in demo-run/run:"
(cd "$made/run" && du -sh partial/step-*)
say "Each save is complete: master weights exactly, Adam's moments in 8 bits, half of the bytes in all."
say "This is what the saver does unless told otherwise."

stage "4/6  Get it back, with one command"
show llmtailor merge --run demo-run/run
back=$(cd "$made/run" && ls -d checkpoint-*)
say ""
show llmtailor inspect "demo-run/run/$back"

stage "5/6  Resume from it as always, trainer.train(resume_from_checkpoint=True), to step 30"
train resumed --output-dir "$made/run" --save rounded --save-steps 5 --resume
finish
say "Done. For comparison, the same training uninterrupted, with the Trainer's own full checkpoints ..."
train straight --output-dir "$made/straight" --save-steps 5
finish
python - "$made" "${back#checkpoint-}" <<'PYTHON'
import ast
import re
import sys
from pathlib import Path

made, back = Path(sys.argv[1]), int(sys.argv[2])


def losses(log: str) -> list[float]:
    lines = (made / log).read_text().splitlines()
    return [float(ast.literal_eval(line)["loss"]) for line in lines if re.fullmatch("{'loss'.*}", line)]


def num_bytes(pattern: str) -> int:
    return sum(path.stat().st_size for folder in made.glob(pattern) for path in folder.rglob("*") if path.is_file())


straight = dict(enumerate(losses("straight.log"), start=1))
killed = dict(enumerate(losses("run.log"), start=1))
resumed = dict(enumerate(losses("resumed.log"), start=back + 1))
print("\n    step   uninterrupted    killed   resumed")
for step in sorted({1, 10, *range(back - 1, 31)}):
    told = "".join(f"{run[step]:10.3f}" if step in run else " " * 10 for run in (killed, resumed))
    print(f"    {step:4}{straight[step]:16.3f}{told}".rstrip())
partial, full = num_bytes("run/partial/step-*"), num_bytes("straight/checkpoint-*")
print(f"""
The run resumed with the weights of step {back} and rounded moments.
Six partial checkpoints have {partial:,} bytes; six full ones have {full:,}, which is {full / partial:.2f} times as much.""")
PYTHON

stage "6/6  Or say yourself what comes from where, and for how many GPUs: a recipe, on two of the full checkpoints"
export RUN=$made/straight
say "configs/parity.yaml (RUN is demo-run/straight):"
sed -n '/^[^#]/s/^/    /p' configs/parity.yaml
say ""
show llmtailor merge configs/parity.yaml demo-run/composite --num-gpu 4
