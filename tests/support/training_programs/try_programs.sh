#!/usr/bin/env bash
# Train with real training programs and the saver, kill them, and start them again; prints a table.
#
#   tests/support/training_programs/try_programs.sh                  TRL, LLaMA-Factory, axolotl, ms-swift and Lightning
#   tests/support/training_programs/try_programs.sh axolotl trl      these only
#
#   LLMTAILOR_PROGRAMS  the folder for a virtual environment of each program, and for what they train
#                       (default: .venv-programs in the repository)
#   PYTHON              the interpreter to make them with (default: python3)
#
# Each environment takes some gigabytes and minutes, because the programs pin different versions of everything. No GPU is
# needed. The head of scripts/constraints.txt says how to get torch's small CPU build, and torchvision's and torchaudio's
# with it. Where pip has only those for a GPU, they can't be imported beside a torch for the CPU. They are removed then,
# and torchaudio, which LLaMA-Factory imports but this training does not use, is replaced by an empty module.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
folder=${LLMTAILOR_PROGRAMS:-$root/.venv-programs}
programs=("$@")
((${#programs[@]})) || programs=(trl llamafactory axolotl ms-swift lightning)

source "$root/scripts/setup_venv.sh"
mkdir -p "$folder"
for program in "${programs[@]}"; do
  python=$folder/$program/bin/python
  if [[ ! -e $folder/$program/.installed ]]; then
    echo "Installing $program in $folder/$program" >&2
    "${PYTHON:-python3}" -m venv "$folder/$program"
    torch=$(grep '^torch==' "$root/scripts/constraints.txt")
    if ! DS_BUILD_OPS=0 "$python" -m pip install --quiet --disable-pip-version-check "$torch" "$program" >&2; then
      echo "$program could not be installed" >&2
      rm -rf "${folder:?}/$program"
      continue
    fi
    for package in torchvision torchaudio; do
      if "$python" -m pip show --quiet "$package" 2>/dev/null && ! "$python" -c "import $package" 2>/dev/null; then
        "$python" -m pip uninstall --quiet --yes "$package" >&2
        if [[ $package == torchaudio ]]; then
          site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
          mkdir -p "$site/torchaudio"
          echo '"""An empty stand-in, made by tests/support/training_programs/try_programs.sh."""' >"$site/torchaudio/__init__.py"
        fi
      fi
    done
    touch "$folder/$program/.installed"
  fi
  "$python" -m pip install --quiet --disable-pip-version-check "$root" >&2
done
exec python "$root/tests/support/training_programs/try_programs.py" --venvs "$folder" --work "$folder/work" "${programs[@]}"
