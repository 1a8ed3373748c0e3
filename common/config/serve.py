"""How requests over HTTP are taken: the `serve` section of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from common.config.frozen import Settings
from common.config.old_spellings import why_old_of_serve


class ServeConfig(Settings):
    """What `lopa serve` listens on, and how much it takes. Settings of `decode` are what a request has by default."""

    host: str = Field(default="127.0.0.1", min_length=1, description="The address to listen on; `0.0.0.0` is all.")
    port: int = Field(default=8000, ge=0, le=65535, description="The port to listen on; 0 takes a free one.")
    num_front_ends: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that speak HTTP; more than one where one cannot keep up with several replicas.",
    )
    served_model_names: tuple[str, ...] = Field(
        default=(), description="What clients call the model, the first in answers; none is the model folder's name."
    )
    api_key_file: str | None = Field(
        default=None, min_length=1, description="A file with one API key a line; so has the variable LOPA_API_KEYS."
    )
    max_queued_requests: int = Field(
        default=256, ge=0, description="Requests that may wait beside those being decoded; more are told to come again."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names beside localhost that clients may call the server by, as Host and Origin say them; looked "
        "at where it listens on this machine alone and wants no key.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        description="Open connections, as far as the limit of open files allows; new ones then take the place of idle "
        "ones, or get 503.",
    )
    max_body_bytes: int = Field(
        default=4 * 2**20,
        ge=1,
        description="The longest body of a request; all clients wait some 10 ms a MiB while one is parsed.",
    )
    max_num_lookahead: int | None = Field(
        default=None,
        ge=0,
        description="The most lookaheads that a request may ask for; `null` is decode's own.",
    )
    drain_timeout_s: float = Field(
        default=25.0, ge=0, le=3600, description="Seconds that requests may go on after SIGTERM; the rest is aborted."
    )
    engine_silence_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds without a word of a loaded engine after which probes and new requests get 503, until it "
        "speaks again; it speaks between passes, so more than the longest pass takes.",
    )
    keep_alive_s: float = Field(
        default=15.0, ge=0.1, le=3600, description="Seconds of silence after which a stream sends a comment line."
    )

    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="Where an OpenTelemetry collector takes traces, as OTLP over HTTP: the whole address, such as "
        "`http://localhost:4318/v1/traces`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_today_s_keys(cls, value: Any) -> Any:
        problem = why_old_of_serve(value) if isinstance(value, Mapping) else None
        if problem is not None:
            raise ValueError(problem)
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_a_whole_address(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(r"https?://[^/\s]+/\S+", value) is None:
            raise ValueError(
                "give the whole address at which the collector takes OTLP over HTTP, such as "
                "http://localhost:4318/v1/traces"
            )
        return value

    @field_validator("served_model_names")
    @classmethod
    def _names_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in value):
            raise ValueError("an empty name is none: remove it")
        return value
