"""Tokens a second at several loads and numbers of lookaheads, a large model's passes with a small model's answers.

python scripts/bench_throughput.py PROFILE RUN --answers RUN [--at-once 1 4 16 64] [--lookahead 0 3 7 auto]

RUN is what is timed (dummy weights will do), --answers the run whose model, settings and input decide which tokens are
accepted; both models have one vocabulary. One process. Requests are decoded four times over, 16 at the least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch

from common.batch import prompt_or_reason, read_lines
from common.bench.throughput import Load, Throughput, Timed, as_json, table
from common.checkpoint import Tokenizer, load_model_config
from common.config import DeviceProfile, RunConfig, find_config, load_profile_and_run
from common.errors import ConfigError, EngineError
from common.generate import build_generator
from common.platforms import build_engine

LEAST_REQUESTS = 16


def measure(options: argparse.Namespace) -> dict[str, Any]:
    most = max(options.at_once)
    sizes = [f"max_num_requests={most}"]
    profile, run, answers = load_both(options, sizes)
    with build_generator(profile, answers) as answering, closing(build_engine(profile, run)) as timed:
        finish = torch.cuda.synchronize if profile.device == "cuda" else lambda: None
        engine = cast(Timed, timed)
        floors = engine.measure_floors()
        throughput = Throughput(
            engine, answering.engine, load_model_config(run.model), answering.model_config, floors, finish
        )
        costs = engine.measure_passes(answers.decode)
        prompts = prompts_of(answers, answering.tokenizer, max(LEAST_REQUESTS, 4 * most))
        loads = []
        for at_once, lookahead in itertools.product(options.at_once, options.lookahead):
            decode = answers.decode
            if lookahead != "auto":
                decode = decode.model_copy(update={"num_lookahead": int(lookahead)})
            own = prompts[: max(LEAST_REQUESTS, 4 * at_once)]
            for _ in range(2):  # the first time, what has not been captured is
                load = throughput.measure(decode, costs if lookahead == "auto" else None, at_once, own)
            loads.append(load)
            print(table([load]).splitlines()[-1], file=sys.stderr, flush=True)
        return {"conditions": timed.describe(), "floors": floors, "costs": costs, "loads": as_json(loads)}


def load_both(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[DeviceProfile, RunConfig, RunConfig]:
    """The profile, the run that is timed under the settings of the one that answers, and that one."""
    path = find_config("profiles", options.profile)
    profile, answers = load_profile_and_run(path, find_config("runs", options.answers), overrides)
    _, run = load_profile_and_run(path, find_config("runs", options.run), overrides)
    return profile, run.model_copy(update={"decode": answers.decode}), answers


def prompts_of(run: RunConfig, tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """The first requests of the run's input; over and over where there are fewer."""
    if run.input is None:
        raise ConfigError("the run that answers names no input: set input.path to a JSONL file with its prompts")
    prompts = [prompt_or_reason(line, run.input, tokenizer) for line in read_lines(run.input)[:count]]
    readable = [prompt for prompt in prompts if not isinstance(prompt, str)]
    return list(itertools.islice(itertools.cycle(readable), count))


def count_of(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 10**4:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 to 10000")
    return int(text)


def _lookahead(text: str) -> str:
    if text != "auto" and not (text.isdigit() and int(text) <= 100):
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 0 to 100, or auto")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("run")
    parser.add_argument("--answers", required=True, help="the run whose model answers")
    parser.add_argument("--at-once", type=count_of, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--lookahead", type=_lookahead, nargs="+", default=["0", "3", "7", "auto"])
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    try:
        result = measure(options)
    except (ConfigError, EngineError) as error:
        sys.exit(f"lopa: {error}")
    print(table([Load(**load) for load in result["loads"]]))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
