# Sourced by the other scripts: which Python runs, and the vendor's environment where there is one.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$(command -v python3 || command -v python)
  if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
  if [ -n "${VIRTUAL_ENV:-}" ]; then PYTHON=$VIRTUAL_ENV/bin/python; fi
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
ascend_environment=${ASCEND_ENVIRONMENT:-/usr/local/Ascend/ascend-toolkit/set_env.sh}
if [ -f "$ascend_environment" ]; then
  set +u # the vendor's file reads variables that may not be set
  source "$ascend_environment"
  set -u
fi
if ! "$PYTHON" -c 'from importlib.util import find_spec as f; exit(not all(map(f, ("torch", "tqdm", "pydantic", "typer"))))'; then
  echo "lopa: $PYTHON lacks what lopa needs: activate its environment, set PYTHON, or pip install -e $root" >&2
  exit 2
fi
