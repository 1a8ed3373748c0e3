#!/usr/bin/env bash
# Decode a file of requests, on one process or many, on CUDA, Ascend or CPU. Start it again to resume.
#
#   scripts/run_batch.sh PROFILE RUN [--set key=value ...] [--overwrite] [--retry-errors] [--ray ADDRESS|local --replicas N]
#
# PROFILE and RUN are YAML files, or the names of files in configs/profiles and configs/runs. For several nodes start it
# on each of them with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. DRY_RUN=true prints the command. Devices are those of
# CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES. PYTHON names the interpreter. This is `lopa run RUN --profile PROFILE`
# in as many processes as the profile asks for; with --ray in N actors of a Ray cluster, each with the profile's devices
# (docs/cluster.md).
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 2 "$@"
exec "$PYTHON" -m common.commands.job run "$@"
