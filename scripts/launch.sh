# Sourced by the scripts that start one command, with the least number of arguments it needs, and the arguments: where
# they are fewer, or ask for help, the head of the script is printed; else its environment is made ready.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
usage_if_asked "${2:-}"
if [ $# -le "$1" ]; then
  usage >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
