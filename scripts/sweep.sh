#!/usr/bin/env bash
# Decode one input under several settings and print a row for each. Start it again to go on.
#
#   scripts/sweep.sh PROFILE RUN SWEEP [--set key=value ...] [--overwrite] [--show N]
#
# SWEEP is a YAML file, or the name of one in configs/sweeps; the rest is as for scripts/run_batch.sh. This is `lopa evaluate
# RUN SWEEP --profile PROFILE` in as many processes as the profile asks for.
set -euo pipefail
if [ $# -lt 3 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
  sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$PYTHON" -m common.commands.job evaluate "$@"
