"""What a server lives through."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving.served import Served
from tests.engine.serving.storms import (
    FEW_BRANCHES,
    abort_many,
    children_of,
    sigterm_under_load,
    statuses_of_malformed,
    stream_under,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served") / "log", *FEW_BRANCHES) as server:
        yield server


@pytest.mark.slow
def test_200_requests_that_are_left_leave_nothing_behind(served: Served) -> None:
    abort_many(served, 200)
    served.wait_for(served.is_empty, "empty")
    metrics = served.metrics()
    assert metrics["lopa_requests_given_up_total"] > 50, "or hardly anybody has left"
    assert "Traceback" not in served.text


@pytest.mark.slow
def test_1000_malformed_bodies_are_refused(served: Served) -> None:
    statuses = statuses_of_malformed(served, 1000)
    assert all(400 <= status < 500 for status in statuses), statuses
    assert "Traceback" not in served.text
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200


@pytest.mark.slow
def test_sigterm_loses_no_stream(tmp_path: Path) -> None:
    whole, torn, exit_code, seconds = sigterm_under_load(tmp_path / "log", seed=0)
    assert whole and not torn and exit_code == 0 and seconds < 28
    assert "Traceback" not in (tmp_path / "log").read_text()


def refused_beside_a_held_one(server: Served) -> tuple[int, Any]:
    """What a request is answered while another has the only slot. The engine stands still meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        with server.standing_still():
            held = pool.submit(server.post, "/v1/completions", {"prompt": "a", "max_tokens": 4})
            server.wait_for(lambda: server.metrics()["lopa_requests_open"] == 1, "taken")
            refused = server.post("/v1/completions", {"prompt": "b", "max_tokens": 4})
        assert held.result()[0] == 200
    return refused


@pytest.mark.slow
def test_a_full_queue_says_so_and_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    one_slot = "--set", "serve.max_queued_requests=0", "--set", "max_num_requests=1"
    with Served(tmp_path / "log", *one_slot) as server:
        status, answer = server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4})
        assert status == 400 and "at most 1 can be taken at once" in answer["error"]["message"], "no later call helps"
        status, answer = refused_beside_a_held_one(server)
        assert status == 503 and "queue is full" in answer["error"]["message"]
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200
        (front_end,) = children_of(server.process.pid)
        os.kill(front_end, signal.SIGSTOP)  # a drain that will not end
        server.process.send_signal(signal.SIGTERM)
        for _ in range(20):  # one that comes soon after the first was noticed passes for its echo
            time.sleep(1.2)
            server.process.send_signal(signal.SIGTERM)
            if server.process.poll() is not None:
                break
        assert server.process.wait(60) == 128 + signal.SIGTERM
        os.kill(front_end, signal.SIGCONT)


@pytest.mark.slow
def test_kill_9_of_a_rank_ends_every_stream_with_an_error(tmp_path: Path) -> None:
    with Served(tmp_path / "log", *FEW_BRANCHES, profile="cpu_bp2", launcher="common.commands.job") as server:
        ranks = [pid for pid in children_of(server.process.pid) if children_of(pid) == []]
        began = time.monotonic()

        def end() -> None:
            time.sleep(1)
            os.kill(ranks[0], signal.SIGKILL)

        _, torn = stream_under(server, end)
        assert torn and time.monotonic() - began < 120
        assert server.process.wait(60) == 128 + signal.SIGKILL
        assert "was killed by SIGKILL" in server.text and "Traceback" not in server.text
