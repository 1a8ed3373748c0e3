"""Several settings on one loaded model, each a batch run of its own; a table of all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common.batch import input_and_output, print_table, read_lines, read_records, require_some_finished, run_batch
from common.config import RunConfig, Sweep, SweepPoint
from common.errors import ConfigError, as_shell
from common.evaluation.board import Board, Row
from common.processes import Stopped, global_rank, show
from common.scoring import DEFINITIONS

if TYPE_CHECKING:
    from common.generate import Generator

logger = logging.getLogger(__name__)


def evaluate_sweep(
    sweep: Sweep, build: Callable[[], Generator], *, overwrite: bool = False, num_shown: int = 0,
    shown_first: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """Run every point of a sweep of one launch; on rank 0 print and write the table, and return its rows.

    num_shown: of the solved problems of the last point that are printed, those with an id in shown_first before others.

    A point that fails ends this: what is done stays, the board says which point and why, and the next start tries it
    again. Raises ConfigError, EngineError, OSError, and Stopped on SIGINT and SIGTERM.
    """
    points, board = sweep.points, Board(sweep)
    for point in points:
        input_and_output(point.run)
    is_first = global_rank() == 0
    if is_first:
        board.begin(points)
    for index, point in enumerate(points):
        with _noted(board, point, f"{point.name}: point {index + 1} of {len(points)}", is_first):
            _run(board if is_first else None, point, build, overwrite)
    if is_first:
        if num_shown:
            _print_solved(points[-1].run, num_shown, shown_first)
        print_board(board)
    return board.rows() if is_first else []


def print_board(board: Board) -> None:
    """Write the tables of a sweep, and print the first of them."""
    headings, cells, area = board.publish()
    definition = DEFINITIONS["area_under_accuracy"].removeprefix("AUP: ")
    remarks = [] if area is None else [f"AUP {area:.1f}, accuracy and speed in one number: {definition}"]
    folder = board.path.parent
    page = as_shell(["lopa", "report", str(folder)])
    remarks.append(f"written to {folder}/sweep.md, sweep.csv and sweep.json; {page} makes a page of it")
    print_table(headings, cells, remarks)


def _run(board: Board | None, point: SweepPoint, build: Callable[[], Generator], overwrite: bool) -> None:
    retries = board is not None and board.has_failed_before(point.name)
    decode = point.run.decode
    metrics = run_batch(
        point.profile, point.run, lambda: build().with_decode(decode), overwrite=overwrite, retry_errors=retries
    )
    if board is not None and metrics is not None:
        require_some_finished(point.run, metrics)
        board.finish(point.name, metrics)


@contextmanager
def _noted(board: Board, point: SweepPoint, title: str, is_first: bool) -> Iterator[None]:
    """Note on the board what becomes of the point. A disk without room for that does not hide why the point failed."""
    if not is_first:
        yield
        return
    seconds = board.seconds_left()
    logger.info(
        "%s%s",
        title,
        "" if seconds is None else f", ETA {timedelta(seconds=round(seconds))} if all points take as long",
    )
    board.run(point.name)
    try:
        yield
    except Stopped:
        _try(lambda: board.wait(point.name))
        raise
    except Exception as error:
        sentence = " ".join(str(error).split())
        _try(lambda: board.fail(point.name, sentence))
        raise


def _try(note: Callable[[], None]) -> None:
    try:
        note()
    except ConfigError as error:
        logger.warning("%s", error)


def _print_solved(run: RunConfig, count: int, first: Sequence[str]) -> None:
    source, target = input_and_output(run)
    question_of = {line.key: line.fields.get("question", "") for line in read_lines(source)}
    solved = [record for record in read_records(Path(target.path)) if record.get("correct")]
    for record in sorted(solved, key=lambda record: record["id"] not in first)[:count]:
        show(f"\n{question_of.get(str(record['id']), '')}\n\n{record['text'].strip()}")
        print(f"-- {record['effective_tokens']} tokens in {record['steps']} forward passes")
    print()
