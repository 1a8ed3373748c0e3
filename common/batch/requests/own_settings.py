"""Settings that a line has of its own, where `input.settings_field` names the field that holds them.

They are checked by the door through which the run's came, and go before the run's and those of its benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from common.batch.inputs import InputLine
from common.config import AUTO_LOOKAHEAD, DecodeConfig, InputConfig, Settings, given_value, problem
from common.errors import ConfigError

_MOST_CHECKED = 1000  # different settings whose check is remembered
_NO_OBJECT = 'write it as an object, such as {"num_lookahead": 0}, or leave it out'


class Own(NamedTuple):
    """What a request is decoded by instead of the run's settings and seed; None: the run's."""

    decode: DecodeConfig | None = None
    seed: int | None = None


class _Fields(Settings):
    """As they stand in the line; null is the same as absent."""

    decode: dict[str, Any] | None = None
    seed: int | None = Field(default=None, ge=0, strict=True)


class OwnSettings:
    """Reads them. base: what a line's settings change. check: raises ConfigError for what the model cannot do."""

    def __init__(self, source: InputConfig, base: DecodeConfig, check: Callable[[DecodeConfig], None]) -> None:
        self._field = source.settings_field
        self._base = base
        self._check = lru_cache(_MOST_CHECKED)(check)  # it may have something to log, too

    def of(self, line: InputLine) -> Own:
        """Raises ConfigError naming line and key."""
        if self._field is None:
            return Own()
        try:
            return self._read(line.fields, self._field)
        except ConfigError as error:
            raise ConfigError(f"line {line.number}: {error}") from None

    def _read(self, line: Mapping[str, Any], field: str) -> Own:
        try:
            given = _Fields(decode=line.get(field), seed=line.get("seed"))
        except ValidationError as error:
            is_seed = error.errors()[0]["loc"] == ("seed",)
            raise ConfigError(problem(error, _Fields) if is_seed else f"{field}: {_NO_OBJECT}") from None
        return Own(self._changed(given.decode, field) if given.decode else None, given.seed)

    def _changed(self, changes: Mapping[str, Any], field: str) -> DecodeConfig:
        for name, value in changes.items():
            if isinstance(value, str) and _is_quoted(name, value):
                raise ConfigError(f"{field}.{name}: write it without quotes (given {given_value(value)})")
        try:
            decode = self._base.changed(changes)
        except ValidationError as error:
            raise ConfigError(problem(error, DecodeConfig, field)) from None
        if decode.num_lookahead == AUTO_LOOKAHEAD:
            raise ConfigError(f"{field}.num_lookahead: auto is measured for whole runs: set it to a number")
        self._check(decode)
        return decode


def _is_quoted(name: str, value: str) -> bool:
    """Whether this text stands where a number, true or false belongs. Files may have it so, for YAML reads 1e-3 as a
    text; JSON does not."""
    known = DecodeConfig.model_fields.get(name)
    kinds = () if known is None else getattr(known.annotation, "__args__", (known.annotation,))
    return bool({int, float, bool} & set(kinds)) and value != "auto"


def why_unused(lines: Sequence[InputLine], source: InputConfig) -> str | None:
    """Why no line has settings of its own although the run file lets them; None: some have, or it does not."""
    field = source.settings_field
    if field is None or any(field in line.fields or "seed" in line.fields for line in lines):
        return None
    return f"input.settings_field is {field}, and no line has this field: all are decoded by the run's settings"
