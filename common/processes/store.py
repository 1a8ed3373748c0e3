"""Values that all processes of a run share without a collective: replicas may come hours apart, where one has the
harder requests, and a collective would time out. These go through the launcher's key-value store, without a deadline:
if a process dies, the launcher ends the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count as numbers
from itertools import takewhile
from typing import Any

from common.errors import LOST_PEER, EngineError
from common.processes.ranks import global_rank, num_started

_POLL_S = 0.2
_next = numbers()


def share_from_first(value: Any) -> Any:
    """Return rank 0's value (plain JSON) on every rank; every rank calls it."""
    if num_started() == 1:
        return value
    store, key = _store(), _next_key("value")
    if global_rank() == 0:
        store.set(key, json.dumps(value))
        return value
    while not store.check([key]):
        time.sleep(_POLL_S)
    return json.loads(store.get(key))


def wait_for_all(while_waiting: Callable[[], None]) -> None:
    """Wait on rank 0 until every rank has come here; the others return at once."""
    if num_started() == 1:
        return
    store, key = _store(), _next_key("arrived")
    num_arrived = store.add(key, 1)
    while global_rank() == 0 and num_arrived < num_started():
        time.sleep(_POLL_S)
        while_waiting()
        num_arrived = store.add(key, 0)


def meet(timeout_s: float) -> None:
    """Wait until every process has come here. Raises EngineError."""
    if num_started() == 1:
        return
    store, key = _store(), _next_key("met")
    num_come, deadline = store.add(key, 1), time.monotonic() + timeout_s
    while num_come < num_started():
        if time.monotonic() > deadline:
            missing = num_started() - num_come
            raise EngineError(
                f"rank {global_rank()}: {missing} of {num_started()} processes have not loaded within {timeout_s:g} s: "
                f"{LOST_PEER}, or set npu.start_timeout_s higher"
            )
        time.sleep(_POLL_S)
        num_come = store.add(key, 0)


def shared_count(name: str, add: int = 0) -> int:
    """Return what all processes have added under this name, with what this one adds now."""
    return int(_store().add(f"lopa/count/{name}", add)) if num_started() > 1 else 0


def take_turns(count: int) -> Iterator[int]:
    """Return the places 0 to count - 1 in ascending order, each of them given to one of all that ask; every rank makes
    the call, and one of each replica asks. A place is taken when it is asked for."""
    if num_started() == 1:
        return iter(range(count))
    name = _next_key("turn")
    return takewhile(lambda place: place < count, iter(lambda: shared_count(name, 1) - 1, None))


def _next_key(kind: str) -> str:
    """Return a key that is the same on every rank, since all make the same calls."""
    return f"lopa/{kind}/{next(_next)}"


def _store() -> Any:
    return _store_at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


@cache
def _store_at(host: str, port: int) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
