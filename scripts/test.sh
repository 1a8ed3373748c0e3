#!/usr/bin/env bash
# Install what the tests need into .venv and run those that need no accelerator: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh '[test]'
exec .venv/bin/python -m pytest -m "not cuda and not npu and not sim" "$@"
