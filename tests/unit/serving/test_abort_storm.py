"""Clients that abort, leave and come again under the same ids: front end's client, link, loop and ranks together."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections import Counter
from typing import Any

import pytest
from test_request_loop import DECODE, Chance, scheduler

from common.decoding import EngineCore, GenerationRequest, decode_requests
from common.processes import Mesh
from common.serving.engine.links import Links
from common.serving.engine.loop import RequestLoop
from common.serving.engine.passes import CountedEngine
from common.serving.http.engines.client import EngineClient
from common.serving.http.orders import Order
from common.serving.link import Link
from common.serving.messages import Passed, Ready
from tests.told import Told

LONG = DECODE.model_copy(update={"max_new_tokens": 32, "skip_threshold": 1.0, "num_lookahead": 1})
NUM_CLIENTS, MOST_ANSWERS = 8, 3
MAX_TOKENS = (7, 32)


class Ranks:
    """A request loop in a thread, and the ranks that follow it in others."""

    def __init__(self, num_ranks: int) -> None:
        here, self.front = socket.socketpair()
        self.link = Link(here)
        told = Told(num_ranks)
        self.cores = []
        for rank in range(num_ranks):
            engine = Chance(3)
            if num_ranks > 1:
                engine.mesh = Mesh(rank=rank, bp_rank=rank, bp_size=num_ranks, relay=told.of(rank))
            self.cores.append(EngineCore(scheduler(3, LONG), engine if rank else CountedEngine(engine)))
        self.loop = RequestLoop(self.cores[0], self.cores[0].engine, Links([self.link]))  # type: ignore[arg-type]
        self.threads = [threading.Thread(target=self.loop.run, daemon=True)]
        self.threads += [threading.Thread(target=self._follow, args=(core,), daemon=True) for core in self.cores[1:]]

    def _follow(self, core: EngineCore) -> None:
        while core.has_work:
            core.step()

    def check_empty(self) -> None:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not (self.loop._served or self.loop._untold or self.loop._watched)
        for core in self.cores:
            left = core._num_given, core._aborted, core.scheduler.active, core.scheduler._room_of_slot
            assert not any(map(len, left)) and core.num_waiting == 0
        assert not self.cores[0]._queue.open_ids


class Clients:
    def __init__(self, client: EngineClient, num_aborts: int, seed: int) -> None:
        self.client, self.num_aborts, self.rng = client, num_aborts, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.whole = {
            number: next(iter(decode_requests([request(number, 0)], scheduler(1, LONG), Chance(1))))
            for number in range(NUM_CLIENTS)
        }

    async def run(self, number: int) -> None:
        """One client, which uses one id for all of its calls."""
        while self.counts["aborts"] < self.num_aborts:
            max_tokens = self.rng.choice(MAX_TOKENS)
            orders = [
                Order(index, 0, request(number, index, max_tokens), LONG)
                for index in range(self.rng.randint(1, MOST_ANSWERS))
            ]
            if self.rng.random() < 0.5:  # late: of a call that has ended
                self.counts["aborts"] += 1
                self.counts["late"] += 1
                assert await self.client.abort_call(f"t-{number}") == 0
            answers = self.client.submit(orders, is_watched=self.rng.random() < 0.2)
            await self._follow(number, answers, max_tokens)

    async def _follow(self, number: int, answers: list[Any], max_tokens: int) -> None:
        what = self.rng.choice(["read", "abort", "leave", "abort at once"])
        num_parts = self.rng.choice([0, 1, 5])
        if what == "abort at once":
            await self._abort(number)
        for answer in answers:
            await answer.accepted()
            token_ids: tuple[int, ...] = ()
            async for part in answer.parts():
                if isinstance(part, Passed):
                    continue
                token_ids += part.token_ids
                num_parts -= 1
                if num_parts == 0 and what == "abort":
                    await self._abort(number)
                    num_parts = -1
                elif num_parts == 0 and what == "leave":
                    left = [one for one in answers if not one.is_over]
                    self.client.abort(left)
                    self.counts["aborts"] += len(left)
                    self.counts["left"] += len(left)
                    while any(one.id in self.client.replicas[0].answers for one in left):
                        await asyncio.sleep(0.001)
                    return
            self._check(number, token_ids, part.finish_reason, max_tokens, is_aborted="abort" in what)

    async def _abort(self, number: int) -> None:
        count = await self.client.abort_call(f"t-{number}")
        self.counts["aborts"] += count
        self.counts["aborted by id"] += count

    def _check(
        self, number: int, token_ids: tuple[int, ...], reason: str, max_tokens: int, *, is_aborted: bool
    ) -> None:
        wanted = self.whole[number].token_ids[:max_tokens]
        self.counts[reason] += 1
        if reason == "abort":
            assert is_aborted, "by somebody else's abort"
            assert token_ids == wanted[: len(token_ids)]
        else:
            assert token_ids == wanted


def request(number: int, index: int, max_tokens: int | None = None) -> GenerationRequest:
    name, prompt = f"t-{number}-{index}", tuple(range(5, 10 + number))
    return GenerationRequest(name, prompt, LONG, max_tokens=max_tokens)


def storm(num_ranks: int, num_aborts: int) -> Counter[str]:
    ranks = Ranks(num_ranks)

    async def run() -> Counter[str]:
        ready = Ready(LONG, 3, 64, 100)
        client = EngineClient(64, lambda *_: None)
        reading = asyncio.ensure_future(client.follow(*await asyncio.open_connection(sock=ranks.front)))
        ranks.link.send([ready])
        while client.ready is None:
            await asyncio.sleep(0.001)
        client.is_loaded = True
        clients = Clients(client, num_aborts, seed=num_ranks)
        await asyncio.gather(*(clients.run(number) for number in range(NUM_CLIENTS)))
        assert client.num_open == 0
        client.end()
        await asyncio.to_thread(ranks.check_empty)
        ranks.link._socket.close()
        await reading
        return clients.counts

    for thread in ranks.threads:
        thread.start()
    return asyncio.run(asyncio.wait_for(run(), 600))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_clients_that_abort_and_leave_hurt_nobody_and_leave_nothing(num_ranks: int) -> None:
    num_aborts = 2000 if os.environ.get("LOPA_SLOW") else 80
    counts = storm(num_ranks, num_aborts)
    assert min(counts[kind] for kind in ("late", "left", "aborted by id", "abort", "length")) > 0, counts
    print(num_ranks, "ranks:", dict(counts))
