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

DECODE = {"num_lookahead": 1, "block_size": 8, "max_new_tokens": 16}
NUM_REQUESTS = 16


@cache
def wanted(temperature: float) -> dict[str, tuple[int, ...]]:
    """What `lopa run` makes of these requests on one process, one after another."""
    run = load_run(find_config("runs", "demo"), [f"model={ROOT / 'models' / 'demo'}"])
    run = run.model_copy(update={"decode": DecodeConfig(temperature=temperature, skip_threshold=0.95, **DECODE)})
    with build_generator(load_profile(find_config("profiles", "cpu")), run) as generator:
        prompts = {str(n): generator.tokenizer.encode(text_of(n)) for n in range(NUM_REQUESTS)}
        results = list(generator.generate(GenerationRequest(name, tuple(ids)) for name, ids in prompts.items()))
    assert all(isinstance(result, Completion) for result in results)
    return {result.id: result.token_ids for result in results}


def text_of(number: int) -> str:
    return QUESTION.format(number + 10) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(("bp", "tp", "temperature"), [(1, 1, 0.0), (1, 1, 0.7), (2, 1, 0.7), (1, 2, 0.0)])
def test_tokens_are_those_of_a_batch_run(tmp_path: Path, bp: int, tp: int, temperature: float) -> None:
    mesh = {"mesh.branch_parallel_size": bp, "mesh.tensor_parallel_size": tp}
    decode = {f"decode.{name}": value for name, value in {**DECODE, "temperature": temperature}.items()}
    settings = {**mesh, **decode, "max_num_requests": NUM_REQUESTS}
    options = [item for name, value in settings.items() for item in ("--set", f"{name}={value}")]
    launcher = "common.commands" if bp * tp == 1 else "common.commands.job"
    with Served(tmp_path / "log", *options, launcher=launcher) as server:

        def ask(number: int) -> tuple[int, ...]:
            body = {"prompt": text_of(number), "max_tokens": 16, "request_id": str(number)}
            status, made = server.post("/generate", body)
            assert status == 200, made
            return tuple(made["token_ids"])

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            among_others = dict(enumerate(pool.map(ask, range(NUM_REQUESTS))))
        alone = {number: ask(number) for number in range(2)}
    expected = {int(name): ids for name, ids in wanted(temperature).items()}
    assert among_others == expected
    assert alone == {number: expected[number] for number in alone}
