#!/usr/bin/env bash
# Make the virtual environment that the other scripts run in, and install llmtailor into it.
#
#   ./scripts/setup_venv.sh            make or update it
#   source scripts/setup_venv.sh       the same, and put it first on PATH
#
#   LLMTAILOR_VENV          where it is (default: .venv in the repository)
#   LLMTAILOR_CONSTRAINTS   the versions to install (default: scripts/constraints.txt)
#   PYTHON                  the interpreter to make it with (default: python3; 3.10 or newer)
#
# Nothing is installed if nothing has changed since the last time. Without a GPU there is no need for
# torch's CUDA packages; scripts/constraints.txt says how to get the small CPU build instead.
set -euo pipefail

_setup_venv() {
  local root python venv constraints stamp want
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  python=${PYTHON:-python3}
  venv=${LLMTAILOR_VENV:-$root/.venv}
  constraints=$(realpath "${LLMTAILOR_CONSTRAINTS:-$root/scripts/constraints.txt}")
  stamp=$venv/.llmtailor-installed

  if [[ ! -x $venv/bin/python ]]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "error: $python is not Python 3.10 or newer; set PYTHON to one that is" >&2
      return 1
    fi
    echo "Making the virtual environment $venv" >&2
    if ! "$python" -m venv "$venv"; then
      echo "error: '$python -m venv' failed; on Debian and Ubuntu, install the package python3-venv" >&2
      return 1
    fi
  fi
  venv=$(cd "$venv" && pwd)

  # What an install depends on: the checkout it points to, and the two files that say what to install.
  want=$(
    cd "$root"
    printf '%s\n' "$root"
    cat pyproject.toml "$constraints"
  )
  if [[ ! -f $stamp || $(<"$stamp") != "$want" ]]; then
    echo "Installing llmtailor and what it needs (the first time takes some minutes)" >&2
    rm -f "$stamp"
    DS_BUILD_OPS=0 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --constraint "$constraints" --editable "${root}[dev]" </dev/null
    printf '%s\n' "$want" >"$stamp"
  fi

  export VIRTUAL_ENV=$venv
  export PATH=$venv/bin:$PATH
  # DeepSpeed compiles small extensions on first use. Environments with different versions must not share them.
  export TORCH_EXTENSIONS_DIR=$venv/torch_extensions
}

_setup_venv
