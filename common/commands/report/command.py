"""`lopa report`: a folder of results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from common.processes import inform

_OptionalPath = Optional[Path]  # noqa: UP045  typer reads this at run time, on Python 3.10 too


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A sweep's folder, or one with several of them.")],
    output: Annotated[
        _OptionalPath,
        typer.Option("--output", "-o", help="The HTML file; Markdown goes beside it. [RESULTS/report.html]"),
    ] = None,
) -> None:
    """Write one page of a study: pictures, and the tables they are drawn from with the conditions of every number.

    It shows accuracy over TPF, TPF over k, tokens per second, which branch won, windows, and, where a result of
    scripts/bench.sh lies in the folder, the time of a step by part. The page is one file without anything external.
    """
    from common.batch import real_file, result_file
    from common.commands.report.page import write_report

    folder = results if results.is_dir() else results.parent
    page = result_file("--output", output or folder / "report.html", beside=".md")
    markdown = real_file(page.with_suffix(".md"))
    write_report(results, page, markdown)
    inform(f"written: {page} and {markdown}", err=True)
