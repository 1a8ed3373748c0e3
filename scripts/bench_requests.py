"""Tokens per second over many requests at once: the first run and the second, step times, captures along the way.

python scripts/bench_requests.py PROFILE RUN [--at-once 1 4 16 64] [--limit 300] [--set key=value ...] [--output FILE]

Prompts come from the run's input. At each number of requests at once all of them are decoded twice. A step at full load
is one with as many requests as that.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from common.config import RunConfig, find_config, load_profile_and_run
from common.decoding import Completion, GenerationRequest
from common.generate import Generator, build_generator

COLUMNS = ("at_once", "first_tps", "second_tps", "step_ms", "p99_ms", "full_steps", "captures", "captures_second")


def prompts_of(run: RunConfig, generator: Generator, limit: int) -> list[GenerationRequest]:
    assert run.input is not None, "the run file names an input"
    lines = [json.loads(line) for line in Path(run.input.path).read_text(encoding="utf-8").splitlines()[:limit]]
    template = run.input.prompt_template or "{question}\n"
    texts = [template.format_map(line) for line in lines]
    return [GenerationRequest(str(n), tuple(generator.tokenizer.encode(text))) for n, text in enumerate(texts)]


def decode(generator: Generator, requests: list[GenerationRequest], at_once: int) -> dict[str, Any]:
    num_tokens, times_ms = 0, []
    began = time.perf_counter()
    with generator.decoding() as core:
        for request in requests:
            core.add_request(request)
        while core.has_work:
            is_full, started = len(core.scheduler.active) == at_once, time.perf_counter()
            outputs = core.step()
            if is_full:
                times_ms.append((time.perf_counter() - started) * 1e3)
            num_tokens += sum(len(output.token_ids) for output in outputs)
            assert all(output.result is None or isinstance(output.result, Completion) for output in outputs)
    tps = num_tokens / (time.perf_counter() - began)
    return {"tps": tps, "step_ms": median(times_ms), "p99_ms": quantiles(times_ms, n=100)[98], "steps": len(times_ms)}


def num_captured(generator: Generator) -> int:
    passes = getattr(generator.engine, "passes", None)
    return 0 if passes is None else int(passes.memory().get("graphs", 0))


def measure(options: argparse.Namespace, at_once: int) -> dict[str, Any]:
    paths = find_config("profiles", options.profile), find_config("runs", options.run)
    profile, run = load_profile_and_run(*paths, [*options.set, f"max_num_requests={at_once}"])
    with build_generator(profile, run) as generator:
        requests, before = prompts_of(run, generator, options.limit), num_captured(generator)
        first = decode(generator, requests, at_once)
        between = num_captured(generator)
        second = decode(generator, requests, at_once)
        found = {
            "at_once": at_once, "first_tps": first["tps"], "second_tps": second["tps"], "step_ms": second["step_ms"],
            "p99_ms": second["p99_ms"], "full_steps": second["steps"], "captures": between - before,
            "captures_second": num_captured(generator) - between, "captured_ahead": before,
        }  # fmt: skip
        return {**found, **generator.describe()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("run")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    rows = []
    print("  ".join(f"{name:>15}" for name in COLUMNS), flush=True)
    for at_once in options.at_once:
        rows.append(measure(options, at_once))
        values = (rows[-1][name] for name in COLUMNS)
        print(
            "  ".join(f"{value:15.2f}" if isinstance(value, float) else f"{value:15}" for value in values), flush=True
        )
    if options.output:
        Path(options.output).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
