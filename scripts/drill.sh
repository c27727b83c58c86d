#!/usr/bin/env bash
# Kill a training again and again, also in the middle of its saves; get it back with `llmtailor merge --run`; resume.
#
#   ./scripts/drill.sh                                 5 kills: the real Trainer, DeepSpeed ZeRO-3, 2 CPU ranks
#   ./scripts/drill.sh --kills 10 --seed 3             more, at other moments
#   ./scripts/drill.sh --policy filter --stage 2       another policy, another stage of ZeRO
#   ./scripts/drill.sh --policy full --other-ranks 2   losses are those of the uninterrupted run then
#   ./scripts/drill.sh --help
#
# At the end it says what was saved and lost. Everything it makes lies in ./drill-run (or --work DIR) and stays there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_venv.sh
source "$here/setup_venv.sh"
exec python "$here/drill.py" "$@"
