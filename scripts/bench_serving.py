"""The server beside the engine without HTTP: a large model's passes with a small model's answers, at several loads.

python scripts/bench_serving.py PROFILE RUN --answers RUN [--at-once 1 4 16 64] [--lookahead 0 3 7] [--set key=value]

RUN is what is timed, --answers the run whose model answers, as in bench_throughput.py. Each load is decoded in this
process without HTTP, then by clients in a process of their own over streams of /v1/completions. The answering model's
time is in both. Twice as many requests as at once, 16 at the least. `--set branch_budget=auto` measures that instead
of fixed numbers. One process.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

from bench_throughput import LEAST_REQUESTS, count_of, load_both, prompts_of

from common.bench.throughput import AnsweredEngine, Timed
from common.config import DecodeConfig
from common.decoding import Completion, Engine, GenerationRequest
from common.errors import ConfigError, EngineError
from common.tables import markdown

_READY_S = 120.0
Load = dict[str, Any]


def without_http(generator: Any, decode: DecodeConfig, at_once: int, prompts: Sequence[tuple[int, ...]]) -> Load:
    """Keeps `at_once` requests in the engine."""
    engine = cast(AnsweredEngine, generator.engine)
    requests = iter([GenerationRequest(str(n), prompt, decode) for n, prompt in enumerate(prompts)])
    first_s: list[float] = []
    done: list[Completion] = []
    began_at: dict[str, float] = {}
    engine.passes.clear()
    with generator.decoding() as core:

        def add(count: int) -> None:
            for request in itertools.islice(requests, count):
                began_at[request.id] = time.perf_counter()
                core.add_request(request)

        began = time.perf_counter()
        add(at_once)
        while core.has_work:
            for output in core.step():
                if output.token_ids and output.id in began_at:
                    first_s.append(time.perf_counter() - began_at.pop(output.id))
                if isinstance(output.result, Completion):
                    done.append(output.result)
                    add(1)
        took = time.perf_counter() - began
    return {
        "tokens_per_s": sum(result.num_effective_tokens for result in done) / took,
        "of_request": fmean(result.num_effective_tokens / result.total_s for result in done),
        "first_ms": median(first_s) * 1e3,
        "step_ms": median_step_ms(engine, at_once),
    }


def median_step_ms(engine: AnsweredEngine, at_once: int) -> float:
    """From one pass's start to the next's at full load, answers included."""
    full = [note for note in engine.passes if note.num_requests == at_once]
    gaps = [after.began_at - before.began_at for before, after in itertools.pairwise(full)]
    return median(gaps) * 1e3 if gaps else 0.0


def one_stream(port: int, body: dict[str, Any]) -> tuple[int, float, float]:
    """Tokens of an answer, seconds to the first text, seconds in all."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began, first_s, usage = time.perf_counter(), 0.0, 0
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                first_s = first_s or (time.perf_counter() - began if event["choices"] else 0.0)
                usage = event["usage"]["completion_tokens"] if event.get("usage") else usage
    return usage, first_s, time.perf_counter() - began


def client(port: int, order: dict[str, Any]) -> Load:
    """One load, by as many threads as requests at once."""
    bodies: Iterator[Any] = iter(order["prompts"])
    lock, answers = threading.Lock(), []
    fields = {"max_tokens": order["max_tokens"], "stream": True, "stream_options": {"include_usage": True}}
    fields |= {"diffusion": {"num_lookahead": order["num_lookahead"]}}

    def work() -> None:
        while True:
            with lock:
                prompt = next(bodies, None)
            if prompt is None:
                return
            answers.append(one_stream(port, {**fields, "prompt": prompt}))

    threads = [threading.Thread(target=work) for _ in range(order["at_once"])]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    return {
        "tokens_per_s": sum(tokens for tokens, _, _ in answers) / took,
        "of_request": fmean(tokens / seconds for tokens, _, seconds in answers),
        "first_ms": median(first_s for _, first_s, _ in answers) * 1e3,
    }


def with_http(generator: Any, orders: Sequence[dict[str, Any]], port: int) -> list[Load]:
    """Serves until the clients, a process of their own, have been through all loads."""
    from common.serving import serve

    engine, loads = cast(AnsweredEngine, generator.engine), []

    def drive() -> None:
        wait_until_ready(port)
        for order in orders:
            engine.passes.clear()
            command = [sys.executable, __file__, "--client", str(port)]
            run = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True)
            load = json.loads(run.stdout) if run.returncode == 0 else {"error": run.stderr[-500:]}
            loads.append({**load, "step_ms": median_step_ms(engine, order["at_once"])})
            print("server", order["at_once"], order["num_lookahead"], loads[-1], file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    run = generator.run.model_copy(update={"serve": generator.run.serve.model_copy(update={"port": port})})
    serve(generator.profile, run, lambda: generator)
    driver.join()
    return loads


def wait_until_ready(port: int) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < _READY_S:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.1)


def measure(options: argparse.Namespace) -> list[Load]:
    # Here: the clients' process needs none of it.
    import torch

    from common.generate import Generator, build_generator
    from common.platforms import build_engine

    most = max(options.at_once)
    sizes = [f"max_num_requests={most}", *options.set]
    profile, run, answers = load_both(options, sizes)
    finish = torch.cuda.synchronize if profile.device == "cuda" else lambda: None
    quiet = answers.model_copy(update={"branch_budget": "all"})
    with build_generator(profile, quiet) as answering, closing(build_engine(profile, run)) as engine:
        engine_of_both = AnsweredEngine(cast(Timed, engine), answering.engine, finish)
        generator = Generator(
            profile, answers, cast(Engine, engine_of_both), answering.tokenizer, answering.model_config
        )
        prompts = prompts_of(answers, answering.tokenizer, max(LEAST_REQUESTS, 2 * most))
        without_http(generator, answers.decode, most, prompts[:LEAST_REQUESTS])  # what is slow once
        orders, alone = [], []
        for at_once, lookahead in itertools.product(options.at_once, options.lookahead):
            own = prompts[: max(LEAST_REQUESTS, 2 * at_once)]
            decode = answers.decode.model_copy(update={"num_lookahead": lookahead})
            alone.append(without_http(generator, decode, at_once, own))
            print("engine", at_once, lookahead, alone[-1], file=sys.stderr, flush=True)
            limits = {"max_tokens": decode.max_new_tokens, "num_lookahead": lookahead}
            orders.append({"at_once": at_once, "prompts": own, **limits})
        served = with_http(generator, orders, options.port)
    facts = [{name: order[name] for name in ("at_once", "num_lookahead")} for order in orders]
    return [{**fact, "engine": one, "server": other} for fact, one, other in zip(facts, alone, served, strict=True)]


def table(loads: Sequence[Load]) -> str:
    names = ("tokens_per_s", "of_request", "first_ms", "step_ms")
    headings = ["at once", "k", *(f"{side}: {name}" for name in names for side in ("engine", "server"))]
    rows = [
        [str(load["at_once"]), str(load["num_lookahead"])]
        + [f"{load[side].get(name, float('nan')):,.2f}" for name in names for side in ("engine", "server")]
        for load in loads
    ]
    return markdown(headings, rows)


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        print(json.dumps(client(int(sys.argv[2]), json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("run")
    parser.add_argument("--answers", required=True, help="the run whose model answers")
    parser.add_argument("--at-once", type=count_of, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 3, 7])
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    try:
        loads = measure(options)
    except (ConfigError, EngineError) as error:
        sys.exit(f"lopa: {error}")
    print(table(loads))
    if options.output is not None:
        options.output.write_text(json.dumps(loads, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
