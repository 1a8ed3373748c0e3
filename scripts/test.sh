#!/usr/bin/env bash
# Install what the tests need into .venv and run those that need no accelerator: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh '[test]'
# Three at a time: many tests wait for processes that they start. A file's tests share what the first of them started.
exec .venv/bin/python -m pytest -n 3 --dist loadfile -m "not cuda and not npu and not sim" "$@"
