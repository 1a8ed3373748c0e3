# Sourced by the scripts that start one command, with the least number of arguments it needs, and the arguments: where
# they are fewer, or ask for help, the head of the script is printed; else its environment is made ready.
set -euo pipefail
if [ $# -le "$1" ] || [ "$2" = -h ] || [ "$2" = --help ]; then
  sed -n '2,/^source/{/^source/!s/^# \{0,1\}//p}' "${BASH_SOURCE[1]}" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
