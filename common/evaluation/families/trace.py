"""A trace of published decoding code as a checked file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from common.config import Frozen, problem
from common.errors import ConfigError

Span = tuple[int, int]  # [start, end) absolute positions


class Source(Frozen, extra="ignore"):
    """Which code made the trace."""

    commit: str = ""
    function: str


class FamilyStep(Frozen, extra="ignore"):
    """One forward pass; keys by position. `candidates`: [argmax token, its probability] of what could be filled."""

    kind: str
    window: Span
    kv_written: Span | None = None
    block_kv_written: Span | None = None
    candidates: dict[int, tuple[int, float]] = Field(default_factory=dict)
    entropy: dict[int, float] | None = None
    filled: dict[int, int] = Field(default_factory=dict)
    edit_candidates: dict[int, tuple[int, float]] | None = None
    edited: dict[int, int] | None = None
    final: bool | None = None  # and what follows: of passes that revise a block
    quota: int | None = None
    post_steps: int = 0
    fallback: list[int] = Field(default_factory=list)
    replaced: dict[int, int] = Field(default_factory=dict)
    escape: list[int] = Field(default_factory=list)
    deleted: list[int] = Field(default_factory=list)
    split: list[int] = Field(default_factory=list)
    after: list[int] = Field(default_factory=list)
    original: list[int] = Field(default_factory=list)


class FamilyTrace(Frozen, extra="ignore"):
    """`model` is a folder beside the file. decode: the settings in their source's own names."""

    source: Source
    model: str
    decode: dict[str, Any]
    prompt: list[int] = Field(min_length=1)
    generated: list[int]
    answer: list[int] | None = None  # what a request gets
    finish: str | None = None
    num_forward_steps: int
    steps: list[FamilyStep]


def is_family_trace(path: Path) -> bool:
    """Whether the file is one of these rather than a trace of LoPA over D2F: a step says which kind of pass it is."""
    try:
        steps = json.loads(path.read_bytes())["steps"]
        return "kind" in steps[0]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def read_family_trace(path: Path) -> FamilyTrace:
    """The checked trace. Raises ConfigError naming file, key and fix."""
    try:
        return FamilyTrace.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problem(error, FamilyTrace)}") from None
