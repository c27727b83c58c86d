#!/usr/bin/env bash
# Run every check, on a fresh machine too: formatting, lint, types, shell scripts, tests.
#
#   ./scripts/test.sh                  everything
#   ./scripts/test.sh -m 'not real'    arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_venv.sh
source scripts/setup_venv.sh

failed=()
check() {
  echo "== $*"
  "$@" || failed+=("${*:1:2}")
}

check ruff check .
check ruff format --check .
check mypy
check shellcheck --external-sources scripts/*.sh .ci/run
if ((${#failed[@]})); then
  printf 'error: this failed, so the tests were not run: %s\n' "${failed[@]}" >&2
  exit 1
fi

# Last, so that the closing line is pytest's summary.
echo "== pytest"
export DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1
if (($#)); then
  exec pytest "$@"
fi
# In two processes: what stands on trainings waits a lot, and most of the rest uses one core.
log=$(mktemp)
trap 'kill "${others:-}" 2>/dev/null || true; rm -f "$log"' EXIT
pytest -m 'not real' >"$log" 2>&1 &
others=$!
code=0
pytest -m real || code=$?
wait "$others" || code=$?
cat "$log"
exit "$code"
