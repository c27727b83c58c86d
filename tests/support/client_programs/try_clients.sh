#!/usr/bin/env bash
# Train with real training programs and the saver, kill them, and start them again; prints a table.
#
#   tests/support/client_programs/try_clients.sh                  TRL, LLaMA-Factory, axolotl, ms-swift and Lightning
#   tests/support/client_programs/try_clients.sh axolotl trl      these only
#
#   LLMTAILOR_CLIENTS   the folder for a virtual environment of each program, and for what they train
#                       (default: .venv-clients in the repository)
#   PYTHON              the interpreter to make them with (default: python3)
#
# Each environment takes some gigabytes and minutes, because the programs pin different versions of everything. No GPU is
# needed. The head of scripts/constraints.txt says how to get torch's small CPU build, and torchvision's and torchaudio's
# with it. Where pip has only those for a GPU, they can't be imported beside a torch for the CPU. They are removed then,
# and torchaudio, which LLaMA-Factory imports but this training does not use, is replaced by an empty module.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
folder=${LLMTAILOR_CLIENTS:-$root/.venv-clients}
clients=("$@")
((${#clients[@]})) || clients=(trl llamafactory axolotl ms-swift lightning)

source "$root/scripts/setup_venv.sh"
mkdir -p "$folder"
for client in "${clients[@]}"; do
  python=$folder/$client/bin/python
  if [[ ! -e $folder/$client/.installed ]]; then
    echo "Installing $client in $folder/$client" >&2
    "${PYTHON:-python3}" -m venv "$folder/$client"
    torch=$(grep '^torch==' "$root/scripts/constraints.txt")
    if ! DS_BUILD_OPS=0 "$python" -m pip install --quiet --disable-pip-version-check "$torch" "$client" >&2; then
      echo "$client could not be installed" >&2
      rm -rf "${folder:?}/$client"
      continue
    fi
    for package in torchvision torchaudio; do
      if "$python" -m pip show --quiet "$package" 2>/dev/null && ! "$python" -c "import $package" 2>/dev/null; then
        "$python" -m pip uninstall --quiet --yes "$package" >&2
        if [[ $package == torchaudio ]]; then
          site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
          mkdir -p "$site/torchaudio"
          echo '"""An empty stand-in, made by tests/support/client_programs/try_clients.sh."""' >"$site/torchaudio/__init__.py"
        fi
      fi
    done
    touch "$folder/$client/.installed"
  fi
  "$python" -m pip install --quiet --disable-pip-version-check "$root" >&2
done
exec python "$root/tests/support/client_programs/try_clients.py" --venvs "$folder" --work "$folder/work" "${clients[@]}"
