"""The input of a batch run: JSON lines in, one `InputLine` a request out.

A line that cannot be decoded keeps its place and carries its error, so that it ends as an error record while the rest
of the run goes on. Only what would make the whole output ambiguous, two lines with one id, is refused. The input may
grow between two starts: a last line that is only half there is left for the next one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from common.batch.source import is_read_once, open_input, shown
from common.batch.template import fits, require_fit
from common.config import InputConfig
from common.errors import ConfigError, first_line
from common.processes import global_rank
from common.requests import read_json
from common.scoring import task_of
from common.text import why_no_conversation, why_no_variables

logger = logging.getLogger(__name__)
_CONTENTS = ("prompt", "messages", "question")


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request. `id` is the line's own, else its number; `error` says why the line cannot be decoded."""

    id: str | int
    number: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> str:
        return str(self.id)

    @property
    def is_openai(self) -> bool:
        return is_openai(self.fields)


@dataclass(frozen=True, slots=True)
class Input:
    """All requests, with the length and SHA-256 of the bytes that hold them or of their beginning."""

    lines: list[InputLine]
    num_bytes: int
    sha256: str


class _Digest:
    """The SHA-256 of the first `num_bytes` that come, or by default of all whole lines."""

    def __init__(self, num_bytes: int | None) -> None:
        self._most = num_bytes
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def add(self, raw: bytes, *, is_whole: bool) -> None:
        if self._most is not None:
            raw = raw[: self._most - self.num_bytes]
        elif not is_whole:
            return
        self._hash.update(raw)
        self.num_bytes += len(raw)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def read_lines(config: InputConfig) -> list[InputLine]:
    """Return all requests of the input, up to `limit`. Raises ConfigError for a missing file or two lines with one
    id."""
    return read_input(config).lines


def read_input(config: InputConfig, num_bytes: int | None = None) -> Input:
    """Return the lines and their digest. num_bytes: how many of the first bytes it is of, all of them by default."""
    name, digest = shown(config.path), _Digest(num_bytes)
    with open_input(config.path) as stream:
        lines = list(_lines(stream, config, name, digest))
    if not lines:
        raise ConfigError(f"{name}: the input file is empty; put one JSON request on each line")
    _require_own_ids(lines, name)
    readable = [line.fields for line in lines if line.fields]
    task = task_of(config)
    if task is not None:
        for line in lines:
            if line.fields:
                task.require_row(line.fields, f"{name}: line {line.number}")
    if config.prompt_template is not None and readable and not _have_own_prompts(readable, config, name):
        require_fit(config.prompt_template, readable, name)
    return Input(lines, digest.num_bytes, digest.hexdigest())


def is_openai(fields: Mapping[str, Any]) -> bool:
    """Whether a line is one of OpenAI's batch files, if perhaps not a whole one."""
    return "custom_id" in fields and ("url" in fields or "body" in fields)


def _have_own_prompts(lines: Sequence[Mapping[str, Any]], config: InputConfig, name: str) -> bool:
    """Whether all lines say what they ask without the template, and it fits none of them; or some line is OpenAI's,
    which all have to be then."""
    assert config.prompt_template is not None, "the caller has asked"
    if any(map(is_openai, lines)):
        return True
    has_own = all("prompt" in fields or "messages" in fields for fields in lines)
    is_unused = has_own and not any(fits(config.prompt_template, fields) for fields in lines)
    if is_unused and any("prompt" in fields for fields in lines):
        template = repr(config.prompt_template)
        logger.info("%s: prompts are taken as they stand; the run's own are written as %s", name, template)
    return is_unused


def require_shareable(config: InputConfig, num_processes: int) -> None:
    """Raise ConfigError if every one of these processes would have to read what can be read only once."""
    if num_processes > 1 and is_read_once(config.path):
        raise ConfigError(
            f"{shown(config.path)} can be read only once, and {num_processes} are to read it: write it to a "
            "file first, and name that"
        )


def _lines(stream: BinaryIO, config: InputConfig, name: str, digest: _Digest) -> Iterator[InputLine]:
    num_found = num_others = 0
    for number, raw in enumerate(stream, start=1):
        is_whole = raw.endswith(b"\n") or _is_json(raw)
        digest.add(raw, is_whole=is_whole)
        if not raw.strip() or num_found == config.limit:
            continue  # lines beyond the limit are only digested
        if is_whole:
            line = parse_line(number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, config)
            if _is_asked(line, config):
                num_found += 1
                yield line
            else:
                num_others += 1
        elif global_rank() == 0:
            logger.warning(
                "%s: line %d, the last, is not whole yet: it has no line end and is not valid JSON. The next start "
                "takes it; if nobody is writing to the file, correct the line",
                name,
                number,
            )
    if num_others and not num_found:
        raise ConfigError(
            f"{name}: none of its rows is of the test split of {config.benchmark}, which alone is asked: give the file "
            "with that split"
        )


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return True


def _require_own_ids(lines: Sequence[InputLine], name: str) -> None:
    number_of: dict[str, int] = {}
    for line in lines:
        if number_of.setdefault(line.key, line.number) != line.number:
            raise ConfigError(
                f"{name}: lines {number_of[line.key]} and {line.number} have the same id {line.key!r}: "
                "results are kept by id, so give each line its own"
            )


def _is_asked(line: InputLine, config: InputConfig) -> bool:
    """Whether the row belongs to the benchmark's test split."""
    task = task_of(config)
    return task is None or not line.fields or task.benchmark.is_test(line.fields)


def parse_line(number: int, raw: bytes, config: InputConfig) -> InputLine:
    """Return the request that a line is; where it is none, with the reason."""
    # Not the bare number: another line's own id may well be that number.
    unknown_id = f"line-{number}"
    try:
        fields = read_json(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return InputLine(unknown_id, number, error=f"line {number} is not valid JSON: {first_line(error)}")
    if not isinstance(fields, dict):
        return InputLine(unknown_id, number, error=f"line {number} is not a JSON object with a prompt")
    names = ("custom_id",) if is_openai(fields) else ("id",) if config.benchmark is None else ("id", "task_id")
    id = next((fields[name] for name in names if fields.get(name) is not None), number)
    if isinstance(id, bool) or not isinstance(id, (str, int)):
        return InputLine(unknown_id, number, fields, error=f"line {number}: {names[0]} must be a string or an integer")
    is_checked_elsewhere = config.benchmark is not None or is_openai(fields)
    problem = None if is_checked_elsewhere else _problem(fields, config.prompt_template)
    return InputLine(id, number, fields, error=None if problem is None else f"line {number}: {problem}")


def _problem(fields: Mapping[str, Any], template: str | None) -> str | None:
    contents = [name for name in _CONTENTS if fields.get(name) is not None]
    if not contents and template is not None and fits(template, fields):
        return None
    if len(contents) != 1:
        return f"give exactly one of prompt, messages, question (found {', '.join(contents) or 'none'})"
    value = fields[contents[0]]
    variables = fields.get("chat_template_kwargs")
    if contents[0] == "prompt" and variables:
        return "chat_template_kwargs: only conversations are rendered by a template; write messages, or remove it"
    if contents[0] == "prompt" and isinstance(value, list) and value and all(type(item) is int for item in value):
        return None  # token ids
    if contents[0] != "messages":
        kinds = "a string, or a list of token ids" if contents[0] == "prompt" else "a string"
        return None if isinstance(value, str) else f"{contents[0]} must be {kinds}"
    return why_no_conversation(value) or (None if variables is None else why_no_variables(variables))
