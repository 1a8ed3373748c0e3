"""`lopa run --ray`: a batch run whose requests are decoded by replicas on a Ray cluster.

The files, the marks and the resuming are those of any batch run. This process makes the requests and writes the
results; in between Ray Data hands the requests to the actors, and those of an actor that dies to another.
"""

from __future__ import annotations

import logging
import pickle
import socket
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from common.batch import run_batch
from common.cluster.options import batch_size, map_options, one_replica, ray_options, require_ray
from common.cluster.rows import DecodeRequests
from common.config import DeviceProfile, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError, EngineError, first_line
from common.processes import restored_signals

if TYPE_CHECKING:
    from common.generate import Generator

logger = logging.getLogger(__name__)
LOCAL = "local"
_OBJECT_STORE_BYTES = 2**28  # for requests and results, a few KB each
_KNOCK_S = 10.0
_AT_A_TIME = 20_000  # requests of a dataset, which is made whole before the first is decoded


def run_on_ray(
    profile: DeviceProfile, run: RunConfig, address: str, replicas: int | None, **options: Any
) -> dict[str, Any] | None:
    """Decode what is not in the output yet, as `run_batch` does, by so many replicas; None: the profile's dp.

    address: of a cluster, or `local` for one on this machine that ends with the run. options: those of `run_batch`.
    Raises ConfigError and EngineError.
    """
    require_ray()
    if run.input is not None and run.input.target_field is not None:
        raise ConfigError("input.target_field: replicas on Ray decode and tell no likelihoods: leave out --ray")
    if replicas is None:
        replicas = 1 if profile.mesh == "auto" else profile.mesh.data_parallel_size
    with _Cluster(profile, run, address, replicas) as cluster:
        return run_batch(one_replica(profile), run, cluster.generator, **options)


class _Cluster:
    """A cluster that is joined when a run turns out to need it, and left at the end."""

    def __init__(self, profile: DeviceProfile, run: RunConfig, address: str, replicas: int) -> None:
        self._profile, self._run, self._address, self._replicas = profile, run, address, replicas
        self._is_joined = False

    def generator(self) -> Generator:
        """The `build` of run_batch. Raises ConfigError."""
        # Here: a run that turns out to be done has no reason to load torch.
        from common.checkpoint import load_model_config, load_tokenizer
        from common.generate import Generator
        from common.runtime import check_decode, longest_request

        profile, run, replicas = one_replica(self._profile), self._run, self._replicas
        model_config = load_model_config(run.model)
        tokenizer = load_tokenizer(run.tokenizer_folder, model_config.mask_of(run.decode.mask_token_id))
        check_decode(run.decode, profile, model_config)
        self._is_joined = True
        _join(self._address)
        _check_resources(profile, self._address, replicas)

        class RemoteGenerator(Generator):
            """The run's requests and texts here, its engines elsewhere."""

            def __init__(self) -> None:
                self.profile, self.run, self.tokenizer, self.model_config = profile, run, tokenizer, model_config
                self.is_leader, self.replica, self.num_replicas = True, 0, 1  # the one process that writes

            def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
                yield from _decoded(profile, run, replicas, requests)

            @property
            def max_model_len(self) -> int:
                return longest_request(profile, model_config)

            @property
            def vocab_size(self) -> int:
                return model_config.vocab_size

            def describe(self) -> dict[str, Any]:
                return _described(replicas)

        return RemoteGenerator()

    def __enter__(self) -> _Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_joined:
            import ray

            ray.shutdown()


def _decoded(
    profile: DeviceProfile, run: RunConfig, replicas: int, requests: Iterable[GenerationRequest]
) -> Iterator[Completion | Rejection]:
    """Yield each request's result once, as they come. Raises EngineError where Ray gives up."""
    import ray
    from ray.exceptions import RayError

    options, rows = map_options(profile, run, replicas), iter(requests)
    while chunk := [{"id": one.id, "request": pickle.dumps(one)} for one in islice(rows, _AT_A_TIME)]:
        left = {row["id"] for row in chunk}
        blocks = -(-len(chunk) // batch_size(run))
        dataset = ray.data.from_items(chunk, override_num_blocks=blocks).map_batches(DecodeRequests, **options)
        try:
            for row in dataset.iter_rows():
                if row["id"] in left:
                    left.remove(row["id"])
                    yield pickle.loads(row["result"])
        except RayError as error:
            raise EngineError(_cause(error)) from error
        if left:
            raise EngineError(f"Ray has lost {len(left)} of {len(chunk)} requests: start again to resume")


def _join(address: str) -> None:
    import ray
    from ray.data import DataContext

    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    local = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False} if address == LOCAL else {}
    with restored_signals():  # else Ray would end the process without a word
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"--ray {address}: no cluster can be joined there ({first_line(error)}); start one with "
                "`ray start --head`, or give local"
            ) from None
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray would try again for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def _check_resources(profile: DeviceProfile, address: str, replicas: int) -> None:
    """Raise ConfigError where this machine lacks what the replicas take; of a cluster, which may grow, just say so."""
    import ray

    options, there = ray_options(profile), ray.cluster_resources()
    one = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    for name, count in one.items():
        if count * replicas > there.get(name, 0):
            sentence = (
                f"--replicas {replicas} of profile {profile.name} take {count * replicas} {name}, and --ray {address} "
                f"has {there.get(name, 0):g}"
            )
            if address == LOCAL:
                raise ConfigError(f"{sentence}: lower --replicas, or take a cluster")
            logger.warning("%s: the run waits until it has them", sentence)


def _described(replicas: int) -> dict[str, Any]:
    import ray

    return {"ray": ray.__version__, "ray_nodes": len(ray.nodes()), "ray_replicas": replicas}


def _cause(error: BaseException) -> str:
    """Return what the engine said, out of what Ray has wrapped it in."""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        error = inner
    return first_line(error)
