"""`lopa parity`: replay golden traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def parity(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Golden traces, JSON.")]) -> None:
    """Replay traces of the published implementation step by step and compare everything.

    Exit 1 if one differs, 2 if one cannot be replayed; the others are replayed all the same.
    """
    from common.decoding import warm_up
    from common.evaluation import replay_files

    warm_up()  # no generator, which has this done, replays them
    raise typer.Exit(replay_files(files))
