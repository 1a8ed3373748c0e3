#!/usr/bin/env bash
# The first run on a 910C node, all of it: is every operation right, does the shipped model answer, how long do steps take.
#
#   scripts/first_910c_run.sh [FOLDER]        default: outputs/first_910c
#
# Needs 16 devices, nothing to download, and about 20 minutes as a guess (nothing of this has run on a device). What it
# prints and writes lies in FOLDER and, to be sent back, in FOLDER.tar.gz. DRY_RUN=true prints the commands.
#
# For a rehearsal elsewhere: PROFILE (ascend_910c_tp4_bp4), PROBLEMS (100, of the shipped model's), BENCH_RUN (first_910c),
# SHAPES and BENCH_OPTIONS (of the bench), MODES (npugraph_ex npugraph torchair eager).
set -uo pipefail
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
  sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-outputs/first_910c}
profile=${PROFILE:-ascend_910c_tp4_bp4}
modes=${MODES:-npugraph_ex npugraph torchair eager}
read -ra bench <<<"${BENCH_RUN:-first_910c} ${BENCH_OPTIONS:-} --shapes ${SHAPES:-1x32 1x64 2x32 2x64 2x128}"
source scripts/env.sh
dry=${DRY_RUN:-}
unset DRY_RUN
summary=()

step() { # NAME COMMAND...: what it prints goes to NAME.txt as well
  local name=$1 code
  shift
  if [ -n "$dry" ]; then
    printf '%q ' "$@"
    echo
    return 0
  fi
  echo "== $name"
  "$@" 2>&1 | tee "$out/$name.txt"
  code=${PIPESTATUS[0]}
  summary+=("$(printf '%-16s %s' "$name" "$([ "$code" = 0 ] && echo ok || echo "exit code $code, see $out/$name.txt")")")
  return "$code"
}

[ -n "$dry" ] || mkdir -p "$out" || exit 2
step doctor "$PYTHON" -m common.commands doctor --profile "$profile" --selftest || exit 2
step machine bash -c 'npu-smi info; "$0" -m pip list; env | grep -E "^(HCCL|ASCEND|TASK_QUEUE|PYTORCH_NPU|CPU_AFF|OMP)"; true' "$PYTHON"
one_device=(--set mesh.tensor_parallel_size=1 --set mesh.branch_parallel_size=1)
demos=()
for mode in $modes bf16; do
  settings=(--set graph.mode=$mode)
  [ $mode = bf16 ] && settings=(--set graph.mode=npugraph --set quantization=null)
  demos+=("$out/demo_$mode.jsonl")
  step demo_$mode scripts/run_batch.sh "$profile" demo_block_causal --overwrite "${one_device[@]}" "${settings[@]}" \
    --set input.limit="${PROBLEMS:-100}" --set output.path="${demos[-1]}"
done
same='import json, sys
texts = [{json.loads(line)["id"]: json.loads(line).get("text") for line in open(path)} for path in sys.argv[1:]]
for path, found in zip(sys.argv[2:], texts[1:]):
    equal = sum(texts[0][key] == found.get(key) for key in texts[0])
    print(f"{path}: {equal} of {len(texts[0])} texts are those of {sys.argv[1]}")'
step same_texts "$PYTHON" -c "$same" "${demos[@]}"
for mode in $modes prefetch; do
  settings=(--set graph.mode=$mode)
  # GE may compile a new shape for longer than a peer waits for a stuck one.
  [ $mode = torchair ] && settings+=(--set collective_timeout_s=900)
  [ $mode = prefetch ] && settings=(--set graph.mode=npugraph_ex --set weight_prefetch_mb=18)
  step bench_$mode scripts/bench.sh "$profile" "${bench[@]}" "${settings[@]}" --output "$out/bench_$mode.json"
done
[ -n "$dry" ] && exit 0
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
printf '\n%s\n' "${summary[@]}"
echo "Send back $out.tar.gz"
[[ "${summary[*]}" != *"exit code"* ]]
