"""The relay over gloo: every command in order, however long; a rank that is gone is told of in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORKER = """
import os
import sys
from datetime import timedelta
import torch.distributed as dist
from common.decoding import Command
from common.errors import EngineError
from common.processes.relay import ReplicaRelay
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=200))
relay = ReplicaRelay(dist.group.WORLD, rank, is_first=rank == 0)
given = [Command(digest=n) if n != 5 else Command(aborted=("y" * 9000,)) for n in range(600)]
found = [relay.exchange(given[n] if rank == 0 else Command(), n) for n in range(600)]
assert found == given
dist.barrier()
if rank:
    try:
        relay.exchange(Command(), 600)
    except EngineError as error:
        print(error, flush=True)
os._exit(0)  # gloo's threads abort a process that ends before its peer
"""


@pytest.mark.slow
def test_every_command_arrives_in_order_and_a_lost_rank_is_told_of(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert told[1][0].startswith("rank 1, step 600: ")
