# Sourced by the other scripts: which Python runs, and the vendor's environment where there is one.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$(command -v python3 || command -v python)
  if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
  if [ -n "${VIRTUAL_ENV:-}" ]; then PYTHON=$VIRTUAL_ENV/bin/python; fi
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
dry_run() { # whether commands are to be printed and nothing started
  case ${DRY_RUN:-} in
  1 | [Tt][Rr][Uu][Ee] | [Yy][Ee][Ss] | [Oo][Nn]) return 0 ;;
  '' | 0 | [Ff][Aa][Ll][Ss][Ee] | [Nn][Oo] | [Oo][Ff][Ff]) return 1 ;;
  esac
  printf "lopa: DRY_RUN is %q: set it to true, which prints what would start, or unset it\n" "$DRY_RUN" >&2
  exit 2
}
# Ascend: CANN's own, its compiler's for Triton-Ascend, and nnal's, whose operator writes the KV where CANN lacks one. A
# login shell may have done this; what a cluster starts has none.
ascend=${ASCEND_ROOT:-/usr/local/Ascend}
cann=$ascend/cann # since CANN 8.5
[ -f "$cann/set_env.sh" ] || cann=$ascend/ascend-toolkit
if [ -f "$cann/set_env.sh" ]; then
  set +u # the vendor's files read variables that may not be set
  for file in "$cann/set_env.sh" "$cann/share/info/ascendnpu-ir/bin/set_env.sh" "$ascend/nnal/atb/set_env.sh"; do
    # With an argument of its own: without one a file would read the script's. Only nnal's looks at it.
    # shellcheck disable=SC1090 # on Ascend machines only
    if [ -f "$file" ]; then source "$file" --cxx_abi="${ATB_CXX_ABI:-1}" || true; fi
  done
  set -u
  # In a container nothing else says where the driver's libraries are.
  for folder in driver common; do
    folder=$ascend/driver/lib64/$folder
    if [ -d "$folder" ] && [[ :${LD_LIBRARY_PATH:-}: != *:$folder:* ]]; then
      export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    fi
  done
  # An image preloads it in login shells, if at all.
  jemalloc=${JEMALLOC:-/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2}
  if [ -f "$jemalloc" ] && [[ ${LD_PRELOAD:-} != *jemalloc* ]]; then export LD_PRELOAD=$jemalloc${LD_PRELOAD:+:$LD_PRELOAD}; fi
fi
if ! "$PYTHON" -c 'from importlib.util import find_spec as f; exit(not all(map(f, ("torch", "tqdm", "pydantic", "typer"))))' 2>/dev/null; then
  printf 'lopa: %q lacks what lopa needs: activate its environment, set PYTHON, or pip install -e %q\n' "$PYTHON" "$root" >&2
  exit 2
fi
