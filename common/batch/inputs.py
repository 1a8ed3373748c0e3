"""The input of a batch run: a JSONL file in, one `InputLine` a request out, and its prompt as token ids on demand.

A line that cannot be decoded keeps its place and carries its error, so that it ends as an error record while the rest
of the run goes on. Only what would make the whole output ambiguous, two lines with one id, is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from common.config import InputConfig
from common.errors import ConfigError

_CONTENTS = ("prompt", "messages", "question")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


class TokenizerLike(Protocol):
    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_bos: bool = False) -> list[int]: ...

    def chat(self, messages: list[dict[str, str]]) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


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


def read_lines(config: InputConfig) -> list[InputLine]:
    """All requests of the file, up to `limit`. Raises ConfigError for a missing file or two lines with one id."""
    path = Path(config.path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such input file"
        raise ConfigError(f"{path}: {found}; set input.path to a JSONL file with one request a line")
    lines: list[InputLine] = []
    number_of: dict[str, int] = {}
    for number, raw in _numbered(path):
        line = _parse(number, raw, config.prompt_template)
        if line.key in number_of:
            raise ConfigError(
                f"{path}: lines {number_of[line.key]} and {number} have the same id {line.key!r}: "
                "results are kept by id, so give each line its own"
            )
        number_of[line.key] = number
        lines.append(line)
        if len(lines) == config.limit:
            break
    if not lines:
        raise ConfigError(f"{path}: the input file is empty; put one JSON request on each line")
    template = config.prompt_template
    readable = [line.fields for line in lines if line.fields]
    if template is not None and readable and not any(_fits(template, fields) for fields in readable):
        raise ConfigError(
            f"input.prompt_template {template!r} fits no line of {path}: name fields of its lines in braces, such as "
            f"{{{sorted(readable[0])[0]}}}, or remove it"
        )
    return lines


def digest_prefix(path: Path, num_bytes: int | None = None) -> tuple[int, str]:
    """Length and SHA-256 of the file's first `num_bytes`; of all of it by default."""
    digest, length = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while num_bytes is None or length < num_bytes:
            chunk = stream.read(2**20 if num_bytes is None else min(2**20, num_bytes - length))
            if not chunk:
                break
            digest.update(chunk)
            length += len(chunk)
    return length, digest.hexdigest()


def prompt_or_reason(line: InputLine, config: InputConfig, tokenizer: TokenizerLike) -> tuple[int, ...] | str:
    """The line's prompt as token ids, or why there is none: the text of an error record."""
    if line.error is not None:
        return line.error
    try:
        return _encode(line, config, tokenizer)
    except (ValueError, TypeError) as error:
        return str(error)


def _encode(line: InputLine, config: InputConfig, tokenizer: TokenizerLike) -> tuple[int, ...]:
    if "messages" in line.fields:
        return tuple(_chat(line.fields["messages"], tokenizer))
    if config.prompt_template is not None and _fits(config.prompt_template, line.fields):
        text = _fill(config.prompt_template, line.fields)
    elif "question" in line.fields and tokenizer.has_chat_template:
        return tuple(_chat([{"role": "user", "content": line.fields["question"]}], tokenizer))
    else:
        text = line.fields["prompt"] if "prompt" in line.fields else line.fields["question"]
    return tuple(tokenizer.encode(text, add_bos=config.add_bos_token))


def _fits(template: str, fields: Mapping[str, Any]) -> bool:
    """Whether the line has every field that the template names, as text or a list of lines."""
    names = _PLACEHOLDER.findall(template)
    return bool(names) and all(isinstance(fields.get(name), (str, list)) for name in names)


def _fill(template: str, fields: Mapping[str, Any]) -> str:
    """Not str.format: what is filled in, and code in the template, is full of braces."""

    def text(match: re.Match[str]) -> str:
        value = fields[match[1]]
        return value if isinstance(value, str) else "\n".join(map(str, value))

    return _PLACEHOLDER.sub(text, template)


def _chat(messages: list[dict[str, str]], tokenizer: TokenizerLike) -> list[int]:
    if not tokenizer.has_chat_template:
        raise ValueError("the line has messages but the model has no chat template; give a prompt instead")
    return tokenizer.chat(messages)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if raw.strip():
                yield number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw


def _parse(number: int, raw: bytes, template: str | None) -> InputLine:
    # Not the bare number: another line's own id may well be that number.
    unknown_id = f"line-{number}"
    try:
        fields = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return InputLine(unknown_id, number, error=f"line {number} is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return InputLine(unknown_id, number, error=f"line {number} is not a JSON object with a prompt")
    id = number if fields.get("id") is None else fields["id"]
    if isinstance(id, bool) or not isinstance(id, (str, int)):
        return InputLine(unknown_id, number, fields, error=f"line {number}: id must be a string or an integer")
    problem = _problem(fields, template)
    return InputLine(id, number, fields, error=None if problem is None else f"line {number}: {problem}")


def _problem(fields: Mapping[str, Any], template: str | None) -> str | None:
    contents = [name for name in _CONTENTS if name in fields]
    if not contents and template is not None and _fits(template, fields):
        return None
    if len(contents) != 1:
        return f"give exactly one of prompt, messages, question (found {', '.join(contents) or 'none'})"
    value = fields[contents[0]]
    if contents[0] != "messages":
        return None if isinstance(value, str) else f"{contents[0]} must be a string"
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return None
    return "messages must be a list of objects with the strings role and content"


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
