#!/usr/bin/env bash
# Install into .venv and watch the shipped model solve word problems, with and without lookahead branches. No root needed.
#
#   scripts/demo.sh            PYTHON=python3.12 and NUM_PROBLEMS=60 may be set
#
# Some minutes on two cores; the first time also those of the installation.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
usage_if_asked "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
.venv/bin/lopa demo --num-problems "${NUM_PROBLEMS:-60}"
cat >&2 <<'END'
Lookahead pays in seconds on an accelerator: docs/performance.md. Here lopa is .venv/bin/lopa:
  .venv/bin/lopa chat demo
  .venv/bin/pip install -e '.[server]' && .venv/bin/lopa serve demo
END
