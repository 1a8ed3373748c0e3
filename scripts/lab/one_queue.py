"""Measure what one queue of requests saves two replicas whose requests differ five-fold in length.

python -m scripts.lab.one_queue [PAIRS]    writes docs/results/one_queue_cpu.json

Both ways are a batch run with two replicas, a thread each, on the demo's problems; with equal shares each replica takes
every other request. Seconds are those of decoding, without the load. What other work on the machine does to seconds it
does not do to passes: those up to the last end, each request being taken in its turn by the place that is free first.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from scripts.lab.result import ROOT, busy_cpu, heldout_math, write_table

RESULT = ROOT / "docs" / "results" / "one_queue_cpu.json"
LENGTHS = (32, 64, 96, 128, 160)
COUNT, AT_ONCE, ORDERS = 30, 2, 1000
SETTINGS = (
    f"max_num_requests={AT_ONCE}", "mesh.data_parallel_size=2", "decode.num_lookahead=0", "decode.stop_at_eos=false",
    "decode.max_new_tokens=160", "input.settings_field=decode",
)  # fmt: skip


def requests() -> list[dict[str, Any]]:
    """Return problems of the demo, each with a length drawn from LENGTHS."""
    drawn = random.Random(0)
    return [
        {"id": number, "prompt": f"{problem['question']}\n", "decode": {"max_tokens": drawn.choice(LENGTHS)}}
        for number, problem in enumerate(heldout_math(COUNT))
    ]


def decoded(way: str) -> tuple[float, list[int]]:
    """Return the seconds of a run, and the passes of its requests in their order."""
    with tempfile.TemporaryDirectory() as base:
        file, output = Path(base) / "in.jsonl", Path(base) / "out.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in requests()))
        options = [
            word for one in (*SETTINGS, f"input.path={file}", f"output.path={output}") for word in ("--set", one)
        ]
        command = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        command += ["-m", "scripts.lab.one_queue", way, "run", "--profile", "cpu", "demo", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
        seconds = json.loads((Path(base) / "out.metrics.json").read_text())["this_start"]["wall_s"]
        found = {record["id"]: record["steps"] for record in map(json.loads, output.open())}
    return seconds, [found[number] for number in range(COUNT)]


def replica(way: str, arguments: Sequence[str]) -> None:
    """Be one replica of a run."""
    import common.batch.run as batch_run
    from common.commands.__main__ import main as lopa
    from common.processes import global_rank, num_started

    if way == "equal":
        batch_run.take_turns = lambda count: iter(range(global_rank(), count, num_started()))
    sys.argv = ["lopa", *arguments]
    lopa()


def last_end(passes: Sequence[int], places: int) -> int:
    """Return when the last of these requests has ended, each taken in its turn by the place that is free first."""
    free = [0] * places
    for one in passes:
        free[free.index(min(free))] += one
    return max(free)


def over_orders(passes: list[int]) -> tuple[list[int], list[int]]:
    """Return the passes up to the last end in orders of the requests drawn at random: of the queue, of equal shares."""
    drawn = random.Random(0)
    orders = [drawn.sample(passes, len(passes)) for _ in range(ORDERS)]
    queue = [last_end(order, 2 * AT_ONCE) for order in orders]
    return queue, [max(last_end(order[rank::2], AT_ONCE) for rank in range(2)) for order in orders]


def main(num_pairs: int) -> None:
    pairs = [[decoded(way) for way in ("queue", "equal")] for _ in range(num_pairs)]
    passes = pairs[0][0][1]
    assert all(found == passes for pair in pairs for _, found in pair), "a request takes its passes wherever it is"
    floor = sum(passes) / (2 * AT_ONCE)
    rows: list[list[Any]] = [["floor", None, floor, floor]]
    for place, (name, ends) in enumerate(zip(("one queue", "equal shares"), over_orders(passes), strict=True)):
        rows.insert(place, [name, median(pair[place][0] for pair in pairs), median(ends), quantiles(ends, n=20)[-1]])
    conditions = (
        f"{COUNT} requests of {LENGTHS[0]} to {LENGTHS[-1]} tokens, k = 0, {AT_ONCE} at once on each of two replicas. "
        f"Seconds are medians of {num_pairs} runs in turns, passes are over {ORDERS:,} orders of the requests; the "
        "floor is all passes over all places"
    )
    columns = [["", ""], ["seconds", ".1f"], ["passes, median", ",.0f"], ["passes, one order in 20", ",.0f"]]
    print([[seconds for seconds, _ in pair] for pair in pairs])
    write_table(RESULT, busy_cpu(), "python -m scripts.lab.one_queue", conditions, columns, rows)


if __name__ == "__main__":
    if sys.argv[1:2] in (["queue"], ["equal"]):
        replica(sys.argv[1], sys.argv[2:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
