"""A part of the study that ends with it: `python -m scripts.lab.study.child PARENT PROGRAM ...` becomes the program.

PARENT is the process number of scripts/lab/study.sh, whose kill -9 is one of the program's too; bash cannot ask for
that.
"""

from __future__ import annotations

import os
import sys

from common.processes import die_with_parent


def main() -> None:
    parent, *program = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):
        sys.exit("study.sh: it ended before this part of it had started")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
