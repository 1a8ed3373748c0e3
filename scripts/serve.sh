#!/usr/bin/env bash
# Answer requests over HTTP, as OpenAI's API does, on one process or many, on CUDA, Ascend or CPU.
#
#   scripts/serve.sh PROFILE RUN [--host H] [--port N] [--api-key-file F] [--set key=value ...]
#
# PROFILE and RUN are YAML files, or the names of files in configs/profiles and configs/runs. SIGTERM lets requests finish,
# a second one ends at once. DRY_RUN=true prints the command. Devices are those of CUDA_VISIBLE_DEVICES or
# ASCEND_RT_VISIBLE_DEVICES. PYTHON names the interpreter. This is `lopa serve RUN --profile PROFILE` in as many processes
# as the profile asks for.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 2 "$@"
exec "$PYTHON" -m common.commands.job serve "$@"
