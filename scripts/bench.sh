#!/usr/bin/env bash
# How long steps take on this machine, by shape and by part, beside what its memory and matrix units allow.
#
#   scripts/bench.sh PROFILE RUN [--output FILE.json] [--shapes 1x64 8x128 ...] [--steps N]
#                    [--cached N] [--set key=value ...]
#   scripts/bench.sh --compare A.json B.json
#
# RUN's model folder needs config.json only, with load_format: dummy (configs/runs/dream_7b_dummy.yaml). DRY_RUN=true prints
# the command. This is `lopa bench RUN --profile PROFILE` in as many processes as the profile asks for.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 2 "$@"
if [ "$1" = --compare ]; then exec "$PYTHON" -m common.commands bench steps "$@"; fi
exec "$PYTHON" -m common.commands.job bench "$@"
