"""Is an answer right? By the row's own result, or by the rules of the benchmark that it is a row of.

An answer that is a program is run to mark it, which nobody does by accident: `input.run_generated_code` says yes or no.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.config import InputConfig
from common.errors import ConfigError
from common.scoring.benchmarks.benchmark import Row
from common.scoring.benchmarks.task import task_of
from common.scoring.own_results import score
from common.scoring.programs.isolation import isolation, program_scorer

_NOT_RUN = "input.run_generated_code is false, and the answer is a program"


def require_markable(rows: Iterable[Row], source: InputConfig, where: str) -> None:
    """Raise ConfigError if marking would run generated programs and nobody has said whether it may, or this machine
    cannot confine them; or if it needs a library that this machine lacks."""
    task = task_of(source)
    if task is not None and not task.benchmark.runs_code:
        task.benchmark.scored_by()
    if source.run_generated_code is False or not any(is_program(row, source) for row in rows):
        return
    if source.run_generated_code is None:
        raise ConfigError(
            f"{where}: answers are programs, and marking them means running what the model writes: allow it with "
            "--allow-code-execution (input.run_generated_code: true), or set that to false to leave the answers "
            "unmarked"
        )
    isolation()


def marks(row: Row, text: str, source: InputConfig) -> dict[str, Any]:
    """Return what a record says of its answer: `correct`, by every rule if there are several, and what of this
    machine it was `scored_by`; or why it is `unscored`."""
    found: dict[str, Any] = {}
    kind = _kind(row, source)
    if kind:
        found["kind"] = kind
    if not is_checkable(row, source):
        return found
    if not source.run_generated_code and is_program(row, source):
        return {**found, "unscored": _NOT_RUN}
    try:
        return {**found, **_marks(row, text, source)}
    except Exception as error:
        # The answer in the input cannot be compared with, or its program not be run: the completion is as good as any
        # other. Only Stopped goes on, which is no Exception.
        return {**found, "unscored": f"{type(error).__name__}: {error}"}


def is_checkable(row: Row, source: InputConfig) -> bool:
    """Whether right can be told from wrong for this row."""
    if source.benchmark is not None:
        return True
    if row.get("kind") == "code":
        return all(key in row for key in ("entry_point", "inputs", "expected"))
    answer = row.get("answer")
    return "final" in row or (isinstance(answer, str) and "####" in answer)


def _marks(row: Row, text: str, source: InputConfig) -> dict[str, Any]:
    task = task_of(source)
    if task is None:
        found: dict[str, Any] = {"correct": score(row, text)}
        return {**found, "scored_by": program_scorer()} if is_program(row, source) else found
    by_rule = task.mark(row, text)
    found = {"correct": next(iter(by_rule.values()))}
    if len(by_rule) > 1:
        found["by_rule"] = by_rule
    scored_by = task.benchmark.scored_by()
    return {**found, "scored_by": scored_by} if scored_by else found


def is_program(row: Row, source: InputConfig) -> bool:
    """Whether marking its answer would run what the model wrote."""
    task = task_of(source)
    if task is not None:
        return task.benchmark.runs_code
    return row.get("kind") == "code" and is_checkable(row, source)


def _kind(row: Row, source: InputConfig) -> str | None:
    task = task_of(source)
    if task is not None:
        return task.benchmark.kind(row) or None
    kind = row.get("kind")
    return kind if isinstance(kind, str) else None
