"""A batch run: a JSONL file of requests in, a JSONL file of results out, resumable at any moment.

Every rank runs this. Rank 0 opens the output, decides what is left to do and tells the others before anybody writes;
each data-parallel replica takes its share of that list, and the one leader of a replica appends results as they end.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.config import ConfigError, DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.inputs import InputLine, TokenizerLike, digest_prefix, prompt_or_reason, read_lines
from common.launch import global_rank, num_started, share_from_first, wait_for_all
from common.metrics import DEFINITIONS, fingerprint, request_record, summarize, summarize_start
from common.output import (
    OutputFile,
    decode_identity,
    join_output,
    read_records,
    recorded_identity,
    sidecar_path,
    start_output,
)
from common.progress import Progress
from common.request import Completion, GenerationRequest, Rejection
from common.stop import Stopped

logger = logging.getLogger(__name__)


class TextGenerator(Protocol):
    """What a batch run needs of `common.generate.Generator`."""

    is_leader: bool
    replica: int
    num_replicas: int

    @property
    def tokenizer(self) -> TokenizerLike: ...

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]: ...

    def describe(self) -> dict[str, Any]: ...


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


def input_and_output(run: RunConfig) -> tuple[InputConfig, OutputConfig]:
    """Where requests come from and results go. Raises ConfigError if one is missing or would destroy the other."""
    if run.input is None:
        raise ConfigError("the run file has no input section: add input.path, a JSONL file with one request a line")
    if run.output is None:
        raise ConfigError("the run file has no output section: add output.path, the JSONL file for the results")
    target = Path(run.output.path)
    _require_file("output.path", target)
    _require_file("output.metrics_path", metrics_path(run.output))
    paths = [Path(run.input.path), target, metrics_path(run.output), sidecar_path(target)]
    if any(_is_same_file(one, other) for one, other in itertools.combinations(paths, 2)):
        raise ConfigError(
            "input.path, output.path, output.metrics_path and the .run.json beside output.path must be different files"
        )
    return run.input, run.output


def _require_file(setting: str, path: Path) -> None:
    """ConfigError unless this is, or can become, a file."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
    if path.is_dir():
        raise ConfigError(f"{setting} {path} is a folder: name a file in it")
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{setting} {path} cannot be written: choose a place that is writable")


def _is_same_file(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def metrics_path(output: OutputConfig) -> Path:
    return Path(output.metrics_path) if output.metrics_path else Path(output.path).with_suffix(".metrics.json")


def identity(profile: DeviceProfile, run: RunConfig) -> dict[str, Any]:
    """What the results depend on. Mesh and batch size are not in it: they change the speed, not the tokens."""
    source, target = input_and_output(run)
    before = recorded_identity(Path(target.path)) or {}
    # Only what was there at the first start is compared: lines may be added to the input between two starts.
    num_bytes = before.get("input_bytes")
    length, digest = digest_prefix(Path(source.path), num_bytes if isinstance(num_bytes, int) else None)
    return {
        "model": run.model,
        "lora_path": run.lora_path,
        "load_format": run.load_format,
        "seed": run.seed,
        **decode_identity(run.decode),
        "input.prompt_template": source.prompt_template,
        "input.add_bos_token": source.add_bos_token,
        "input_bytes": length,
        "input_sha256": digest,
        "dtype": profile.dtype,
        "quantization": profile.quantization,
    }


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
        for record in _records(generator, mine, source, run.decode.stop):
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


def _records(
    generator: TextGenerator, lines: Sequence[InputLine], source: InputConfig, stops: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The output lines of these requests, as they end."""
    line_of = {line.key: line for line in lines}
    refused: list[dict[str, Any]] = []
    for result in generator.generate(_requests(lines, source, generator.tokenizer, refused)):
        line = line_of[result.id]
        if isinstance(result, Rejection):
            yield {"id": line.id, "error": result.reason}
        elif generator.is_leader:
            yield _scored(line, result, _text(result, generator.tokenizer, stops))
        yield from _drain(refused)
    yield from _drain(refused)


def _requests(
    lines: Iterable[InputLine], source: InputConfig, tokenizer: TokenizerLike, refused: list[dict[str, Any]]
) -> Iterator[GenerationRequest]:
    for line in lines:
        prompt = prompt_or_reason(line, source, tokenizer)
        if isinstance(prompt, str):
            refused.append({"id": line.id, "error": prompt})
        else:
            yield GenerationRequest(line.key, prompt)


def _drain(refused: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while refused:
        yield refused.pop(0)


def _text(completion: Completion, tokenizer: TokenizerLike, stops: Sequence[str]) -> str:
    text = tokenizer.decode(list(completion.token_ids))
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def _scored(line: InputLine, completion: Completion, text: str) -> dict[str, Any]:
    record = request_record(line.id, text, completion)
    if isinstance(line.fields.get("kind"), str):
        record["kind"] = line.fields["kind"]
    if is_checkable(line):
        record |= _mark(line, text)
    return record


def _mark(line: InputLine, text: str) -> dict[str, Any]:
    from common.scoring import score

    try:
        return {"correct": score(line.fields, text)}
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        # The answer in the input is not one that can be compared with; the completion is as good as any other.
        return {"unscored": f"{type(error).__name__}: {error}"}


def is_checkable(line: InputLine) -> bool:
    """Whether common.scoring can tell right from wrong for this line."""
    if line.fields.get("kind") == "code":
        return all(key in line.fields for key in ("entry_point", "inputs", "expected"))
    answer = line.fields.get("answer")
    return "final" in line.fields or (isinstance(answer, str) and "####" in answer)


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
