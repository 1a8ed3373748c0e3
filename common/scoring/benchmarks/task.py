"""A benchmark as a run asks it: with the solved rows that `input` names in front of every question."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import BenchmarkName, InputConfig, fewshot_file
from common.errors import ConfigError
from common.scoring.benchmarks.benchmark import Benchmark, Marks, Prompt, Row
from common.scoring.benchmarks.gsm8k import GSM8K
from common.scoring.benchmarks.humaneval import HUMANEVAL, HUMANEVAL_INSTRUCT, HUMANEVAL_PLUS
from common.scoring.benchmarks.math import MATH, MATH_PLAIN
from common.scoring.benchmarks.mbpp import MBPP, MBPP_PLUS
from common.text import answer_of, before_stop

BENCHMARKS: dict[BenchmarkName, Benchmark] = {
    "gsm8k": GSM8K,
    "math": MATH,
    "math_plain": MATH_PLAIN,
    "humaneval": HUMANEVAL,
    "humaneval_instruct": HUMANEVAL_INSTRUCT,
    "humaneval_plus": HUMANEVAL_PLUS,
    "mbpp": MBPP,
    "mbpp_plus": MBPP_PLUS,
}
_MOST_SHOWN = 12
_FIX = "set input.benchmark to the benchmark of the file, or correct the file"
_TYPES: dict[type, str] = {str: "text", list: "list of texts"}


@dataclass(frozen=True, slots=True)
class BenchmarkTask:
    """`shots`: the solved rows as text. is_chat: asked as the message of a chat."""

    name: BenchmarkName
    benchmark: Benchmark
    shots: str
    is_chat: bool = False

    @property
    def stop(self) -> tuple[str, ...]:
        """Where answers end. An answer to a message ends by itself: what a completion would run into, such as the next
        question or function, is a part of it."""
        return () if self.is_chat else self.benchmark.stop

    def prompt(self, row: Row) -> Prompt:
        return Prompt(self.shots + self.benchmark.ask(row), self.benchmark.begin(row))

    def mark(self, row: Row, text: str) -> Marks:
        """Mark an answer by every rule, the one that decides first. Raises ValueError for a row that no answer can be
        compared with."""
        return self.benchmark.mark(row, answer_of(text))

    def reference(self, row: Row) -> str | None:
        """Return a right answer in the form that is asked for; None for a row that comes without one."""
        begun = self.benchmark.begin(row)
        try:
            if self.is_chat and self.benchmark.program is not None and not begun:
                return f"```python\n{self.benchmark.program(row)}\n```"
            solved = self.benchmark.solve(row).removeprefix(begun)
        except KeyError:
            return None
        return before_stop(solved, self.benchmark.stop).strip("\n")

    def require_row(self, row: Row, where: str) -> None:
        """Raise ConfigError for a row that is none of this benchmark's, or that no answer can be compared with."""
        _require_fields(self.name, self.benchmark.fields, row, where)
        try:
            self.benchmark.require_result(row)
        except ValueError as error:
            raise ConfigError(f"{where} is no row of {self.name}: {error}; {_FIX}") from None


def task_of(config: InputConfig) -> BenchmarkTask | None:
    """Return the task; None where the input is no benchmark. Raises ConfigError for solved rows that are missing or are
    none."""
    if config.benchmark is None:
        return None
    return _task(config.benchmark, config.num_fewshot, config.fewshot_path, config.apply_chat_template)


@functools.cache
def _task(name: BenchmarkName, num_fewshot: int | None, fewshot_path: str | None, is_chat: bool) -> BenchmarkTask:
    benchmark = BENCHMARKS[name]
    count = benchmark.num_fewshot if num_fewshot is None else num_fewshot
    rows = _solved_rows(name, benchmark, count, fewshot_path) if count else []
    shots = "".join(benchmark.ask(row) + benchmark.solve(row) for row in rows)
    return BenchmarkTask(name, benchmark, shots, is_chat)


def _solved_rows(name: BenchmarkName, benchmark: Benchmark, count: int, given: str | None) -> list[Row]:
    if given is None and benchmark.own_shots is None:
        raise ConfigError(
            f"input.fewshot_path: {name} shows {count} solved rows in front of each question: name the JSONL file that "
            "they come from, or set input.num_fewshot to 0"
        )
    path = Path(given) if given is not None else fewshot_file(benchmark.own_shots or "")
    fields = {**(benchmark.fields if given is not None else {}), **benchmark.shot_fields}
    rows: list[Row] = []
    for number, row in _rows(path):
        _require_fields(name, fields, row, f"{path}: line {number}")
        rows.append(row)
        if len(rows) == count:
            return rows
    raise ConfigError(f"{path}: {len(rows)} solved rows, and input.num_fewshot is {count}; lower it, or add rows")


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _row(line, f"{path}: line {number}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise ConfigError(f"{path}: {reason}; set input.fewshot_path to a JSONL file of solved rows") from None


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON ({error}); write one solved row a line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object; write one solved row a line")
    return row


def _require_fields(name: str, fields: Mapping[str, type], row: Mapping[str, Any], where: str) -> None:
    for field, kind in fields.items():
        value = row.get(field)
        is_of_text = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if not isinstance(value, kind) or not is_of_text:
            found = ", ".join(sorted(filter(str.isidentifier, row))[:_MOST_SHOWN]) or "none"
            state = "no" if field not in row else f"no {_TYPES[kind]} in"
            raise ConfigError(f"{where} is no row of {name}: it has {state} `{field}` (its fields: {found}); {_FIX}")
