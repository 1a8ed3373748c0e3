#!/usr/bin/env bash
# A batch on whole nodes under Slurm. From the root of the checkout, which all nodes see:
#
#   sbatch --nodes=2 --gres=gpu:8  configs/cluster/slurm.sh h200_tp1_bp8 my_run --set mesh.data_parallel_size=2
#   sbatch --nodes=2 --gres=npu:16 configs/cluster/slurm.sh ascend_910c_tp4_bp4 my_run --set mesh.data_parallel_size=2
#
# Ascend: Slurm has no plug-in for its devices, so take nodes as a whole; gres.conf: Name=npu File=/dev/davinci[0-15].
# The environments of CANN and nnal are sourced on each node by the scripts. IFNAME (say eth0) names the interface
# between the nodes where there are several.
#SBATCH --job-name=lopa
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
#SBATCH --output=lopa-%j.log
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: sbatch --nodes=N --gres=... configs/cluster/slurm.sh PROFILE RUN [options of scripts/run_batch.sh]" >&2
  exit 2
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) NNODES=$SLURM_NNODES
if [ -n "${IFNAME:-}" ]; then
  export NCCL_SOCKET_IFNAME=$IFNAME HCCL_SOCKET_IFNAME=$IFNAME GLOO_SOCKET_IFNAME=$IFNAME TP_SOCKET_IFNAME=$IFNAME
fi
# One minute before the limit: end cleanly, and go on in the next allocation. Finished requests are in the output.
stopped=
trap 'stopped=yes; kill -TERM "$running"' TERM
# In single quotes: each node has a SLURM_NODEID of its own.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec scripts/run_batch.sh "$@"' lopa "$@" &
running=$!
code=0
wait "$running" || code=$?
if [ -n "$stopped" ]; then
  wait "$running" || true
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
