#!/usr/bin/env bash
# Run every check, on a fresh machine too: formatting, lint, types, shell scripts, tests.
#
#   ./scripts/test.sh                  every feature once, some minutes on two cores: what CI runs
#   ./scripts/test.sh --all            everything: every combination, every fault, and a fuzzer; hours
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
check shellcheck --external-sources scripts/*.sh benchmarks/*.sh tests/support/training_programs/*.sh .ci/run
if ((${#failed[@]})); then
  printf 'error: this failed, so the tests were not run: %s\n' "${failed[@]}" >&2
  exit 1
fi

made=$(mktemp --directory)
trap 'kill "$types" 2>/dev/null || true; rm -rf "$made" "$shared"' EXIT
echo "== mypy, beside the tests"
mypy >"$made/mypy.log" 2>&1 &
types=$! shared=$made

# Tests of clones make small file systems, if they may and can; without the tools they are skipped.
if ((EUID == 0)) && command -v apt-get >/dev/null && ! { command -v mkfs.btrfs && command -v mkfs.xfs; } >/dev/null; then
  apt() { DEBIAN_FRONTEND=noninteractive timeout 120 apt-get -qq -o Acquire::Retries=0 "$@" >/dev/null 2>&1; }
  { apt update && apt install -y btrfs-progs xfsprogs; } || echo "note: btrfs-progs and xfsprogs can't be installed" >&2
fi

# Last, so that the closing line is pytest's summary. Whole files are dealt out to as many processes as there are cores;
# more than four would only import the same libraries again.
echo "== pytest"
export DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1
# The short suite writes and syncs thousands of small files: in memory, where there is room for them. What needs a disk
# finds one; --all writes too much for that.
free_gb=$(df --output=avail --block-size=1G /dev/shm 2>/dev/null | tail -1) || free_gb=0
if [[ -z ${TMPDIR:-} && " $* " != *" --all "* ]] && ((free_gb >= 8)); then
  shared=$(mktemp --directory /dev/shm/llmtailor-tests-XXXXXX)
  export TMPDIR=$shared
fi
result=0
pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@" || result=$?
if ! wait "$types"; then
  cat "$made/mypy.log"
  exit 1
fi
exit "$result"
