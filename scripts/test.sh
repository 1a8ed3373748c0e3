#!/usr/bin/env bash
# Install what the tests need into .venv and run those that need no accelerator, for some five minutes on two
# cores, and two more the first time, in which the loops of the scheduler are compiled:
#
#   scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
usage_if_asked "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh "${LOPA_EXTRAS:-[test]}"
unset PYTHONDONTWRITEBYTECODE # processes that tests start would each compile the project
# Two files at a time, whose tests share what the first of them started; in their order, since the slowest come first.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not cuda and not npu and not sim" "$@"
