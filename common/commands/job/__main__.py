"""`python -m common.commands.job COMMAND ...`"""

import sys

from common.commands.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
