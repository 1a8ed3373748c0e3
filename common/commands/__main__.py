"""`python -m common.commands`: the same as `lopa`, from a checkout without an installation."""

import signal

# While the rest is being imported Ctrl-C just ends the process; `main` listens to it itself.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from common.commands.main import main  # noqa: E402

main()
