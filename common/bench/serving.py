"""The server beside the engine without HTTP: a large model's passes with a small model's answers, at several loads.

Each load is decoded in this process without HTTP, then by clients in a process of their own over streams of
/v1/completions. The answering model's time is in both. Twice as many requests as at once, 16 at the least.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

from common.bench.load import LEAST_REQUESTS, LoadOptions, LoadResult, for_loads, prompts_of, tell, waits_for
from common.bench.throughput import AnsweredEngine
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Completion, Engine, GenerationRequest
from common.errors import EngineError
from common.generate import Generator, build_generator
from common.platforms import build_engine
from common.runtime import DeviceEngine
from common.tables import markdown

_READY_S = 120.0
_CLIENT = Path(__file__).with_name("client.py")
_NAMES = ("tokens_per_s", "of_request", "first_ms", "step_ms")


def measure_serving(profile: DeviceProfile, run: RunConfig, answers: RunConfig, options: LoadOptions) -> LoadResult:
    """run: what is timed. answers: whose model, settings and input decide which tokens are accepted. Lookaheads are
    numbers here.

    Raises ConfigError or EngineError.
    """
    answers = for_loads(answers, options.most)
    run = for_loads(run, options.most).model_copy(update={"decode": answers.decode})
    quiet = answers.model_copy(update={"pace": "fixed"})
    with build_generator(profile, quiet) as answering, closing(build_engine(profile, run)) as engine:
        both = AnsweredEngine(cast(DeviceEngine, engine), answering.engine, waits_for(profile))
        generator = Generator(profile, answers, cast(Engine, both), answering.tokenizer, answering.model_config)
        prompts = prompts_of(answers, answering.tokenizer, max(LEAST_REQUESTS, 2 * options.most))
        _without_http(generator, answers.decode, options.most, prompts[:LEAST_REQUESTS])  # what is slow once
        orders, alone = [], []
        for at_once, lookahead in itertools.product(options.at_once, map(int, options.lookahead)):
            shown = prompts[: max(LEAST_REQUESTS, 2 * at_once)]
            decode = answers.decode.model_copy(update={"num_lookahead": lookahead})
            alone.append(_without_http(generator, decode, at_once, shown))
            tell("engine", at_once, lookahead, alone[-1])
            limits = {"max_tokens": decode.max_new_tokens, "num_lookahead": lookahead}
            orders.append({"at_once": at_once, "prompts": shown, **limits})
        served = _with_http(generator, orders, options.port)
    facts = [{name: order[name] for name in ("at_once", "num_lookahead")} for order in orders]
    loads = [{**fact, "engine": one, "server": other} for fact, one, other in zip(facts, alone, served, strict=True)]
    return LoadResult(_table(loads), {"loads": loads})


def _without_http(
    generator: Generator, decode: DecodeConfig, at_once: int, prompts: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
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
        "step_ms": _median_step_ms(engine, at_once),
    }


def _median_step_ms(engine: AnsweredEngine, at_once: int) -> float | None:
    """Return the time from one pass's start to the next's at full load, answers included; None: no two were."""
    full = [note for note in engine.passes if note.num_requests == at_once]
    gaps = [after.began_at - before.began_at for before, after in itertools.pairwise(full)]
    return median(gaps) * 1e3 if gaps else None


def _with_http(generator: Generator, orders: Sequence[dict[str, Any]], port: int) -> list[dict[str, Any]]:
    """Serve until the clients, a process of their own, have been through all loads. Raises EngineError where they
    fail."""
    from common.serving import serve  # here: it needs the extra `server`

    engine, loads, failures = cast(AnsweredEngine, generator.engine), [], list[Exception]()

    def drive() -> None:
        try:
            _wait_until_ready(port)
            for order in orders:
                engine.passes.clear()
                load = _asked(order, port)
                loads.append({**load, "step_ms": _median_step_ms(engine, order["at_once"])})
                tell("server", order["at_once"], order["num_lookahead"], loads[-1])
        except Exception as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    run = generator.run.model_copy(update={"serve": generator.run.serve.model_copy(update={"port": port})})
    serve(generator.profile, run, lambda: generator)
    driver.join()
    if failures:
        raise failures[0]
    return loads


def _asked(order: dict[str, Any], port: int) -> dict[str, float]:
    """Return what the clients measured of one load. Raises EngineError."""
    command = [sys.executable, "-I", str(_CLIENT), str(port)]
    run = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True)
    if run.returncode:
        said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise EngineError(f"bench load: clients of {order['at_once']} requests at once: {said}")
    found: dict[str, float] = json.loads(run.stdout)
    return found


def _wait_until_ready(port: int) -> None:
    """Raises EngineError where the server does not come up."""
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
    raise EngineError(f"bench load: the server was not ready after {_READY_S:.0f} s; what it had to say is above")


def _table(loads: Sequence[dict[str, Any]]) -> str:
    headings = ["at once", "k", *(f"{side}: {name}" for name in _NAMES for side in ("engine", "server"))]
    rows = [
        [str(load["at_once"]), str(load["num_lookahead"])]
        + [_cell(load[side][name]) for name in _NAMES for side in ("engine", "server")]
        for load in loads
    ]
    return markdown(headings, rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
