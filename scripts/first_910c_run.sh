#!/usr/bin/env bash
# The first run on a 910C node, all of it: is every operation right, does the shipped model answer, how long do steps take.
#
#   scripts/first_910c_run.sh [FOLDER]        default: outputs/first_910c
#
# Needs 16 devices, nothing to download, and about 30 minutes as a guess (nothing of this has run on a device). A step that
# fails or does not end is noted, and the others go on; only a machine that cannot run the profile at all ends it early.
# What it prints and writes lies in FOLDER and, to be sent back, in FOLDER.tar.gz. DRY_RUN=true prints the commands.
#
# LIMIT (1800): the most seconds of a step. For a rehearsal elsewhere: PROFILE (ascend_910c_tp4_bp4), PROBLEMS (100, of the
# shipped model's), BENCH_RUN (first_910c), SHAPES and BENCH_OPTIONS (of the bench), MODES (npugraph npugraph_ex torchair
# eager), VARIANTS (prefetch ai_cpu any_order attention_auto update_before fused_kv
# tp2_bp8).
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
usage_if_asked "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=${1:-outputs/first_910c}
profile=${PROFILE:-ascend_910c_tp4_bp4}
modes=${MODES:-npugraph npugraph_ex torchair eager}
variants=${VARIANTS:-prefetch ai_cpu any_order attention_auto update_before fused_kv tp2_bp8}
limit=${LIMIT:-1800}
read -ra bench <<<"${BENCH_RUN:-first_910c} ${BENCH_OPTIONS:-} --shapes ${SHAPES:-1x32 1x64 2x32 2x64 2x128}"
source scripts/env.sh
dry=${DRY_RUN:-}
unset DRY_RUN
summary=()

step() { # NAME COMMAND...: what it prints goes to NAME.txt as well
  local name=$1 code command result=ok
  shift
  if [ -n "$dry" ]; then
    printf '%q ' "$@"
    echo
    return 0
  fi
  echo "== $name"
  # Through a file: what outlives the step would keep a pipe open.
  : >"$out/$name.txt"
  LOPA_STEP=$name-$$ timeout --kill-after=90 "$limit" "$@" >>"$out/$name.txt" 2>&1 &
  command=$!
  tail -n +1 -f -s 0.2 --pid="$command" "$out/$name.txt" &
  wait "$command"
  code=$?
  wait
  # Nobody may hold devices that the next step needs.
  grep -lsxzF "LOPA_STEP=$name-$$" /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r kill -9 2>/dev/null
  case $code in
  0) ;;
  124 | 137) result="no end within $limit s, see $out/$name.txt" ;;
  *) result="exit code $code, see $out/$name.txt" ;;
  esac
  summary+=("$(printf '%-21s %s' "$name" "$result")")
  return "$code"
}

finish() {
  jobs -p | xargs -r kill 2>/dev/null
  tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
  printf '\n'
  printf '%s\n' "${summary[@]}" | tee "$out/summary.txt"
  echo "Send back $out.tar.gz"
}

if [ -z "$dry" ]; then
  mkdir -p "$out" || exit 2
  trap finish EXIT
  trap 'exit 130' INT TERM
fi
machine='npu-smi info; cat /usr/local/Ascend/driver/version.info /usr/local/Ascend/nnal/atb/latest/version.info; "$0" -m pip list
env | grep -E "^(HCCL|GLOO|TP_SOCKET|ASCEND|LCCL|TASK_QUEUE|PYTORCH_NPU|CPU_AFF|OMP)"; true'
step machine bash -c "$machine" "$PYTHON"
step doctor "$PYTHON" -m common.commands doctor --profile "$profile" || exit 2
step selftest "$PYTHON" -m common.commands doctor --profile "$profile" --selftest
# What is wrong is known from here on; what it does to answers and times is worth knowing too.
warn=(--set npu.selftest=warn)
one_device=(--set mesh.tensor_parallel_size=1 --set mesh.branch_parallel_size=1)
demos=()
for mode in $modes bf16; do
  settings=(--set "graph.mode=$mode")
  [ $mode = bf16 ] && settings=(--set graph.mode=npugraph --set quantization=null)
  demos+=("$out/demo_$mode.jsonl")
  step demo_$mode scripts/run_batch.sh "$profile" demo_block_causal --overwrite "${warn[@]}" "${one_device[@]}" \
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
  step bench_$mode scripts/bench.sh "$profile" "${bench[@]}" "${warn[@]}" --set graph.mode=$mode --output "$out/bench_$mode.json"
done
for variant in $variants; do
  settings=(--set graph.mode=npugraph) variables=()
  case $variant in
  prefetch) settings+=(--set npu.weight_prefetch_mb=18) ;;
  ai_cpu) variables=(HCCL_OP_EXPANSION_MODE=AI_CPU) ;; # who expands a collective: else AIV, by the profile
  any_order) variables=(HCCL_DETERMINISTIC=false) ;;
  attention_auto) settings+=(--set npu.attention=auto) ;;
  update_before) settings+=(--set npu.length_updates=before) ;; # else after the launch
  fused_kv) settings+=(--set kernels=triton) ;; # split, rotation and KV write in one kernel of Triton-Ascend
  tp2_bp8) settings+=(--set mesh.tensor_parallel_size=2 --set mesh.branch_parallel_size=8) ;;
  esac
  step bench_$variant env "${variables[@]}" scripts/bench.sh "$profile" "${bench[@]}" "${warn[@]}" "${settings[@]}" \
    --output "$out/bench_$variant.json"
done
[ -n "$dry" ] && exit 0
[[ "${summary[*]}" != *"exit code"* && "${summary[*]}" != *"no end"* ]]
