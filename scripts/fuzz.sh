#!/usr/bin/env bash
# Feed files of settings, input, checkpoints, tokenizers, adapters and quantized folders that no user would write.
#
#   scripts/fuzz.sh MINUTES [pytest arguments]       minutes for each fuzzer; CI draws a few fixed examples of each
#
# A fuzzer is a module test_fuzz_*.py. It fails where anything but success or one sentence comes out, or where a case
# takes longer than 20 s or more than 2 GB. Each prints how many examples it drew. Needs scripts/test.sh's environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
usage_if_asked "$@"
if [ $# -lt 1 ] || ! [[ $1 =~ ^[1-9][0-9]{0,8}$ ]]; then
  usage >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=$(($1 * 60))
shift
for module in $(find tests -name 'test_fuzz_*.py' | sort); do
  num_tests=$(grep -c '^@fuzzed' "$module")
  echo "== $module: $num_tests tests of $((seconds / num_tests)) s"
  LOPA_FUZZ_SECONDS=$((seconds / num_tests)) "${PYTHON:-.venv/bin/python}" -m pytest -q -s "$module" "$@"
done
