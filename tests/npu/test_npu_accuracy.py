"""Problems of the shipped model, decoded freely: lopa_ascend on simulated devices against lopa_cuda.

LOPA_ACCURACY_PROBLEMS=100 makes the numbers of scripts/lab/ascend_evidence.md, in sixteen times the time: a problem
takes 15 s of one core in W8A8.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.sim, pytest.mark.slow]
NUM_PROBLEMS, NUM_LOOKAHEAD = int(os.environ.get("LOPA_ACCURACY_PROBLEMS", "6")), 1
# Large temporaries stay with the process, instead of going back to the system and being zeroed again.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)}

Lanes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def lanes(torch_npu: Any) -> Lanes:
    """All at once: two cores have work from the first to the last."""
    command = [sys.executable, str(Path(__file__).with_name("accuracy.py"))]
    numbers = [str(NUM_PROBLEMS), str(NUM_LOOKAHEAD)]
    environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1"}
    # See tests/engine/lopa_ascend/test_ascend_demo.py; without AVX-512 oneDNN's products of int8 are not exact.
    isa_of = {"w8a8": {}, "bf16": {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "cuda": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}
    running = {
        lane: subprocess.Popen(
            [*command, lane, *numbers], env={**environment, **isa}, stdout=subprocess.PIPE, text=True
        )
        for lane, isa in isa_of.items()
    }
    try:
        printed = {lane: process.communicate(timeout=1500)[0] for lane, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert all(process.returncode == 0 for process in running.values())
    return {lane: json.loads(text.splitlines()[-1]) for lane, text in printed.items()}


def share_of_equal_positions(found: dict[str, list[int]], wanted: dict[str, list[int]]) -> float:
    """A position that only one of the answers has counts as different."""
    pairs = [pair for id, answer in wanted.items() for pair in zip_longest(found[id], answer)]
    return sum(left == right for left, right in pairs) / len(pairs)


def test_in_bfloat16_the_tokens_are_those_of_the_cuda_engine(lanes: Lanes) -> None:
    share = share_of_equal_positions(lanes["bf16"]["answers"], lanes["cuda"]["answers"])
    print(f"{share:.2%} of all positions are equal")
    assert len(lanes["cuda"]["answers"]) == NUM_PROBLEMS
    assert share >= 0.99


def test_as_many_problems_are_solved_as_by_the_cuda_engine(lanes: Lanes) -> None:
    percent_of = {lane: result["percent_right"] for lane, result in lanes.items()}
    print(percent_of)
    assert percent_of["cuda"] > 50  # so few problems only tell a working model from noise
    one_problem = 100 / NUM_PROBLEMS
    assert abs(percent_of["bf16"] - percent_of["cuda"]) <= max(1, one_problem)
    assert abs(percent_of["w8a8"] - percent_of["cuda"]) <= max(2, one_problem)
