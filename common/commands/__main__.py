"""`python -m common.commands`: the same as `lopa`, from a checkout without an installation."""

from common.commands.main import main

main()
