"""Decode all requests of an input and yield each as it ends: the loop around `core.EngineCore`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from common.decoding.core import EngineCore
from common.decoding.engine import Engine
from common.decoding.request import Completion, GenerationRequest, Rejection, RequestQueue
from common.decoding.scheduling.scheduler import Scheduler


def decode_requests(
    requests: Iterable[GenerationRequest | None], scheduler: Scheduler, engine: Engine
) -> Iterator[Completion | Rejection]:
    """Decode all requests, as many at once as the engine can hold; yield each as it ends.

    What is yielded is detokenised and written, and the next request read, while the device computes the next step.
    None among the requests means "nothing now". An error of the input is raised once all that came before it has
    ended. On several ranks those of rank 0 are decoded, and all yield the same.
    """
    source = RequestQueue(requests)
    core = EngineCore(scheduler, engine, source)
    while core.has_work:
        yield from (output.result for output in core.step() if output.result is not None)
    core.end()
    source.raise_failure()
