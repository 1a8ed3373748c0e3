"""Clients of a server that is measured: python client.py PORT, with one load as JSON on the standard input.

A program by itself, which loads nothing of this project, so that the clients' process is there at once.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from statistics import fmean, median
from typing import Any


def one_stream(port: int, body: dict[str, Any]) -> tuple[int, float, float]:
    """Return tokens of an answer, seconds to the first text, seconds in all. Raises ValueError where it is refused."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began, first_s, usage = time.perf_counter(), 0.0, 0
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the server answered {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                first_s = first_s or (time.perf_counter() - began if event["choices"] else 0.0)
                usage = event["usage"]["completion_tokens"] if event.get("usage") else usage
    return usage, first_s, time.perf_counter() - began


def ask(port: int, order: dict[str, Any]) -> dict[str, float]:
    """Ask for one load by as many threads as requests at once. Exits with a sentence where a request fails."""
    bodies: Iterator[Any] = iter(order["prompts"])
    lock, answers, problems = threading.Lock(), [], list[str]()
    fields = {"max_tokens": order["max_tokens"], "stream": True, "stream_options": {"include_usage": True}}
    fields |= {"diffusion": {"num_lookahead": order["num_lookahead"]}}

    def work() -> None:
        while not problems:
            with lock:
                prompt = next(bodies, None)
            if prompt is None:
                return
            try:
                answers.append(one_stream(port, {**fields, "prompt": prompt}))
            except Exception as error:  # whatever it is, this load has no numbers
                problems.append(" ".join(f"a request failed: {error or repr(error)}".split()))

    threads = [threading.Thread(target=work) for _ in range(order["at_once"])]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if problems:
        sys.exit(problems[0])
    return {
        "tokens_per_s": sum(tokens for tokens, _, _ in answers) / took,
        "of_request": fmean(tokens / seconds for tokens, _, seconds in answers),
        "first_ms": median(first_s for _, first_s, _ in answers) * 1e3,
    }


if __name__ == "__main__":
    print(json.dumps(ask(int(sys.argv[1]), json.load(sys.stdin))))
