"""A batch run: a JSONL file of requests in, a JSONL file of results out, resumable at any moment."""

from common.batch.files import input_and_output, kept_as_lines, metrics_path, real_file, result_file, write_whole
from common.batch.inputs import InputLine, parse_line, read_lines, require_shareable
from common.batch.lines import LineRequests, prompt_or_reason
from common.batch.output import read_records, write_table
from common.batch.records import answered, refused, unreadable
from common.batch.report import accuracy, meanings, number, print_summary, print_table, sweep_table
from common.batch.run import check_input, require_some_finished, run_batch

__all__ = [
    "InputLine",
    "LineRequests",
    "accuracy",
    "answered",
    "check_input",
    "input_and_output",
    "kept_as_lines",
    "meanings",
    "metrics_path",
    "number",
    "parse_line",
    "print_summary",
    "print_table",
    "prompt_or_reason",
    "read_lines",
    "read_records",
    "real_file",
    "refused",
    "require_shareable",
    "require_some_finished",
    "result_file",
    "run_batch",
    "sweep_table",
    "unreadable",
    "write_table",
    "write_whole",
]
