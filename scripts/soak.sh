#!/usr/bin/env bash
# Hours of mixed load on a server and on batch runs, with one fault after another: kills, stops, a disk that is full or
# frozen, a clock that jumps, bad input. Counts what was lost or doubled, which has to be 0, and what was left behind.
#
#   scripts/soak.sh HOURS [--profile cpu] [--out outputs/soak] [--replicas 2] [--rate 0.8] [--every 45] [--share 0.3]
#
# Results go to soak.json in the folder after each fault; scripts/lab/soak_page.py puts them into docs/reliability.md.
# One GPU: scripts/soak.sh 0.33 --profile h200_tp1_bp1 --replicas 1 --rate 20 --lines 400. As root it gets a small disk and a
# space of processes of its own, so that nothing is left whatever ends it. Needs scripts/test.sh's environment.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 0 "$@"
soak=("$PYTHON" -m tests.soak "$@")
apart=(unshare --mount --pid --fork --kill-child --mount-proc --propagation private)
# The inner shell takes the orphans of what is killed, as the first process of a machine does. All of it is a group of
# its own, to which this shell hands a signal that it gets: `unshare` heeds none.
if ! "${apart[@]}" true 2>/dev/null; then exec "${soak[@]}"; fi
set -m
"${apart[@]}" bash -c '"$@"; exit $?' soak "${soak[@]}" &
trap 'kill -INT -- -$!' INT TERM
while wait $! && code=0 || code=$?; kill -0 $! 2>/dev/null; do :; done
exit $code
