"""What a cache of prefixes brings to requests that share a long prompt: time to first text and tokens a second.

python -m scripts.lab.shared_prompt PROFILE RUN OUTPUT.json [--shared 448] [--requests 64] [--at-once 16]

All requests come at once, once without the cache and once with an empty one, in turns. Texts have to be the same in
float32; in a narrower type a prompt that is computed with others or alone may differ in its last bits.
"""

from __future__ import annotations

import argparse
import time
from operator import eq
from pathlib import Path
from statistics import fmean, median

from common.config import load_profile, load_run
from common.decoding import Completion, GenerationRequest
from common.generate import Generator, build_generator
from scripts.lab.result import card, write_table

ROUNDS = 3
NEW_TOKENS = 64


def decoded(generator: Generator, prompts: list[tuple[int, ...]]) -> tuple[float, float, list[Completion]]:
    """Return the mean seconds to the first tokens, tokens a second, and what was decoded."""
    first: dict[str, float] = {}
    done: dict[str, Completion] = {}
    began = time.perf_counter()
    with generator.decoding() as core:
        for number, prompt in enumerate(prompts):
            core.add_request(GenerationRequest(str(number), prompt))
        while core.has_work:
            for output in core.step():
                first.setdefault(output.id, time.perf_counter() - began)
                if output.result is not None:
                    assert isinstance(output.result, Completion), output.result
                    done[output.id] = output.result
    tokens = sum(one.num_canvas_tokens for one in done.values())
    return fmean(first.values()), tokens / (time.perf_counter() - began), [done[name] for name in sorted(done)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("run")
    parser.add_argument("output", type=Path)
    parser.add_argument("--shared", type=int, default=384, help="tokens of the prompts' common beginning")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    known = parser.parse_args()
    run = load_run(known.run, [f"max_num_requests={known.at_once}", f"decode.max_new_tokens={NEW_TOKENS}"])
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    profile = load_profile(known.profile)
    same = total = 0
    with build_generator(profile, run) as generator:
        shared = [7 + n * 11 % 90 for n in range(known.shared)]
        for number in range(ROUNDS):
            prompts = [(*shared, 7 + number, 8 + one % 80, 9 + one // 80) for one in range(known.requests)]
            prompts = [(20 + number, *prompt[1:]) for prompt in prompts]  # unknown to the cache
            texts = {}
            for has_cache in (False, True):
                generator.run = run.model_copy(update={"enable_prefix_caching": has_cache})
                first_s, speed, done = decoded(generator, prompts)
                found[has_cache].append((first_s, speed))
                texts[has_cache] = [one.token_ids for one in done]
            assert profile.dtype != "float32" or texts[False] == texts[True], "the cache changes no token"
            same += sum(map(eq, texts[False], texts[True]))
            total += known.requests
    rows = []
    for has_cache, name in ((False, "without"), (True, "with")):
        first, speed = (median(values) for values in zip(*found[has_cache], strict=True))
        rows.append([name, first, speed])
        print(rows[-1])
    conditions = (
        f"{known.run}, {known.requests} requests that come together, {known.at_once} decoded at once; prompts share "
        f"{known.shared} tokens and have 3 more, {NEW_TOKENS} are filled. First text: the mean, waiting included; "
        f"medians of {ROUNDS} rounds in turns; {same} of {total} texts are the same with and without"
    )
    command = f"python -m scripts.lab.shared_prompt {known.profile} {known.run} OUTPUT.json"
    columns = [["cache of prefixes", ""], ["first text, s", ".2f"], ["tokens/s", ",.0f"]]
    write_table(known.output, card(profile.device), command, conditions, columns, rows)


if __name__ == "__main__":
    main()
