"""Is an answer right? By the line's own result, or by the rules of the benchmark that the line is a row of.

An answer that is a program is run to mark it, which nobody does by accident: `input.run_generated_code` says yes or no.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.batch.inputs import InputLine
from common.batch.source import shown
from common.benchmarks import task_of
from common.config import InputConfig
from common.errors import ConfigError

_NOT_RUN = "input.run_generated_code is false, and the answer is a program"


def require_markable(lines: Sequence[InputLine], source: InputConfig) -> None:
    """ConfigError if marking would run generated programs and nobody has said whether it may, or needs a library that
    this machine lacks."""
    task = task_of(source)
    if task is not None and not task.benchmark.runs_code:
        task.benchmark.scored_by()
    if source.run_generated_code is None and any(is_program(line, source) for line in lines):
        raise ConfigError(
            f"{shown(source.path)}: answers are programs, and marking them means running what the model writes: allow "
            "it with --allow-code-execution (input.run_generated_code: true), or set that to false to leave the "
            "answers unmarked"
        )


def marks(line: InputLine, text: str, source: InputConfig) -> dict[str, Any]:
    """What a record says of its answer: `correct`, by every rule if there are several, and what of this
    machine it was `scored_by`; or why it is `unscored`."""
    found: dict[str, Any] = {}
    kind = _kind(line, source)
    if kind:
        found["kind"] = kind
    if not is_checkable(line, source):
        return found
    if not source.run_generated_code and is_program(line, source):
        return {**found, "unscored": _NOT_RUN}
    try:
        return {**found, **_marks(line, text, source)}
    except Exception as error:
        # The answer in the input cannot be compared with, or its program not be run: the completion is as good as any
        # other. Only Stopped goes on, which is no Exception.
        return {**found, "unscored": f"{type(error).__name__}: {error}"}


def is_checkable(line: InputLine, source: InputConfig) -> bool:
    """Whether right can be told from wrong for this line."""
    if source.benchmark is not None:
        return True
    if line.fields.get("kind") == "code":
        return all(key in line.fields for key in ("entry_point", "inputs", "expected"))
    answer = line.fields.get("answer")
    return "final" in line.fields or (isinstance(answer, str) and "####" in answer)


def _marks(line: InputLine, text: str, source: InputConfig) -> dict[str, Any]:
    from common.metrics import program_scorer, score

    task = task_of(source)
    if task is None:
        found: dict[str, Any] = {"correct": score(line.fields, text)}
        return {**found, "scored_by": program_scorer()} if is_program(line, source) else found
    by_rule = task.mark(line.fields, text)
    found = {"correct": next(iter(by_rule.values()))}
    if len(by_rule) > 1:
        found["by_rule"] = by_rule
    scored_by = task.benchmark.scored_by()
    return {**found, "scored_by": scored_by} if scored_by else found


def is_program(line: InputLine, source: InputConfig) -> bool:
    """Whether marking its answer would run what the model wrote."""
    task = task_of(source)
    if task is not None:
        return task.benchmark.runs_code
    return line.fields.get("kind") == "code" and is_checkable(line, source)


def _kind(line: InputLine, source: InputConfig) -> str | None:
    task = task_of(source)
    if task is not None:
        return task.benchmark.kind(line.fields) or None
    kind = line.fields.get("kind")
    return kind if isinstance(kind, str) else None
