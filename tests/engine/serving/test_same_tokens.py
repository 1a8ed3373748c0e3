"""A request over HTTP gets the tokens that a batch run gives it, alone and among others, on every mesh."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from common.config import DecodeConfig, find_config, load_profile, load_run
from common.decoding import Completion, GenerationRequest
from common.generate import build_generator
from tests.engine.serving.served import QUESTION, ROOT, Served
from tests.soaking import soaking

DECODE = {"num_lookahead": 1, "block_size": 8, "max_new_tokens": 16}
NUM_REQUESTS = 16


@cache
def wanted() -> dict[int, tuple[int, ...]]:
    """What `lopa run` makes of these requests on one process, one after another."""
    run = load_run(find_config("runs", "demo"), [f"model={ROOT / 'models' / 'demo'}"])
    decode = DecodeConfig(skip_threshold=0.95, **DECODE)
    with build_generator(
        load_profile(find_config("profiles", "cpu")), run.model_copy(update={"decode": decode})
    ) as generator:
        requests = [
            GenerationRequest(
                str(number),
                tuple(generator.tokenizer.encode(text_of(number))),
                decode.model_copy(update={"temperature": temperature_of(number)}),
            )
            for number in range(NUM_REQUESTS)
        ]
        results = list(generator.generate(requests))
    assert all(isinstance(result, Completion) for result in results)
    return {int(result.id): result.token_ids for result in results}


def text_of(number: int) -> str:
    return QUESTION.format(number + 10) + "\n"


def temperature_of(number: int) -> float:
    return 0.7 if number % 2 else 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("bp", "tp"), [(1, 1), (1, 2), pytest.param(2, 1, marks=soaking)])
def test_tokens_are_those_of_a_batch_run(tmp_path: Path, bp: int, tp: int) -> None:
    mesh = {"mesh.branch_parallel_size": bp, "mesh.tensor_parallel_size": tp}
    decode = {f"decode.{name}": value for name, value in DECODE.items()}
    settings = {**mesh, **decode, "max_num_requests": NUM_REQUESTS}
    options = [item for name, value in settings.items() for item in ("--set", f"{name}={value}")]
    launcher = "common.commands" if bp * tp == 1 else "common.commands.job"
    with Served(tmp_path / "log", *options, launcher=launcher) as server:

        def ask(number: int) -> tuple[int, ...]:
            own = {"max_tokens": 16, "request_id": str(number), "temperature": temperature_of(number)}
            status, made = server.post("/generate", {"prompt": text_of(number), **own})
            assert status == 200, made
            return tuple(made["token_ids"])

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            among_others = dict(enumerate(pool.map(ask, range(NUM_REQUESTS))))
        alone = {number: ask(number) for number in range(2)}
    assert among_others == wanted()
    assert alone == {number: wanted()[number] for number in alone}
