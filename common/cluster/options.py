"""What Ray is asked for: the devices of a replica, and how its actor is fed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.config import DeviceProfile, MeshConfig, RunConfig
from common.errors import ConfigError

_CALLS = 4  # batches that an actor is given at once, each of half the requests that its engine decodes together
_RESOURCES = {"npu": "NPU"}  # by device: what is neither a processor nor a GPU has a name of Ray's


def ray_options(profile: DeviceProfile) -> dict[str, Any]:
    """Return what one replica takes, as keywords of Ray's `remote`, `map_batches` and `ray_actor_options`."""
    count = processes_of(profile)
    options: dict[str, Any] = {"num_cpus": count}
    if profile.device == "cuda":
        options["num_gpus"] = count
    elif profile.device in _RESOURCES:
        options["resources"] = {_RESOURCES[profile.device]: count}
    return options


def map_options(profile: DeviceProfile, run: RunConfig, replicas: int = 1) -> dict[str, Any]:
    """Return the keywords with which `Dataset.map_batches` runs so many replicas of `DecodeRows`.

    An actor holds twice as many requests as its engine decodes together, in batches that come and go one by one, so
    that the end of a batch leaves no slot empty. Raises ConfigError where ray is missing.
    """
    require_ray()
    from ray.data import ActorPoolStrategy

    return {
        "compute": ActorPoolStrategy(
            size=replicas, max_concurrent_calls_per_actor=_CALLS, max_tasks_in_flight_per_actor=2 * _CALLS
        ),
        "batch_size": batch_size(run),
        "fn_constructor_kwargs": {"profile": one_replica(profile), "run": with_whole_paths(run)},
        **ray_options(profile),
    }


def batch_size(run: RunConfig) -> int:
    """Return the rows of a batch."""
    return max(1, 2 * run.max_num_requests // _CALLS)


def processes_of(profile: DeviceProfile) -> int:
    """Return the processes of a replica, each with a device of its own."""
    mesh = one_replica(profile).mesh
    assert isinstance(mesh, MeshConfig), "one_replica has resolved it"
    return mesh.num_processes


def one_replica(profile: DeviceProfile) -> DeviceProfile:
    """Return the profile of one of its replicas. `mesh: auto` is one device: copies share nothing."""
    mesh = MeshConfig() if profile.mesh == "auto" else profile.mesh.model_copy(update={"data_parallel_size": 1})
    return profile.model_copy(update={"mesh": mesh})


def with_whole_paths(run: RunConfig) -> RunConfig:
    """Return the run for actors, which begin in a folder of their own."""
    folders = {"model": run.model, "lora_path": run.lora_path, "tokenizer": run.tokenizer}
    here = {name: str(Path(path).absolute()) for name, path in folders.items() if path and Path(path).exists()}
    return run.model_copy(update=here)


def require_ray() -> None:
    """Raise ConfigError where ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("ray is not installed: pip install -e '.[ray]'")
