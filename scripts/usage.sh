# Sourced by the other scripts, whose heads say how they are used.
usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; }
usage_if_asked() { # with the script's first argument
  case "${1:-}" in -h | --help) usage && exit 0 ;; esac
}
