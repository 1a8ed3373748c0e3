"""Measure what a model makes of the text after a hole: the demo's own solutions with a piece of their middle missing.

python -m scripts.lab.infilling [PROBLEMS]    writes docs/results/infilling.json

The first held-out math problems, models/demo, greedy, the whole canvas in every pass (`vanilla`), on a CPU. A hole
begins in the middle of the solution. Log p: of the true tokens in one pass in which all of the hole is masked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any, cast

import numpy as np

from common.config import load_profile, load_run
from common.decoding import GenerationRequest, GivesLogprobs
from common.generate import Generator, build_generator
from common.requests import Wishes
from common.requests.canvases import held
from scripts.lab.result import RESULTS, heldout_math, write_table

RESULT = RESULTS / "infilling.json"
HOLES = (4, 8, 16)  # tokens
_COUNT = 300
_CANVAS = 192  # tokens that the model was trained with, prompt apart


def requests_of(generator: Generator, texts: Sequence[tuple[list[int], list[int]]], hole: int, is_seen: bool) -> Any:
    """Return requests for the middle of each solution, with its own tokens after it or with masks."""
    decode, automaton = held(Wishes(suffix="x"), generator.run.decode, generator.model_config.vocab_size)
    found = []
    for number, (question, answer) in enumerate(texts):
        begin = (len(answer) - hole) // 2
        rest = tuple(answer[begin + hole :]) if is_seen else ()
        own = decode.changed({"max_new_tokens": _CANVAS - begin})
        canvas = (-1,) * (hole if is_seen else _CANVAS - begin) + rest
        found.append(
            GenerationRequest(
                str(number), (*question, *answer[:begin]), own, max_tokens=hole, automaton=automaton, canvas=canvas
            )
        )
    return found


def first_pass(generator: Generator, request: GenerationRequest, true: Sequence[int]) -> float:
    """Return the mean log probability of the true tokens before any is filled."""
    with generator.decoding() as core:
        scheduler = core.scheduler
        scheduler.admit(request)
        plan = scheduler.plan_step()
        generator.engine.forward(plan)
        entry_F = np.arange(len(true)) + len(request.prompt) - generator.model_config.shift
        told = cast(GivesLogprobs, generator.engine).logprobs(plan, entry_F, np.array(true), 0)
        scheduler.drop(request.id)
    return float(told.logprob_F.mean())


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    run = load_run("demo", ["decode.strategy=vanilla", "decode.num_lookahead=0", "max_num_requests=8"])
    rows = []
    with build_generator(load_profile("cpu"), run) as generator:
        encode = generator.tokenizer.encode
        texts = [(encode(one["question"] + "\n"), encode(one["answer"])) for one in heldout_math(count)]
        for hole in HOLES:
            true = [answer[(len(answer) - hole) // 2 :][:hole] for _, answer in texts]
            row: list[Any] = [hole]
            for is_seen in (False, True):
                requests = requests_of(generator, texts, hole, is_seen)
                done = {one.id: list(one.token_ids) for one in generator.generate(requests)}
                same = fmean(done[request.id] == own for request, own in zip(requests, true, strict=True))
                told = fmean(first_pass(generator, *each) for each in zip(requests, true, strict=True))
                row += [100 * same, told]
            rows.append(row)
            print(*row, flush=True)
    conditions = (
        f"The first {count} held-out math problems, models/demo, vanilla, k = 0, greedy. The piece of a solution that "
        "begins in its middle is a hole; what stands after it is masked or given. Log p: the mean of the true tokens "
        "in one pass in which the whole hole is masked"
    )
    columns = [
        ["tokens of the hole", "d"], ["exact, what follows masked, %", ".1f"], ["log p", ".2f"],
        ["exact, what follows given, %", ".1f"], ["log p", ".2f"],
    ]  # fmt: skip
    write_table(RESULT, "a CPU", "python -m scripts.lab.infilling", conditions, columns, rows)


if __name__ == "__main__":
    main()
