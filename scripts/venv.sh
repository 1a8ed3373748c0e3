# Sourced by demo.sh, test.sh and .ci/run in the checkout: makes .venv with the package and the extras in $1, once.
# Without an NVIDIA GPU the CPU build of torch is enough and much smaller. Where PyPI offers only the CUDA build, point pip
# at the CPU one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/demo.sh
extras=${1:-}
install_shown() { # a line a package, as pip comes to it
  .venv/bin/python -m pip install --no-compile --disable-pip-version-check --progress-bar off "$@" |
    sed -un -E 's/^ *(Collecting [^ ]+|Downloading .*MB\)|Installing collected packages).*/  \1/p' >&2
}
version='import sys; print(sys.version_info[:2])'
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
  { [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -c "$version")" != "$(.venv/bin/python -c "$version")" ]; }; then
  echo "making .venv" >&2
  "${PYTHON:-python3}" -m venv --clear .venv
fi
wanted=$(cat pyproject.toml; echo "$extras"; pwd)
if [ "$(cat ".venv/installed$extras" 2>/dev/null)" != "$wanted" ]; then
  echo "installing into .venv, for a minute or more:" >&2
  if ! .venv/bin/python -c 'import torch' 2>/dev/null && ! command -v nvidia-smi >/dev/null; then
    install_shown "torch==2.13.0"
  fi
  install_shown -e ".$extras"
  echo "  compiling" >&2
  # On all cores, where pip compiles on one; some packages hold files for other Pythons, which do not compile.
  .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
  echo "$wanted" >".venv/installed$extras"
fi
