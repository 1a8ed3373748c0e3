#!/usr/bin/env bash
# Install into .venv and watch the shipped model solve word problems, with and without lookahead branches. No root needed.
#
#   scripts/demo.sh            PYTHON=python3.12 and NUM_PROBLEMS=60 may be set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
.venv/bin/lopa demo --num-problems "${NUM_PROBLEMS:-60}"
