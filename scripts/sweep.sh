#!/usr/bin/env bash
# Decode under several settings and print a row for each. Start it again to go on.
#
#   scripts/sweep.sh [PROFILE RUN] SWEEP [--row NAME ...] [--retries N] [--set key=value ...] [--overwrite] [--show N]
#                    [--allow-code-execution]
#
# SWEEP is a YAML file, or the name of one in configs/sweeps; PROFILE and RUN as for scripts/run_batch.sh. Both are left
# out where the sweep names its own; `-` in the place of one of them leaves out that one. --row runs one row, --retries
# says how often a failed point is tried again (once). DRY_RUN=true prints what is started. docs/sweeps.md has more.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 1 "$@"
exec "$PYTHON" -m common.commands.job evaluate "$@"
