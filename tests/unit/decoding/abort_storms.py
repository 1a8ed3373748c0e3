"""Requests that are added and aborted at random between the steps of some ranks, under few ids that are used again and
again. What an abort must do is known of each request: end that one with the next step, and nothing else.

python tests/unit/decoding/abort_storms.py 2000            aborts over 1, 2 and 4 ranks: threads and processes
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from functools import cache
from pathlib import Path

from test_core import HashedEngine, alone, core_of, request

from common.decoding import Completion, EngineCore, Relay
from common.processes import Mesh
from tests.told import Told

NAMES = tuple("abcdefghijkl")
LENGTHS = (16, 24)
SETTINGS = {"stop_at_eos": False, "skip_threshold": 1.0, "num_lookahead": 1}
MOST_OPEN = 9  # three slots, so that most requests wait, of which the other ranks know three


@cache
def whole(name: str, length: int) -> tuple[int, ...]:
    return alone(request(name, max_new_tokens=length, **SETTINGS)).token_ids


class Storm:
    """Rank 0's side. open: of each open id its length, and the step before which it was aborted."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core = core
        self.rng = random.Random(seed)
        self.open: dict[str, list[int | None]] = {}
        self.counts: Counter[str] = Counter()

    def run(self, num_aborts: int) -> Counter[str]:
        while self.counts["asked"] < num_aborts:
            self._late_aborts()
            self._add()
            self._abort()
            self._step()
        while self.core.has_work:
            self._step()
        self.core.end()
        assert not self.open, f"never ended: {self.open}"
        return self.counts

    def _closed(self) -> list[str]:
        return [name for name in NAMES if name not in self.open]

    def _late_aborts(self) -> None:
        """Abort an id that is closed; some are opened again at once."""
        for name in self.rng.sample(self._closed(), k=1):
            self.core.abort(name)
            self.counts["asked"] += 1
            self.counts["late"] += 1

    def _add(self) -> None:
        while len(self.open) < MOST_OPEN and self.rng.random() < 0.9:
            name, length = self.rng.choice(self._closed()), self.rng.choice(LENGTHS)
            self.core.add_request(request(name, max_new_tokens=length, **SETTINGS))
            self.open[name] = [length, None]
            self.counts["added"] += 1

    def _abort(self) -> None:
        for name in self.rng.sample([*self.open], k=min(len(self.open), self.rng.choice([0, 0, 1, 1, 2, 9]))):
            is_active = any(decoding.request.id == name for decoding in self.core.scheduler.active)
            self.core.abort(name)
            self.open[name][1] = self.counts["steps"]
            self.counts["asked"] += 1
            self.counts["of one being decoded" if is_active else "of one that waits"] += 1

    def _step(self) -> None:
        outputs = self.core.step()
        for output in outputs:
            if output.result is None:
                continue
            assert isinstance(output.result, Completion)
            length, aborted_at = self.open.pop(output.id)
            assert isinstance(length, int)
            if output.result.finish_reason != "abort":
                assert output.result.token_ids == whole(output.id, length), output
                self.counts["whole"] += 1
            else:
                assert aborted_at is not None, f"{output.id} ends by the abort of an earlier request"
                assert output.result.token_ids == whole(output.id, length)[: len(output.result.token_ids)]
                self.counts["aborted"] += 1
        lost = [name for name, (_, aborted_at) in self.open.items() if aborted_at is not None]
        assert not lost, f"{lost} were aborted before this step and go on"
        self.counts["steps"] += 1


def check_nothing_is_left(core: EngineCore) -> None:
    scheduler, queue = core.scheduler, core._queue
    assert not scheduler.active and sorted(scheduler._free_slots) == [0, 1, 2]
    left = scheduler._room_of_slot, scheduler._failures, core._aborted, core._num_given, core._under_way
    assert not any(left), left
    assert not len(queue) and not queue.open_ids and not queue._reasons


def rank_of(rank: int, num_ranks: int, relay: Relay | None) -> EngineCore:
    mesh = Mesh(rank=rank, bp_rank=rank, bp_size=num_ranks, relay=relay)
    return core_of(HashedEngine(mesh))


def follow(core: EngineCore) -> None:
    while core.has_work:
        core.step()
    check_nothing_is_left(core)


def storm_in_threads(num_ranks: int, num_aborts: int, seed: int) -> Counter[str]:
    relays = Told(num_ranks)
    cores = [rank_of(rank, num_ranks, relays.of(rank) if num_ranks > 1 else None) for rank in range(num_ranks)]
    done: list[int] = []

    def run(rank: int) -> None:
        follow(cores[rank])
        done.append(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, num_ranks)]
    for thread in threads:
        thread.start()
    counts = Storm(cores[0], seed).run(num_aborts)
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [*range(1, num_ranks)], "a rank has failed or hangs"
    check_nothing_is_left(cores[0])
    return counts


def storm_in_processes(num_ranks: int, num_aborts: int, seed: int) -> Counter[str]:
    root = Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as folder:
        given = [str(num_ranks), str(num_aborts), str(seed), str(Path(folder) / "store")]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", str(rank), *given],
                env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        told = [rank.communicate(timeout=500) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, told
    return Counter(json.loads(told[0][0].splitlines()[-1]))


def be_rank(rank: int, num_ranks: int, num_aborts: int, seed: int, store: str) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from common.processes.relay import ReplicaRelay

    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
    assert dist.group.WORLD is not None
    core = rank_of(rank, num_ranks, ReplicaRelay(dist.group.WORLD, rank, is_first=rank == 0))
    if rank:
        follow(core)
    else:
        counts = Storm(core, seed).run(num_aborts)
        check_nothing_is_left(core)
        print(json.dumps(counts), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads abort a process that ends before its peer


def main() -> None:
    if sys.argv[1] == "rank":
        rank, num_ranks, num_aborts, seed, store = sys.argv[2:]
        be_rank(int(rank), int(num_ranks), int(num_aborts), int(seed), store)
        return
    num_aborts = int(sys.argv[1])
    for num_ranks in (1, 2, 4):
        print(num_ranks, "ranks, threads:", dict(storm_in_threads(num_ranks, num_aborts, seed=num_ranks)), flush=True)
        if num_ranks > 1:
            counts = storm_in_processes(num_ranks, num_aborts, seed=num_ranks)
            print(num_ranks, "ranks, processes:", dict(counts), flush=True)


if __name__ == "__main__":
    main()
