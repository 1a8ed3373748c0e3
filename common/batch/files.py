"""The files of a run: what they are called, and whether they can be read, written and told apart.

A link and the file that it leads to are one output: what stands beside an output stands beside the file itself.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from common import user_files
from common.config import InputConfig, OutputConfig, RunConfig
from common.errors import ConfigError
from common.parquet import columns_of, require_pyarrow

STANDARD_INPUT = "-"
_PARQUET = ".parquet"
_TABLES = (".csv", ".tsv")
_NOT_WRITTEN = (*_TABLES, ".gz", ".bz2", ".xz", ".zst", ".zip")
_PAGE = b"<!doctype html>"
_MOST_BYTES = 2**28  # of a result: what is longer is none
_OF_METRICS = ("requests", "tpf")


def input_and_output(run: RunConfig) -> tuple[InputConfig, OutputConfig]:
    """Return where requests come from and results go. Raises ConfigError if one is missing or would destroy the
    other."""
    if run.input is None:
        raise ConfigError("the run file has no input section: add input.path, a JSONL file with one request a line")
    if run.output is None:
        raise ConfigError("the run file has no output section: add output.path, the JSONL file for the results")
    if run.input.path.endswith(_TABLES):
        raise ConfigError(f"input.path {run.input.path}: requests are JSON lines or Parquet: convert it")
    if run.output.path == STANDARD_INPUT:
        raise ConfigError("output.path -: results go to a file, which the next start resumes; name one")
    if run.output.path.endswith(os.sep):
        raise ConfigError(f"output.path {run.output.path} is a folder: name a file in it")
    if run.output.path.endswith(_NOT_WRITTEN):
        raise ConfigError(
            f"output.path {run.output.path}: answers are JSON lines or Parquet: name it .jsonl or .parquet"
        )
    folders = ("model", run.model), ("tokenizer", run.tokenizer or ""), ("lora_path", run.lora_path or "")
    for setting, path in (("input.path", run.input.path), *folders):
        require_speakable(setting, path)
    target = real_file(Path(run.output.path))
    require_file("output.path", target, ".run.json")
    metrics = metrics_path(run.output)
    require_file("output.metrics_path", metrics)
    link = Path(run.output.path)
    for beside in (sidecar_path(target), link.with_name(link.name + ".run.json")):
        with naming(beside):
            if beside.exists() and not beside.is_file():  # opening a pipe waits for its other end
                raise ConfigError(f"{beside}: no regular file, where a file of the run belongs; remove it")
    paths = [Path(run.input.path), target, metrics, sidecar_path(target)]
    if any(_is_same_file(one, other) for one, other in itertools.combinations(paths, 2)):
        raise ConfigError(
            "input.path, output.path, output.metrics_path and the .run.json beside output.path must be different files"
        )
    _require_one_name(target)
    require_own_metrics(metrics, target)
    if run.output.metrics_path or not sidecar_path(target).exists():  # else they are this output's, damaged or not
        result_file("output.metrics_path", metrics, *_OF_METRICS)
    return run.input, run.output


def kept_as_lines(run: RunConfig, *, overwrite: bool) -> tuple[RunConfig, Path | None]:
    """Return the run with its answers as JSON lines, and the Parquet file that they become; None: none is wanted.

    A Parquet file has no end that could be written on, so NAME.parquet is made of NAME.jsonl once all answers are
    there. Raises ConfigError where it cannot be written, or is there without the lines that a start would resume.
    """
    if run.output is None or not run.output.path.endswith(_PARQUET):
        return run, None
    table, lines = Path(run.output.path), run.output.path.removesuffix(_PARQUET) + ".jsonl"
    require_pyarrow(str(table))
    require_file("output.path", table)
    if run.input is not None and _is_same_file(Path(run.input.path), table):
        raise ConfigError(f"output.path {table} is the input too: choose another file")
    if table.exists() and not _is_table_of_results(table):
        raise ConfigError(f"{table} exists and is not the output of a batch run: choose another output.path")
    if table.exists() and not Path(lines).exists() and not overwrite:
        raise ConfigError(
            f"{table} exists, and {lines}, from which a start resumes, does not: choose another output.path, or pass "
            "--overwrite to start anew"
        )
    return run.model_copy(update={"output": run.output.model_copy(update={"path": lines})}), table


def _is_table_of_results(table: Path) -> bool:
    columns = columns_of(table)
    return "id" in columns and bool({"finish_reason", "error"} & columns)


def real_file(path: Path) -> Path:
    """Return where a link leads, whether or not a file is there yet; any other path as it is. Raises ConfigError."""
    require_speakable("output", str(path))
    try:
        real = path.resolve() if path.is_symlink() else path
        is_path = real.exists() or not path.exists()  # what leads to a pipe, as /dev/stdout, is none
        return real if is_path else path
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the link leads back to itself"
        raise ConfigError(f"{path}: {reason}; choose another name") from None


def require_speakable(setting: str, path: str) -> None:
    """Raise ConfigError for a name that the system cannot be asked about."""
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair
        is_name = False
    if not is_name:
        raise ConfigError(f"{setting} {path!r} is no name of a file: choose another")


def sidecar_path(path: Path) -> Path:
    path = real_file(path)
    return path.with_name(path.name + ".run.json")


def metrics_path(output: OutputConfig) -> Path:
    """Return where the metrics go. Outputs that differ in more than `.jsonl` never share a file."""
    if output.metrics_path:
        return real_file(Path(output.metrics_path))
    path = real_file(Path(output.path))
    return real_file(path.with_name(path.name.removesuffix(".jsonl") + ".metrics.json"))


def write_whole(path: Path, text: str) -> None:
    """Write a file all at once (`common.user_files`). Raises ConfigError naming it.

    Half a surrogate pair, which UTF-8 cannot hold, is written as JSON escapes it.
    """
    with naming(path):
        user_files.write_whole(path, text.encode("utf-8", errors="backslashreplace"))


@contextmanager
def naming(path: Path | str, fix: str = "choose a place that is writable and has room") -> Iterator[None]:
    """Make ConfigErrors that name the file out of OSErrors: the system's own sentence often does not."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; {fix}") from error


def result_file(option: str, path: Path, *keys: str, begin: bytes = _PAGE, beside: str = "") -> Path:
    """Return where a command's result goes: to no file yet, or over an earlier result of the same command.

    keys: what every JSON result of the command has. begin: the first bytes of one that is no JSON. beside: the suffix
    of the tables that are written with it. Raises ConfigError where either cannot be written, or would replace another
    file.
    """
    path = real_file(path)
    require_file(option, path)
    with naming(path, f"choose another {option}"):
        is_there = path.exists() and path.stat().st_size > 0
        if is_there and not _is_result(path, keys, begin):
            raise ConfigError(
                f"{option} {path}: the file is there, and no earlier result of this command: name another, or remove it"
            )
    if not beside:
        return path
    tables = real_file(path.with_suffix(beside))
    if tables == path:
        raise ConfigError(f"{option} {path}: {beside} is for the tables that go beside it: choose another name")
    require_file(option, tables)
    if tables.exists() and not is_there:
        raise ConfigError(f"{option} {path}: its tables would replace {tables}, which is there: choose another name")
    return path


def _is_result(path: Path, keys: Sequence[str], begin: bytes) -> bool:
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES if keys else len(begin))
    if not keys:
        return text.lower() == begin
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= {*keys}


def require_file(setting: str, path: Path, longest_suffix: str = "") -> None:
    """Raise ConfigError unless this is, or can become, a file, with one beside it of a name longer by the suffix."""
    with naming(path, f"choose another {setting}"):
        if path.is_dir():
            raise ConfigError(f"{setting} {path} is a folder: name a file in it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: {setting} is no regular file; name a file")
        folder = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
        if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{setting} {path} cannot be written: choose a place that is writable")
        if path.parent.exists():
            with suppress(FileNotFoundError):  # a name that no file can have is another error
                path.with_name(path.name + longest_suffix).lstat()


def _is_same_file(one: Path, other: Path) -> bool:
    if str(one) == STANDARD_INPUT:
        return _is_standard_input(other)
    # Not Path.resolve, which fails at a link that leads back to itself.
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


def _is_standard_input(path: Path) -> bool:
    try:
        return path.exists() and os.path.samestat(os.fstat(0), path.stat())
    except OSError:  # it is closed
        return False


def _require_one_name(target: Path) -> None:
    """Refuse a hard link, which has a lock of its own: two runs could write to one file."""
    if target.exists() and target.stat().st_nlink > 1:
        raise ConfigError(
            f"output.path {target} has a second name (a hard link), under which another run could write to it: "
            "give it a copy of its own (cp), or choose another output.path"
        )


def require_own_metrics(metrics: Path, target: Path) -> None:
    """Raise ConfigError if the metrics would replace those of another output, or another output itself."""
    other = _output_described_by(metrics)
    if other is not None and other.exists() and not _is_same_file(other, target):
        raise ConfigError(f"{metrics} holds the metrics of {other}: set output.metrics_path to a file of its own")
    if metrics.exists() and sidecar_path(metrics).exists():
        raise ConfigError(f"output.metrics_path {metrics} is the output of another run: choose another file")


def _output_described_by(metrics: Path) -> Path | None:
    """Return the output whose numbers these are, if its metrics still go here; None for a copy that was taken
    elsewhere."""
    try:
        output = OutputConfig.model_validate(json.loads(metrics.read_bytes())["run"]["output"])
        return real_file(Path(output.path)) if _is_same_file(metrics_path(output), metrics) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
