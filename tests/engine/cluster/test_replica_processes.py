"""The engine's processes beside an actor, without Ray: they answer, they are started again, they say why they end."""

from __future__ import annotations

import asyncio
import os

import pytest

from common.cluster.replica import LastingReplica, Replica
from common.config import load_profile, load_run
from common.decoding import Completion, GenerationRequest
from common.errors import EngineError
from common.generate import build_generator
from tests.engine.cluster.rayed import kill_one, processes, wait_for

pytestmark = pytest.mark.slow
PROFILE = load_profile("cpu")
RUN = load_run("demo", ["decode.max_new_tokens=64", "max_num_requests=2"])
REQUESTS = [GenerationRequest(f"r{number}", tuple(range(20 + number, 60 + number))) for number in range(6)]


def test_a_killed_engine_is_started_again_and_every_request_is_answered_as_by_one_process() -> None:
    replica = LastingReplica(PROFILE, RUN)

    async def all_results() -> list[object]:
        tasks = [asyncio.ensure_future(replica.result(request)) for request in REQUESTS]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        kill_one("common.cluster.engine")
        return await asyncio.gather(*tasks)

    results = asyncio.run(all_results())
    with build_generator(PROFILE, RUN) as generator:
        wanted = {result.id: result.token_ids for result in generator.generate(REQUESTS)}
    assert {r.id: r.token_ids for r in results if isinstance(r, Completion)} == wanted
    replica._replica.close()
    wait_for(lambda: not processes("common.cluster.engine"), "the engine ends with its replica", 30)


def test_an_engine_that_does_not_start_says_why() -> None:
    broken = RUN.model_copy(update={"model": os.devnull})
    with pytest.raises(EngineError, match="/dev/null"):
        Replica(PROFILE, broken)
