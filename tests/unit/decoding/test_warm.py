"""Loops are compiled before the first request, whoever looks on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.compiled import IS_COMPILED

OBSERVED = """
from common.config import DecodeConfig
from common.decoding.scheduling import advancing, scoring, warm

def compiled():
    found = [each for module in (advancing, scoring) for each in vars(module).values() if hasattr(each, "_for_python")]
    return sum(len(each._for_python.signatures) for each in found)

warm.warm_up()
plain = compiled()
warm.warm_up_observed()
warmed, seen = compiled(), []
warm._decoded(DecodeConfig(num_lookahead=3, temperature=0.8, block_size=8, max_new_tokens=16), 2, observer=seen.append)
print(len(seen), plain, warmed, compiled())
"""


@pytest.mark.skipif(not IS_COMPILED, reason="the loops are not compiled")
def test_an_observed_request_has_nothing_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", OBSERVED], capture_output=True, text=True, check=True)
    num_seen, plain, warmed, after = map(int, done.stdout.split())
    assert num_seen > 4 and plain < warmed == after
