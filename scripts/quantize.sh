#!/usr/bin/env bash
# Quantize a checkpoint to 8 bits, in msmodelslim's layout, and say what it cost.
#
#   scripts/quantize.sh MODEL --out DIR [--lora DIR] [--scheme w8a8_dynamic|w8a8] [--calibration FILE.jsonl]
#                       [--smooth ALPHA] [--exclude PATTERN ...] [--report RUN [--profile PROFILE] [--set key=value ...]]
#
# PYTHON names the interpreter. `lopa quantize --help` explains the options.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 2 "$@"
exec "$PYTHON" -m common.commands quantize "$@"
