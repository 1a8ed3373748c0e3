#!/usr/bin/env bash
# Install into .venv and watch the shipped model solve word problems, with and without lookahead branches. No root needed.
#
#   scripts/demo.sh            PYTHON=python3.12 and NUM_PROBLEMS=60 may be set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
echo "Word problems that the model has not seen, decoded twice: without and with lookahead branches." >&2
.venv/bin/lopa evaluate --profile cpu demo demo --overwrite --show 3 \
  --set input.limit="${NUM_PROBLEMS:-60}" --set output.path=outputs/demo.jsonl
echo "
Lookahead needs fewer forward passes for the same answers, each of k + 1 times the arithmetic. A GPU or NPU has that to
spare while it reads the weights; a CPU has not, so watch TPF and steps here rather than seconds."
