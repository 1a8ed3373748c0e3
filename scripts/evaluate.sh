#!/usr/bin/env bash
# The README's table: baselines and lookahead on the demo model's held-out problems, the same ones for every row.
#
#   scripts/evaluate.sh [PROFILE [RUN]] [--set key=value ...]        default: cpu demo
#
# 500 problems (the README's have --set input.limit=700); on two CPU cores this takes hours, on a GPU with
# --set max_num_requests=350 minutes. Start it again to go on.
set -euo pipefail
profile=cpu run=demo
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then profile=$1; shift; fi
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then run=$1; shift; fi
exec "$(dirname "${BASH_SOURCE[0]}")/sweep.sh" "$profile" "$run" table \
  --set input.limit=500 --set output.path="outputs/evaluate_$(basename "$run" .yaml).jsonl" "$@"
