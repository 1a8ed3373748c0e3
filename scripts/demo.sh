#!/usr/bin/env bash
# Install into .venv and watch the shipped model solve word problems, with and without lookahead branches. No root needed.
#
#   scripts/demo.sh            PYTHON=python3.12 and NUM_PROBLEMS=60 may be set
#
# The first time it takes about three minutes on two cores, one of them for the installation; later two.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
usage_if_asked "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
.venv/bin/lopa demo --num-problems "${NUM_PROBLEMS:-60}"
