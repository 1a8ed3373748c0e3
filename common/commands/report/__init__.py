"""The report of a study: what sweeps, runs and benches have left in a folder, as one page of pictures and tables."""

from common.report.page import write_report

__all__ = [
    "write_report",
]
