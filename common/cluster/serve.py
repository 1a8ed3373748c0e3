"""The server of `lopa serve` as an application of Ray Serve, which brings the proxy, the balancing and the scaling."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from common.cluster.options import one_replica, ray_options, require_ray, with_whole_paths
from common.cluster.processes import EngineProcesses, Order
from common.config import DeviceProfile, RunConfig, Settings, load_profile_and_run
from common.errors import ConfigError, EngineError
from common.serving import HostedServer

if TYPE_CHECKING:
    from ray.serve import Application

logger = logging.getLogger(__name__)
_QUEUE = 1.25  # requests that an engine is given, of those it decodes together: others wait where any may take them
_TARGET = 0.7  # from here on another replica is wanted
_LINGER_S = 1.0  # in which clients of an engine that is gone read why
_HEALTH_S = 5.0
_DOWNSCALE_S = 600.0  # a model takes minutes to load


class AppArguments(Settings):
    """What a Serve config gives as `args`, or `serve run` as key=value."""

    profile: str = Field(min_length=1, description="What runs a replica: a YAML file, or a name of configs/profiles.")
    run: str = Field(min_length=1, description="What is decoded: a run file, a name of configs/runs, or a folder.")
    set: tuple[str, ...] = Field(default=(), description="Settings that are overridden, each KEY=VALUE.")
    min_replicas: int = Field(default=1, ge=1, description="Replicas that are always there.")
    max_replicas: int = Field(default=1, ge=1, description="The most there are under load.")
    upscale_delay_s: float = Field(default=30.0, ge=0, description="Seconds of load before there is one more.")
    downscale_delay_s: float = Field(default=_DOWNSCALE_S, ge=0, description="Seconds without it before one goes.")

    @field_validator("set", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_a_range(self) -> AppArguments:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}")
        return self


def build_app(args: Mapping[str, Any]) -> Application:
    """Build the application of `serve run common.cluster:build_app profile=... run=...`, and of a Serve config.

    args: of `AppArguments`. Raises ConfigError.
    """
    require_ray()
    from ray import serve

    wanted = _arguments(args)
    profile, run = load_profile_and_run(wanted.profile, wanted.run, wanted.set)
    if "max_num_requests" not in run.model_fields_set:
        raise ConfigError(
            f"run {wanted.run} does not say how many requests a replica decodes together: set max_num_requests, such "
            "as set: [max_num_requests=16]"
        )
    at_once = run.max_num_requests
    deployment = serve.deployment(
        name="lopa",
        max_ongoing_requests=max(2, round(_QUEUE * at_once)),
        autoscaling_config={
            "min_replicas": wanted.min_replicas,
            "max_replicas": wanted.max_replicas,
            "target_ongoing_requests": max(1.0, _TARGET * at_once),
            "upscale_delay_s": wanted.upscale_delay_s,
            "downscale_delay_s": wanted.downscale_delay_s,
        },
        ray_actor_options=ray_options(profile),
        graceful_shutdown_timeout_s=run.serve.drain_timeout_s,
        health_check_period_s=_HEALTH_S,
    )
    replica = deployment(serve.ingress()(ServedReplica))
    return replica.bind(one_replica(profile), with_whole_paths(run))


class ServedReplica:
    """The routes of one replica in its actor, and its engine's processes beside it."""

    async def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:  # type: ignore[misc]
        logging.getLogger("common").setLevel(logging.INFO)
        self._processes = EngineProcesses(Order(profile, run, is_server=True))
        own = await asyncio.to_thread(self._processes.connect)
        self._hosted = HostedServer(run, own, on_end=self._leave)
        if not await self._hosted.start():
            raise EngineError(await asyncio.to_thread(self._processes.why_ended))

    def __serve_build_asgi_app__(self) -> Any:
        return self._hosted.app

    async def check_health(self) -> None:
        """Raise where the engine has been silent for too long."""
        self._hosted.require_alive()

    async def __del__(self) -> None:
        # Serve calls it once no request is under way, or graceful_shutdown_timeout_s is over.
        self._hosted.end()
        await asyncio.to_thread(self._processes.close)

    def _leave(self) -> None:
        """End the actor after its engine, so that Serve notices at once and starts another."""
        self._leaving = asyncio.ensure_future(self._say_and_leave())

    async def _say_and_leave(self) -> None:
        try:
            logger.error("%s", await asyncio.to_thread(self._processes.why_ended))  # which may take seconds
            await asyncio.sleep(_LINGER_S)
        finally:
            os._exit(1)


def _arguments(args: Mapping[str, Any]) -> AppArguments:
    try:
        return AppArguments.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "args"
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {said}; build_app takes {', '.join(AppArguments.model_fields)}") from None
