"""One request is decoded and five wait; whoever waits and is aborted or left is never decoded, on every mesh."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving.served import QUESTION, Served
from tests.soaking import soaking

NUM_TOKENS = 64
SETTINGS = ("max_num_requests=1", "decode.num_lookahead=1", "decode.skip_threshold=1.0", "max_model_len=320")


@pytest.mark.slow
@pytest.mark.parametrize(("bp", "tp"), [(1, 1), (1, 2), pytest.param(2, 1, marks=soaking)])
def test_whoever_waits_and_is_aborted_is_not_decoded(tmp_path: Path, bp: int, tp: int) -> None:
    settings = [*SETTINGS, f"mesh.branch_parallel_size={bp}", f"mesh.tensor_parallel_size={tp}"]
    options = [item for setting in settings for item in ("--set", setting)]
    launcher = "common.commands" if bp * tp == 1 else "common.commands.job"
    with Served(tmp_path / "log", *options, launcher=launcher) as server, ThreadPoolExecutor(6) as pool:

        def ask(number: int) -> Any:
            own = {"request_id": str(number), "max_tokens": NUM_TOKENS, "ignore_eos": True}
            status, body = server.post("/v1/completions", {"prompt": QUESTION.format(number + 10), **own})
            assert status == 200, body
            return body

        def num_passes() -> float:
            return sum(value for name, value in server.metrics().items() if name.startswith("lopa_forwards_total"))

        def run_and_abort(which: list[int]) -> tuple[list[Any], float]:
            asked = [pool.submit(ask, 0)]
            server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 1, "running")
            asked += [pool.submit(ask, number) for number in range(1, 6)]
            server.wait_for(lambda: server.metrics()["vllm:num_requests_waiting"] == 5, "waiting")
            before = num_passes()
            for number in which:
                assert server.post("/abort_request", {"request_id": str(number)}) == (200, {"aborted": 1})
            answers = [one.result() for one in asked]
            server.wait_for(server.is_empty, "empty", 30)
            return answers, num_passes() - before

        (first, *rest), passes = run_and_abort([1, 2, 3, 4, 5])
        assert first["choices"][0]["finish_reason"] == "length"
        assert [one["choices"][0]["finish_reason"] for one in rest] == ["abort"] * 5
        assert [one["usage"]["completion_tokens"] for one in rest] == [0] * 5
        assert passes < 2 * NUM_TOKENS, "the one that ran, which fills a token a pass or more"
        answers, passes = run_and_abort([0, 1, 2, 3, 4, 5])
        assert [one["choices"][0]["finish_reason"] for one in answers] == ["abort"] * 6
        assert passes < NUM_TOKENS
        assert ask(5)["choices"][0]["finish_reason"] == "length", "ids may be used again"
