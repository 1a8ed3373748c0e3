"""A batch run: a JSONL file of requests in, a JSONL file of results out, resumable at any moment.

Every rank runs this. Rank 0 opens the output, decides what is left to do and tells the others before anybody writes;
data-parallel replicas take the next of that list whenever they have room, and the one leader of a replica appends
results as they end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.batch.cautions import cautions
from common.batch.files import input_and_output, metrics_path, real_file, require_own_metrics, write_whole
from common.batch.identity import identity, recorded_input_bytes
from common.batch.inputs import InputLine, read_input, read_lines, require_shareable
from common.batch.lines import why_unused
from common.batch.output import (
    OutputFile,
    Record,
    every_record,
    join_output,
    read_records,
    records_to_resume,
    start_output,
)
from common.batch.progress import Progress
from common.batch.records import likelihood_records, records
from common.batch.source import is_read_once, shown
from common.config import DeviceProfile, InputConfig, RunConfig
from common.errors import ConfigError
from common.processes import Stopped, global_rank, num_started, share_from_first, take_turns, wait_for_all
from common.scoring import DEFINITIONS, fingerprint, require_markable, summarize, summarize_start

if TYPE_CHECKING:
    from common.generate import Generator

logger = logging.getLogger(__name__)
Answering = Callable[["Generator", Sequence[InputLine], Iterator[int], InputConfig], Iterator[dict[str, Any]]]
_MANY = 100  # requests, of which a user may not know


def run_batch(
    profile: DeviceProfile,
    run: RunConfig,
    build: Callable[[], Generator],
    *,
    overwrite: bool = False,
    retry_errors: bool = False,
    openai: Answering = records,
) -> dict[str, Any] | None:
    """Decode what is not in the output yet; on rank 0 the metrics of the whole output, also written beside it.

    `build` loads the model; it is called once the files are known to be in order, and not at all if nothing is left.
    openai: what answers the lines of a file that has lines of OpenAI's batch files, called as `records` is.
    Raises ConfigError for files that do not fit the run, Stopped on SIGINT and SIGTERM; finished requests are kept.
    """
    source, target = input_and_output(run)
    path = Path(target.path)
    require_shareable(source, num_started())
    output: OutputFile | None = None
    pending: list[int] = []
    found = read_input(source, None if overwrite else recorded_input_bytes(path))
    lines = found.lines
    require_markable([line.fields for line in lines], source, shown(source.path))
    if global_rank() == 0:
        if (reason := why_unused(lines, source)) is not None:
            logger.warning("%s", reason)
        output = start_output(path, identity(profile, run, found), overwrite=overwrite, retry_errors=retry_errors)
    try:
        if output is not None:
            pending = _pending(lines, [] if overwrite else records_to_resume(path), path)
            if len(pending) > _MANY and source.limit is None:
                logger.info("%d requests to decode: --set input.limit=20 takes the first 20 alone", len(pending))
        generator = _build(build, output) if pending or num_started() > 1 else None
        if output is not None:
            output.begin()
        if output is not None and generator is not None:
            for caution in cautions(lines, source, run.decode, generator.tokenizer):
                logger.warning("%s", caution)
        if generator is None:
            return _finish(profile, run, None, Progress(path, 0), 0.0)
        pending = share_from_first(pending)
        if pending and pending[-1] >= len(lines):
            lines = read_lines(source)  # it grew between this rank's look at it and the first one's
        if output is None and generator.is_leader:
            output = join_output(path)
        answering = openai if any(line.is_openai for line in lines) else records
        if source.target_field is not None:
            answering = likelihood_records
        return _decode(profile, run, generator, [lines[index] for index in pending], output, answering)
    finally:
        if output is not None:
            output.close()


def _build(build: Callable[[], Generator], output: OutputFile | None) -> Generator:
    try:
        return build()
    except Exception:
        if output is not None:
            output.discard_empty()
        raise


def check_input(config: InputConfig, num_processes: int = 1) -> None:
    """Check the input before any process starts, unless it can be read only once. Raises ConfigError."""
    require_shareable(config, num_processes)
    if not is_read_once(config.path):
        require_markable([line.fields for line in read_lines(config)], config, shown(config.path))


def require_some_finished(run: RunConfig, metrics: dict[str, Any]) -> None:
    """Raise ConfigError if every request of the whole output was refused."""
    assert run.output is not None, "a run without an output has no metrics"
    path = Path(run.output.path)
    if metrics["requests"]["errors"] and not metrics["requests"]["finished"]:
        first = next(record for record in every_record(path) if "error" in record)
        raise ConfigError(
            f"{path}: none of {metrics['requests']['errors']} requests could be decoded. {first['id']}: "
            f"{first['error'].rstrip('.')}. Correct what it names and start again, with --retry-errors where the lines "
            "of the input are the same, else with --overwrite"
        )


def _decode(
    profile: DeviceProfile,
    run: RunConfig,
    generator: Generator,
    pending: Sequence[InputLine],
    output: OutputFile | None,
    answering: Answering,
) -> dict[str, Any] | None:
    assert run.input is not None and run.output is not None, "input_and_output has checked it"
    turns = take_turns(len(pending))
    progress = Progress(Path(run.output.path), len(pending)) if global_rank() == 0 else None
    started = time.perf_counter()
    try:
        # The others of a replica hear of its requests from its leader.
        mine = turns if generator.is_leader else iter(())
        for record in answering(generator, pending, mine, run.input):
            if output is not None:
                output.append(record)
            if progress is not None:
                progress.update()
        wait_for_all(progress.update if progress is not None else lambda: None)
    except Stopped as stopped:
        if progress is not None:
            progress.recount()
            counts = progress.done, progress.total
            logger.warning("%s; %d of %d requests are done, start again to resume", stopped, *counts)
            stopped.is_reported = True
        raise
    finally:
        if progress is not None:
            progress.close()
    return None if progress is None else _finish(profile, run, generator, progress, time.perf_counter() - started)


def _pending(lines: Sequence[InputLine], earlier: Iterable[Record], path: Path) -> list[int]:
    """Return the indices of the lines that have no record yet."""
    done = {str(record["id"]) for record in earlier}
    pending = [index for index, line in enumerate(lines) if line.key not in done]
    if len(pending) < len(lines):
        logger.info("%s: resuming, %d of %d requests are done", path, len(lines) - len(pending), len(lines))
    return pending


def _finish(
    profile: DeviceProfile, run: RunConfig, generator: Generator | None, progress: Progress, wall_s: float
) -> dict[str, Any]:
    assert run.output is not None, "input_and_output has checked it"
    path, output = metrics_path(run.output), real_file(Path(run.output.path))
    summary = summarize(read_records(output))
    require_own_metrics(path, output)  # once more: another run may have ended meanwhile
    if generator is None:
        logger.info("%s: every request is done already", run.output.path)
        metrics = _metrics_of(path, summary)
        if metrics is not None:
            return {key: value for key, value in metrics.items() if key != "this_start"}  # an earlier start's
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
    write_whole(path, json.dumps(metrics, indent=2, ensure_ascii=False) + "\n")
    return metrics


def _metrics_of(path: Path, summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the metrics that an earlier start wrote, if they are of these records."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    current = json.loads(json.dumps(summary))
    is_current = isinstance(metrics, dict) and all(metrics.get(key) == value for key, value in current.items())
    return metrics if is_current else None
