#!/usr/bin/env bash
# The whole study of scripts/lab/study.md on the demo models: every sweep `study_*`, random orders, what scores foresee.
#
#   scripts/lab/study.sh PROFILE [--reduced] [OUT]            OUT: outputs/study unless given
#
# The whole is meant for a GPU. --reduced takes 2 or 4 problems instead of hundreds, and leaves out seeds, number formats,
# policies, most of code and the distilled model: minutes on two CPU cores. It shows that all of it runs; its numbers mean little.
# Start it again to go on. Then `python -m scripts.lab.study.page OUT --docs docs` puts the numbers on the page, and
# `lopa report OUT` draws them. DRY_RUN=true prints what is started.
set -euo pipefail
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
  sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
profile=$1 all_math=700 math=500 code=300 at_once=350 orders=100 problems=20 foreseen=200 alone=60 out=outputs/study reduced=
shift
for argument in "$@"; do
  if [ "$argument" = --reduced ]; then
    reduced=yes all_math=2 math=4 code=4 at_once=4 orders=5 problems=3 foreseen=6 alone=2
  elif [ "${argument#-}" = "$argument" ]; then
    out=$argument
  else
    printf 'study.sh: unknown option %q; there is --reduced\n' "$argument" >&2
    exit 2
  fi
done
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/env.sh
is_dry=false
if dry_run; then is_dry=true; fi

# In the background: a shell that waits hears a signal at once, and what it has started ends with it. A kill -9, which no
# shell hears, ends it through scripts.lab.study.child.
child=
trap 'kill $child 2>/dev/null || true; wait; exit 143' TERM
trap 'kill $child 2>/dev/null || true; wait; exit 130' INT
start() {
  "$PYTHON" -m scripts.lab.study.child $$ "$@" &
  child=$!
  wait "$child"
  child=
}
sweep() { # RUN SWEEP LIMIT AT_ONCE [--set ...]
  local run=$1 name=$2 limit=$3 at_once=$4
  shift 4
  start scripts/sweep.sh "$profile" "$run" "$name" --set input.limit="$limit" --set max_num_requests="$at_once" \
    --set output.path="$out/$run/$name.jsonl" "$@"
}
halves() { # RUN SWEEP PART INPUT LIMIT: PART, such as "head -n 350", says which problems of INPUT
  local half="$out/$1/$2_problems.jsonl"
  if [ "$is_dry" = true ]; then
    printf '%s %q >%q\n' "$3" "$4" "$half"
  else
    mkdir -p "$out/$1"
    $3 "$4" >"$half"
  fi
  sweep "$1" "$2" "$5" "$at_once" --set input.path="$half"
}
part() { # MODULE ...
  if [ "$is_dry" = true ]; then printf '%q ' "$PYTHON" -m "$@" && echo; else start "$PYTHON" -m "$@"; fi
}
parts() { # RUN
  [ -s "$out/part_orders_$1.json" ] || part scripts.lab.study.orders --profile "$profile" --run "$1" \
    --problems "$problems" --orders "$orders" --requests "$at_once" --out "$out/part_orders_$1.json"
  # Four at once: what each branch is sure of is only known of requests that are decoded one after another.
  [ -s "$out/part_foresight_$1.json" ] || part scripts.lab.study.foresight --profile "$profile" --run "$1" \
    --problems "$foreseen" --requests 4 --out "$out/part_foresight_$1.json"
}
sweep demo table "$all_math" "$at_once"
for name in lookahead scores spawn budget boundaries; do
  sweep demo "study_$name" "$math" "$at_once"
done
sweep demo_code study_lookahead "$code" "$at_once"
sweep demo_block block "$math" "$at_once"
sweep demo study_verification "$alone" 1
parts demo
if [ -z "$reduced" ]; then
  sweep demo_code table "$code" "$at_once"
  for name in scores spawn budget boundaries seeds; do
    sweep demo_code "study_$name" "$code" "$at_once"
  done
  sweep demo study_seeds "$math" "$at_once"
  sweep demo study_precision "$math" "$at_once"
  sweep demo_block block_pipelined "$math" "$at_once"
  sweep demo_block_distilled block "$math" "$at_once"
  parts demo_code
  # Policies are developed on the first half of the problems; what held there is run once on the other.
  math_file=models/demo/heldout_math.jsonl code_file=models/demo/heldout_code.jsonl
  halves demo study_policies "head -n 350" $math_file 350
  halves demo_code study_policies "head -n 150" $code_file 150
  halves demo study_confirmed "tail -n +351" $math_file 350
  halves demo_code study_confirmed "tail -n +151" $code_file 150
  # What each costs in seconds, beside passes of a 7B model's shapes.
  sweep demo wall_clock "$all_math" "$at_once"
  sweep demo_code wall_clock "$code" "$at_once"
  [ -s "$out/loads.json" ] || part common.commands bench load dream_7b_dummy --profile "$profile" --answers demo \
    --sweep wall_clock --output "$out/loads.json"
  part scripts.lab.study.clock "$out"/demo/wall_clock "$out"/demo_code/wall_clock "$out/loads.json" \
    --to "$out/wall_clock.json"
fi
part scripts.lab.study.page "$out"
