#!/usr/bin/env bash
# Baselines and lookahead on the demo model's held-out problems, the same ones for every row: scripts/sweep.sh with the
# sweep `table`, as in the tables of scripts/lab/study.md.
#
#   scripts/evaluate.sh PROFILE [RUN] [--set key=value ...]        RUN: demo (math) unless given; demo_code
#
# The first 500 problems of math, or all 300 of code. The page has all 700 of math: --set input.limit=700. On two CPU cores
# this takes hours, on a GPU with --set max_num_requests=350 minutes. Start it again to go on.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 1 "$@"
profile=$1 run=demo
shift
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then run=$1; shift; fi
exec "$(dirname "${BASH_SOURCE[0]}")/sweep.sh" "$profile" "$run" table \
  --set input.limit=500 --set output.path="outputs/evaluate_$(basename "$run" .yaml).jsonl" "$@"
