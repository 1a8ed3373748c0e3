"""`lopa serve` with several replicas: one goes on where another is killed, and clients do not see how many they are."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from started import lopa

from common.config import find_config, load_profile, load_run
from common.generate import build_generator
from tests.engine.serving.served import QUESTION, ROOT, WAIT_S, Served
from tests.engine.serving.streams import Stream, pid_of

TWO = ("--set", "mesh.data_parallel_size=2")
LENGTH = 96


def streaming(served: Served, number: int) -> Stream:
    return Stream(served.port, QUESTION.format(number) + "\n", LENGTH)


@pytest.fixture(scope="module")
def whole() -> dict[str, str]:
    """The texts of one process."""
    run = load_run(find_config("runs", "demo"), [f"model={ROOT / 'models' / 'demo'}"])
    prompts = [QUESTION.format(number) + "\n" for number in range(10, 26)]
    with build_generator(load_profile(find_config("profiles", "cpu")), run) as generator:
        texts = generator.complete(*prompts, max_tokens=LENGTH, ignore_eos=True)
    return dict(zip(prompts, texts, strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two replicas with room for two requests each, behind two front ends."""
    settings = (*TWO, "--set", "max_num_requests=2", "--set", "serve.num_front_ends=2")
    with Served(tmp_path_factory.mktemp("served") / "log", *settings) as server:
        wait_for_all(server)
        yield server
    assert "Traceback" not in server.text


def wait_for_all(served: Served) -> None:
    served.wait_for(lambda: json.loads(served.get("/ready")[1]).get("replicas") == ["ready", "ready"], "whole")


def by_replica(served: Served, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf'^{name}{{engine="\d".*}} (.+)$', served.get("/metrics")[1], re.M)]


@pytest.mark.slow
def test_a_load_is_spread_and_answered_as_by_one_process(served: Served, whole: dict[str, str]) -> None:
    streams = [streaming(served, number) for number in range(10, 26)]
    for stream in streams:
        stream.join(WAIT_S)
    assert {stream.prompt: stream.text for stream in streams} == whole
    ended = by_replica(served, "vllm:e2e_request_latency_seconds_count")
    assert sum(ended) == 16 and min(ended) >= 6, ended
    for _ in range(8):  # whichever front end is asked
        assert by_replica(served, "vllm:e2e_request_latency_seconds_count") == ended
    served.wait_for(lambda: by_replica(served, "lopa_requests_open") == [0, 0], "empty")


@pytest.mark.slow
def test_a_call_is_aborted_from_any_front_end(served: Served) -> None:
    body = {"prompt": QUESTION.format(7), "max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "n": 4}
    for attempt in range(6):
        with ThreadPoolExecutor() as pool:
            call = pool.submit(served.post, "/v1/completions", {**body, "request_id": f"c{attempt}"})
            served.wait_for(lambda: sum(by_replica(served, "lopa_requests_open")) == 4, "taken")
            assert served.post("/abort_request", {"request_id": f"c{attempt}"}) == (200, {"aborted": 4})
            status, answer = call.result()
            assert status == 200 and {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}


def amid_answers(served: Served, pid: int, numbers: range) -> tuple[list[Stream], list[Stream]]:
    """Stop a process of replica 1 where an answer of that replica has begun. Returns all streams, and those begun."""
    os.kill(pid, signal.SIGSTOP)
    streams = [streaming(served, number) for number in numbers]

    def left() -> list[Stream]:
        return [stream for stream in streams if stream.is_alive()]

    def is_done_elsewhere() -> bool:
        return len(left()) < len(streams) and by_replica(served, "lopa_requests_open")[0] == 0

    served.wait_for(is_done_elsewhere, "done by the other replica")
    while not any(stream.has_begun for stream in left()):
        assert left(), "none of its answers was seen while it was made"
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
    return streams, [stream for stream in left() if stream.has_begun]


def check_lost(streams: list[Stream], begun: list[Stream], most: int, whole: dict[str, str], log: str) -> None:
    """Check after a kill that what had begun ends with an error within five seconds, the rest as without it."""
    killed_at = time.monotonic()
    for stream in streams:
        stream.join(WAIT_S)
    lost = [stream for stream in streams if stream.error]
    assert {id(stream) for stream in begun} <= {id(stream) for stream in lost} and len(lost) <= most, log
    assert all(stream.ended_at - killed_at < 5 for stream in lost), log
    assert all(stream.error or stream.text == whole[stream.prompt] for stream in streams), log


@pytest.mark.slow
def test_a_killed_replica_costs_what_it_had_begun_and_comes_again(served: Served, whole: dict[str, str]) -> None:
    victim = pid_of(served, 1)
    streams, begun = amid_answers(served, victim, range(10, 26))
    os.kill(victim, signal.SIGKILL)
    check_lost(streams, begun, 2, whole, served.text)
    assert {stream.error for stream in streams} == {"", "replica 1 has ended"}
    assert by_replica(served, "lopa_engine_ends_total") == [0, 1]
    wait_for_all(served)
    again = [streaming(served, number) for number in range(10, 14)]
    for stream in again:
        stream.join(WAIT_S)
    assert all(stream.text == whole[stream.prompt] for stream in again)
    assert "replica 1 was killed by SIGKILL; it is started again in 1 s" in served.text


@pytest.mark.slow
def test_a_drain_lets_all_replicas_finish(tmp_path: Path, whole: dict[str, str]) -> None:
    with Served(tmp_path / "log", *TWO, "--set", "max_num_requests=2", "--set", "serve.drain_timeout_s=200") as server:
        wait_for_all(server)
        streams = [streaming(server, number) for number in range(10, 16)]
        server.wait_for(lambda: sum(stream.has_begun for stream in streams) >= 2, "under way")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        for stream in streams:
            stream.join(WAIT_S)
            assert stream.text == whole[stream.prompt]


@pytest.mark.slow
def test_a_replica_of_several_ranks_ends_alone(tmp_path: Path, whole: dict[str, str]) -> None:
    with Served(tmp_path / "log", *TWO, profile="cpu_bp2", launcher="common.commands.job") as server:
        wait_for_all(server)
        launcher = pid_of(server, 1)
        ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        victim = max(map(int, ranks))
        streams, begun = amid_answers(server, victim, range(10, 18))
        os.kill(victim, signal.SIGKILL)
        check_lost(streams, begun, 8, whole, server.text)
        wait_for_all(server)


@pytest.mark.slow
def test_what_fails_at_the_first_start_ends_the_server() -> None:
    found = lopa("serve", "demo", "--profile", "cpu", "--port", "0", *TWO, "--set", "model=absent", timeout=WAIT_S)
    last = found.stderr.splitlines()[-1]
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert re.fullmatch(r"lopa: replica [01] ended with exit code 2: absent: no such folder.*", last), found.stderr
