"""A batch run: a JSONL file of requests in, a JSONL file of results out, resumable at any moment.

Every rank runs this. Rank 0 opens the output, decides what is left to do and tells the others before anybody writes;
each data-parallel replica takes its share of that list, and the one leader of a replica appends results as they end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.batch.files import identity, input_and_output, metrics_path
from common.batch.inputs import InputLine, read_lines
from common.batch.output import OutputFile, join_output, read_records, start_output
from common.batch.progress import Progress
from common.batch.records import TextGenerator, records
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError
from common.metrics import DEFINITIONS, fingerprint, summarize, summarize_start
from common.processes import Stopped, global_rank, num_started, share_from_first, wait_for_all

logger = logging.getLogger(__name__)


def run_batch(
    profile: DeviceProfile,
    run: RunConfig,
    build: Callable[[], TextGenerator],
    *,
    overwrite: bool = False,
    retry_errors: bool = False,
) -> dict[str, Any] | None:
    """Decode what is not in the output yet; on rank 0 the metrics of the whole output, also written beside it.

    `build` loads the model; it is called once the files are known to be in order, and not at all if nothing is left.
    Raises ConfigError for files that do not fit the run, Stopped on SIGINT and SIGTERM; finished requests are kept.
    """
    source, target = input_and_output(run)
    lines = read_lines(source)
    output: OutputFile | None = None
    pending: list[int] = []
    if global_rank() == 0:
        output = start_output(Path(target.path), identity(profile, run), overwrite=overwrite, retry_errors=retry_errors)
        done = set() if overwrite else {str(record["id"]) for record in read_records(output.path)}
        pending = [place for place, line in enumerate(lines) if line.key not in done]
        _log_start(lines, pending, output.path)
    try:
        generator = build() if pending or num_started() > 1 else None
        if output is not None:
            output.begin()
        if generator is None:
            return _finish(profile, run, None, Progress(Path(target.path), 0), 0.0)
        pending = share_from_first(pending)
        if output is None and generator.is_leader:
            output = join_output(Path(target.path))
        return _decode(profile, run, generator, lines, pending, output)
    finally:
        if output is not None:
            output.close()


def require_some_finished(run: RunConfig, metrics: dict[str, Any]) -> None:
    """ConfigError if every request of the whole output was refused: no user wants to find that out later."""
    _, target = input_and_output(run)
    if metrics["requests"]["errors"] and not metrics["requests"]["finished"]:
        first = next(record for record in read_records(Path(target.path)) if "error" in record)
        raise ConfigError(
            f"{target.path}: none of {metrics['requests']['errors']} requests could be decoded; correct the input and "
            f"start again with --overwrite (id {first['id']}: {first['error']})"
        )


def _decode(
    profile: DeviceProfile,
    run: RunConfig,
    generator: TextGenerator,
    lines: Sequence[InputLine],
    pending: Sequence[int],
    output: OutputFile | None,
) -> dict[str, Any] | None:
    source, target = input_and_output(run)
    mine = [lines[place] for place in pending[generator.replica :: generator.num_replicas]]
    progress = Progress(Path(target.path), len(pending)) if global_rank() == 0 else None
    started = time.perf_counter()
    try:
        for record in records(generator, mine, source, run.decode.stop):
            if output is not None:
                output.append(record)
            if progress is not None:
                progress.update()
        wait_for_all(progress.update if progress is not None else lambda: None)
    except Stopped as stopped:
        if progress is not None:
            progress.update()
            logger.warning("%s; %d of %d requests are done, start again to resume", stopped, progress.done, len(lines))
            stopped.is_reported = True
        raise
    finally:
        if progress is not None:
            progress.close()
    return None if progress is None else _finish(profile, run, generator, progress, time.perf_counter() - started)


def _log_start(lines: Sequence[InputLine], pending: Sequence[int], path: Path) -> None:
    if len(pending) < len(lines):
        logger.info("%s: resuming, %d of %d requests are done", path, len(lines) - len(pending), len(lines))


def _finish(
    profile: DeviceProfile, run: RunConfig, generator: TextGenerator | None, progress: Progress, wall_s: float
) -> dict[str, Any]:
    _, target = input_and_output(run)
    path = metrics_path(target)
    summary = summarize(read_records(Path(target.path)))
    if generator is None:
        logger.info("%s: every request is done already", target.path)
        metrics = _metrics_of(path, summary)
        if metrics is not None:
            return metrics
    metrics = {
        **summary,
        "this_start": summarize_start(progress.records, wall_s),
        "environment": {
            **fingerprint(),
            **(generator.describe() if generator is not None else {}),
            "profile": profile.name,
            "seed": run.seed,
        },
        "run": run.model_dump(mode="json"),
        "definitions": DEFINITIONS,
    }
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps(metrics, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return metrics


def _metrics_of(path: Path, summary: dict[str, Any]) -> dict[str, Any] | None:
    """The metrics that an earlier start wrote, if they are of these records."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    current = json.loads(json.dumps(summary))
    is_current = isinstance(metrics, dict) and all(metrics.get(key) == value for key, value in current.items())
    return metrics if is_current else None
