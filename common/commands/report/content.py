"""What the report reads of a file of results, as a shape: a file without it is named, and not drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

_Count = Annotated[int, Field(ge=0, le=2**53)]
_Length = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


def _with_plain_counts(decode: dict[str, Any]) -> dict[str, Any]:
    k = decode.get("num_lookahead")
    if k is not None and k != "auto" and not (isinstance(k, int) and 0 <= k <= 2**31):
        raise ValueError("its num_lookahead is no number of lookaheads")
    return decode


_Decode = Annotated[dict[str, Any], AfterValidator(_with_plain_counts)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Requests(_Shape):
    finished: _Count
    errors: _Count


class _Accuracy(_Shape):
    share: float
    standard_error: float
    scored_by: dict[str, _Count] = {}


class _PerRequest(_Shape):
    per_request_mean: float | None


class _Tpf(_Shape):
    canvas: _PerRequest
    effective: _PerRequest


class _Rates(_Shape):
    mean: float | None
    max: float | None

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> _Rates:
        if (self.mean is None) != (self.max is None):
            raise ValueError("a mean has a largest value beside it")
        return self


class _Effective(_Shape):
    with_first_step: _Rates


class _Tps(_Shape):
    effective: _Effective


class _Mean(_Shape):
    mean: float | None


class _Aggregate(_Shape):
    effective: float | None = None


class _Start(_Shape):
    tps_aggregate: _Aggregate | None = None


class _Run(_Shape):
    input: dict[str, Any] | None = None
    decode: _Decode | None = None


class RunMetrics(_Shape):
    requests: _Requests
    accuracy: _Accuracy | None
    tpf: _Tpf
    tps: _Tps
    latency_s: _Mean
    steps: _Mean
    run: _Run
    environment: dict[str, Any] = {}
    this_start: _Start | None = None
    wins_by_branch: list[_Count] = []
    windows: dict[_Length, _Count] = {}

    @model_validator(mode="after")
    def _has_numbers_of_what_finished(self) -> RunMetrics:
        if not self.requests.finished:
            return self
        numbers = [self.tpf.canvas.per_request_mean, self.tpf.effective.per_request_mean, self.latency_s.mean]
        if None in numbers:
            raise ValueError("requests have finished, and there are no numbers of them")
        if any(given and not sum(given) for given in (self.wins_by_branch, self.windows.values())):
            raise ValueError("no step of any kind was counted")
        return self


class _Row(_Shape):
    status: str = "done"
    decode: _Decode | None = None
    metrics: RunMetrics | None = None


class Board(_Shape):
    rows: list[_Row]


class _Step(_Shape):
    rows: int
    width: int
    device_ms: float
    layers_ms: float | None = None
    head_ms: float | None = None
    gather_ms: float | None = None
    call_ms: float | None = None
    weight_floor_ms: float | None = None
    matrix_floor_ms: float | None = None


def _with_a_step(medians: dict[str, float | None]) -> dict[str, float | None]:
    if medians.get("step") is None:
        raise ValueError("it has no median of the whole step")
    return medians


class _Steps(_Shape):
    accepted: int
    median_ms: Annotated[dict[str, float | None], AfterValidator(_with_a_step)]


class Bench(_Shape):
    conditions: str | dict[str, Any]
    shapes: list[_Step]
    steps: list[_Steps] | None = None


def fits(shape: type[_Shape], found: Mapping[str, Any]) -> bool:
    try:
        shape.model_validate(found)
    except ValidationError:
        return False
    return True
