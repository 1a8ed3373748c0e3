"""Does a program pass the assertions that come with a public benchmark? Both run in one cell (`programs`).

The assertions may call the program with anything and hold its results against anything, so they share an interpreter
with it. That the end of them was reached is told by a random text which follows them. A program that leaves
early, prints or ends the process never tells it. One that looks the text up in the interpreter's memory does: hence
what passes runs a second time with an assertion after the others that is false, and is wrong if it passes again.

What is left to a program is to be equal to everything, as in every harness that compares in the same interpreter, or to
look for that last assertion on purpose.
"""

from __future__ import annotations

import secrets

from common.scoring.programs.isolation import isolation
from common.scoring.programs.run import run_program

_FALSE = "assert not 'the end of the assertions'"


def passes(program: str, tests: str, time_limit_s: float) -> bool:
    """Whether `tests`, run after `program`, raise nothing.

    time_limit_s: of the two together, wall and processor time. Raises NotStarted where no program can be run, and
    ConfigError as `isolation()` does.
    """
    source = f"{program}\n{tests}\n"
    return _reaches_end(source, time_limit_s) and not _reaches_end(f"{source}{_FALSE}\n", time_limit_s)


def _reaches_end(source: str, time_limit_s: float) -> bool:
    name, secret = f"end_{secrets.token_hex(8)}", secrets.token_hex(16)
    return run_program(f"{source}def {name}(): return {secret!r}\n", name, [[]], isolation(), time_limit_s) == [secret]
