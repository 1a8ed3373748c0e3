#!/usr/bin/env bash
# The first run on a 910C node, all of it: is every operation right, does the shipped model answer, how long do steps
# take.
#
#   scripts/first_910c_run.sh [FOLDER]        default: outputs/first_910c
#
# Needs 16 devices, nothing to download, and about 40 minutes as a guess (nothing of this has run on a device). A step
# that fails or does not end is noted, and the others go on; only a machine that cannot run the profile at all ends it
# early. What it prints and writes lies in FOLDER and, to be sent back, in FOLDER.tar.gz: also CANN's logs (plog), where
# each process of a step was that did not end, what its ranks were told, and a trace of ten steps with its kernels.
# DRY_RUN=true prints the commands.
#
# LIMIT (1800): the most seconds of a step; TOTAL (10800): of the run, after which no step starts. For a rehearsal
# elsewhere: PROFILE (ascend_910c_tp4_bp4), PROBLEMS (100, of the shipped model's), BENCH_RUN (first_910c), SHAPES and
# BENCH_OPTIONS (of the bench), MODES (npugraph npugraph_ex torchair eager), VARIANTS (prefetch ai_cpu one_order
# attention_auto update_before fused_kv tp2_bp8).
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
usage_if_asked "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=${1:-outputs/first_910c}
profile=${PROFILE:-ascend_910c_tp4_bp4}
modes=${MODES:-npugraph npugraph_ex torchair eager}
variants=${VARIANTS:-prefetch ai_cpu one_order attention_auto update_before fused_kv tp2_bp8}
limit=${LIMIT:-1800}
total=${TOTAL:-10800}
for number in "$limit" "$total"; do
  [[ $number =~ ^[1-9][0-9]{0,8}$ ]] || { printf 'lopa: LIMIT or TOTAL is %q: give whole seconds\n' "$number" >&2 && exit 2; }
done
if [ -e "$out.tar.gz" ] && [ ! -e "$out" ]; then
  printf 'lopa: %q is there and of no earlier run: name another FOLDER, or remove it\n' "$out.tar.gz" >&2
  exit 2
fi
read -ra bench <<<"${BENCH_RUN:-first_910c} ${BENCH_OPTIONS:-} --shapes ${SHAPES:-1x32 1x64 2x32 2x64 2x128}"
source scripts/env.sh
dry=
if dry_run; then dry=true; fi
unset DRY_RUN
summary=()
# Every Python process prints where its threads are when it is aborted, and an error's traceback before its sentence.
export PYTHONFAULTHANDLER=1 LOPA_TRACEBACK=1
ulimit -c 0

of_step() { # NAME: its processes, the youngest first, also those of other sessions
  grep -lsxzF "LOPA_STEP=$1-$$" /proc/[0-9]*/environ | cut -d/ -f3 | sort -rn
}

wanted="RANK|WORLD|^(NODE_|NNODES|MASTER|TORCHELASTIC_RUN_ID|HCCL|GLOO|TP_SOCKET|ASCEND|LCCL|TASK_QUEUE|PYTORCH_NPU"
wanted+="|CPU_AFF|OMP|LD_)"
variables() { # NAME: what each of its ranks has been told
  local pid found
  for pid in $(of_step "$1"); do
    found=$(tr '\0' '\n' <"/proc/$pid/environ" | grep -E "$wanted" | sort)
    [[ $found == *TORCHELASTIC_RUN_ID* ]] || continue
    echo "-- process $pid"
    echo "$found"
    grep Cpus_allowed_list "/proc/$pid/status"
  done
}

stacks() { # NAME: where each of its processes is. py-spy leaves them running; else they are aborted, children first.
  local pid spy pids
  pids=$(of_step "$1")
  spy=$(command -v py-spy || command -v "$(dirname "$PYTHON")/py-spy")
  # None may react to another's end before it has said where it is.
  [ -n "$spy" ] || xargs -r kill -STOP <<<"$pids" 2>/dev/null
  for pid in $pids; do
    [[ $(readlink "/proc/$pid/exe") == *python* ]] || continue
    printf -- '-- stack of process %s: ' "$pid"
    tr '\0' ' ' <"/proc/$pid/cmdline"
    echo
    if [ -n "$spy" ]; then
      timeout 60 "$spy" dump --pid "$pid"
    else
      kill -ABRT "$pid" && kill -CONT "$pid"
      sleep 0.5
    fi
  done
  [ -n "$spy" ] || xargs -r kill -CONT <<<"$pids" 2>/dev/null # a shell ends once it runs
}

step() { # NAME COMMAND...: what it prints goes to NAME.txt as well
  local name=$1 code command ends result=ok now='' before=''
  shift
  if [ -n "$dry" ]; then
    printf '%q ' "$@"
    echo
    return 0
  fi
  if [ "$SECONDS" -ge "$total" ]; then
    summary+=("$(printf '%-21s not started: the whole run may take %s s' "$name" "$total")")
    return 1
  fi
  ends=$((SECONDS + limit < total ? SECONDS + limit : total))
  echo "== $name"
  # Through a file: what outlives the step would keep a pipe open.
  : >"$out/$name.txt"
  mkdir -p "$out/plog/$name" # CANN need not make it
  LOPA_STEP=$name-$$ ASCEND_PROCESS_LOG_PATH=$out/plog/$name "$@" >>"$out/$name.txt" 2>&1 &
  command=$!
  tail -n +1 -f -s 0.2 --pid="$command" "$out/$name.txt" &
  while kill -0 "$command" 2>/dev/null && [ "$SECONDS" -lt "$ends" ]; do
    sleep 0.5
    if [ $((SECONDS % 5)) = 0 ] && { [ -z "$now" ] || [ "$now" != "$before" ]; }; then # until all ranks have come
      before=$now now=$(variables "$name" 2>/dev/null)
      [ -z "$now" ] || echo "$now" >"$out/$name.ranks.txt"
    fi
  done
  if kill -0 "$command" 2>/dev/null; then
    result="no end within $limit s, see $out/$name.txt"
    [ "$ends" -lt "$total" ] || result="no end within the run's $total s, see $out/$name.txt"
    stacks "$name" >>"$out/$name.txt" 2>&1
    kill "$command" 2>/dev/null
    for _ in {1..180}; do kill -0 "$command" 2>/dev/null && sleep 0.5; done
    kill -9 "$command" 2>/dev/null
  fi
  wait "$command"
  code=$?
  wait
  # Nobody may hold devices that the next step needs.
  of_step "$name" | xargs -r kill -9 2>/dev/null
  # HCCL asks for 10 s after processes that were killed (EJ0001).
  [ "$result" = ok ] || [ "$SECONDS" -ge "$total" ] || sleep 10
  [ "$code" = 0 ] || [ "$result" != ok ] || result="exit code $code, see $out/$name.txt"
  summary+=("$(printf '%-21s %s' "$name" "$result")")
  return "$code"
}

finish() {
  jobs -p | xargs -r kill 2>/dev/null
  printf '\n'
  printf '%s\n' "${summary[@]}" | tee "$out/summary.txt"
  tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
  printf 'Send back %q\n' "$out.tar.gz"
}

if [ -z "$dry" ]; then
  mkdir -p "$out/plog" || exit 2
  out=$(cd "$out" && pwd) || exit 2
  trap finish EXIT
  trap 'exit 130' INT TERM
fi
# What each tool says of this machine; one that is missing, or needs root, says so.
machine='ask() { echo "-- $*"; timeout 60 "$@" 2>&1 || echo "(exit code $?)"; }
ask npu-smi info
ask npu-smi info -t topo
for i in {0..7}; do ask npu-smi info -t health -i $i; done
for i in {0..15}; do for what in link net_health ip tls; do ask hccn_tool -i $i -$what -g; done; done
ask cat /etc/hccn.conf /usr/local/Ascend/driver/version.info /usr/local/Ascend/nnal/atb/latest/version.info
ask bash -c "cat ${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/cann}/*/ascend_toolkit_install.info"
ask grep . /proc/sys/net/ipv4/ip_local_port_range /proc/sys/net/ipv4/ip_local_reserved_ports
ask bash -c "ls -l /dev/davinci*; id"
ask lscpu
ask numactl -H
ask grep -E "Cpus_allowed_list|Mems_allowed_list" /proc/self/status
ask bash -c "cat /sys/fs/cgroup/cpuset.cpus.effective || cat /sys/fs/cgroup/cpuset/cpuset.cpus"
ask free -h
ask df -h /dev/shm
ask bash -c "dmesg | tail -n 200"
ask "$0" -m pip list
env | grep -E "$1" | sort; true'
step machine bash -c "$machine" "$PYTHON" "$wanted"
step doctor "$PYTHON" -m common.commands doctor --profile "$profile" || exit 2
step selftest "$PYTHON" -m common.commands doctor --profile "$profile" --selftest
# What is wrong is known from here on; what it does to answers and times is worth knowing too.
warn=(--set npu.selftest=warn)
one_device=(--set mesh.tensor_parallel_size=1 --set mesh.branch_parallel_size=1)
demos=()
for mode in $modes bf16; do
  settings=(--set "graph.mode=$mode")
  [ "$mode" = bf16 ] && settings=(--set graph.mode=npugraph --set quantization=null)
  demos+=("$out/demo_$mode.jsonl")
  step "demo_$mode" scripts/run_batch.sh "$profile" demo_block_causal --overwrite "${warn[@]}" "${one_device[@]}" \
    "${settings[@]}" --set input.limit="${PROBLEMS:-100}" --set output.path="${demos[-1]}"
done
same='import json, sys
from pathlib import Path
paths = [path for path in sys.argv[1:] if Path(path).exists()]
texts = [{json.loads(line)["id"]: json.loads(line).get("text") for line in open(path)} for path in paths]
for path, found in zip(paths[1:], texts[1:]):
    equal = sum(texts[0][key] == found.get(key) for key in texts[0])
    print(f"{path}: {equal} of {len(texts[0])} texts are those of {paths[0]}")'
step same_texts "$PYTHON" -c "$same" "${demos[@]}"
for mode in $modes; do
  step "bench_$mode" scripts/bench.sh "$profile" "${bench[@]}" "${warn[@]}" --set "graph.mode=$mode" \
    --output "$out/bench_$mode.json"
done
few=(--no-mixes --requests 1 --steps 3 "${warn[@]}" --set graph.mode=npugraph)
step trace scripts/bench.sh "$profile" "${bench[@]}" "${few[@]}" --profile-trace "$out/trace"
# HCCL says in its log which algorithm it takes for a collective of which size.
step algorithms env ASCEND_MODULE_LOG_LEVEL=HCCL=1 scripts/bench.sh "$profile" "${bench[@]}" "${few[@]}"
if [ -z "$dry" ]; then
  grep -rhoE "(SelectAlg|algName|AlgType|opExpansionMode).*" "$out/plog/algorithms" 2>/dev/null | sort | uniq -c |
    sort -rn | head -n 2000 >"$out/algorithms.hccl.txt"
  rm -rf "$out/plog/algorithms" # gigabytes, of which these lines are wanted
fi
for variant in $variants; do
  settings=(--set graph.mode=npugraph) variables=()
  case $variant in
  prefetch) settings+=(--set npu.weight_prefetch_mb=18) ;;
  ai_cpu) variables=(HCCL_OP_EXPANSION_MODE=AI_CPU) ;; # who expands a collective: else AIV, by the profile
  one_order) variables=(HCCL_DETERMINISTIC=true) ;; # of sums: else any, by the profile
  attention_auto) settings+=(--set npu.attention=auto) ;;
  update_before) settings+=(--set npu.length_updates=before) ;; # else after the launch
  fused_kv) settings+=(--set kernels=triton) ;; # split, rotation and KV write in one kernel of Triton-Ascend
  tp2_bp8) settings+=(--set mesh.tensor_parallel_size=2 --set mesh.branch_parallel_size=8) ;;
  esac
  step "bench_$variant" env "${variables[@]}" scripts/bench.sh "$profile" "${bench[@]}" "${warn[@]}" "${settings[@]}" \
    --output "$out/bench_$variant.json"
done
[ -n "$dry" ] && exit 0
[[ "${summary[*]}" != *"exit code"* && "${summary[*]}" != *"no end"* && "${summary[*]}" != *"not started"* ]]
