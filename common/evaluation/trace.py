"""A golden trace: what the published implementation did in every step, as a checked file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from common.config import DecodeConfig, Frozen, problem, renewed
from common.errors import ConfigError


class TraceStep(Frozen, extra="ignore"):
    """What one step must do; branches in the order forwarded, lookaheads first and the anchor last."""

    num_branches: int | None = None  # the lists below have its length
    committed: list[int]
    window_lengths: list[int]
    branch_scores: list[tuple[float, bool]]  # C(B), is it the anchor
    winner_is_anchor: bool
    filled: dict[int, int]  # position -> token
    lookahead: list[tuple[int, int, float]]  # position, token, confidence


class Trace(Frozen, extra="ignore"):
    """A trace file; tests/golden/README.md says what the keys mean. `model` is a folder beside the file.

    Keys that are not listed are remarks of whoever made the trace.
    """

    model: str
    decode: DecodeConfig
    prompt: list[int] = Field(min_length=1)
    generated: list[int]
    num_forward_steps: int
    steps: list[TraceStep]

    @field_validator("decode", mode="before")
    @classmethod
    def _is_read_as_a_run_s(cls, decode: Any) -> Any:
        """Read settings as a run's are, which an earlier version may have recorded; the rest is read strictly."""
        try:
            return DecodeConfig.model_validate(renewed(decode) if isinstance(decode, dict) else decode)
        except ValidationError as error:
            raise ValueError(problem(error, DecodeConfig)) from None

    @field_validator("decode")
    @classmethod
    def _names_its_mask(cls, decode: DecodeConfig) -> DecodeConfig:
        if decode.mask_token_id is None:
            raise ValueError("mask_token_id is missing: add the id that the trace was made with")
        return decode


def read_trace(path: Path) -> Trace:
    """The checked trace. Raises ConfigError naming file, key and fix."""
    try:
        return Trace.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problem(error, Trace)}") from None
