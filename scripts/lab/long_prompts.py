"""Measure what a long prompt takes beside other requests: its time to first text, and the tokens/s of the others.

python -m scripts.lab.long_prompts OUT.json [--profile P] [--set KEY=VALUE ...] [--others 16] [--lengths 4096 ...]
                                   [--batched 2048 8192]

A server of random weights for each bound of prompt tokens a pass (max_num_batched_tokens). `others` clients stream
answers one after another; a prompt of random tokens comes among them, and is asked again alone. Tokens/s of the others
are those that arrive from the prompt's request to its first text, and in as long a time before it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from scripts.lab.result import card, write_table
from tests.engine.serving.served import Served

SETTINGS = ["model=configs/models/llada2_mini", "preset=llada2", "decode.num_lookahead=0", "quantization=w8a8"]
SHORT, LONGEST_ID, ANSWER = 32, 200, 256  # tokens of the others' prompts; ids that every tokenizer has
_SETTLE_S, _LEAST_S = 3.0, 1.0


def streamed(port: int, prompt: list[int], max_tokens: int) -> Iterator[int]:
    """Yield the number of tokens of each piece of an answer as it arrives."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "return_token_ids": True, "ignore_eos": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                if tokens := choice.get("token_ids"):
                    yield len(tokens)
    connection.close()


def drawn(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(LONGEST_ID) for _ in range(length)]


class Others:
    """Clients that stream answers until they are stopped. arrived: (when, tokens) of every piece."""

    def __init__(self, port: int, number: int) -> None:
        self.arrived: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(port, client)) for client in range(number)]

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def tokens_per_s(self, begin: float, end: float) -> float:
        return sum(tokens for at, tokens in list(self.arrived) if begin <= at < end) / (end - begin)

    def _ask(self, port: int, client: int) -> None:
        asked = 0
        while not self._is_over.is_set():
            asked += 1
            for tokens in streamed(port, drawn(SHORT, 1000 * client + asked), ANSWER):
                self.arrived.append((time.monotonic(), tokens))


def first_text_s(port: int, length: int, seed: int) -> float:
    began = time.monotonic()
    next(streamed(port, drawn(length, seed), SHORT))
    return time.monotonic() - began


def measured(profile: str, settings: list[str], others: int, lengths: list[int], batched: int) -> Iterator[list[Any]]:
    """Yield a row for each length."""
    settings = [
        *settings, f"max_num_batched_tokens={batched}", f"max_model_len={max(lengths) + ANSWER + SHORT}",
        f"max_num_requests={others + 1}", "enable_prefix_caching=false", f"decode.max_new_tokens={ANSWER}",
    ]  # fmt: skip
    arguments = [part for setting in settings for part in ("--set", setting)]
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        server = stack.enter_context(Served(log, *arguments, model="dream_7b_dummy", profile=profile))
        for length in lengths:
            first_text_s(server.port, length, 1)  # compiles what only this length needs
            alone_s = first_text_s(server.port, length, 2)
            with Others(server.port, others) as clients:
                time.sleep(_SETTLE_S + max(_LEAST_S, alone_s))
                began = time.monotonic()
                waited_s = first_text_s(server.port, length, 3)
                before = clients.tokens_per_s(began - max(_LEAST_S, waited_s), began)
                meanwhile = clients.tokens_per_s(began, began + waited_s)
            yield [batched, length, alone_s, waited_s, before, meanwhile]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="h200_tp1_bp1")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--others", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 32000])
    parser.add_argument("--batched", type=int, nargs="+", default=[2048, 8192])
    known = parser.parse_args()
    settings = known.settings or SETTINGS
    columns = [
        ["prompt tokens a pass", ",.0f"], ["prompt", ",.0f"], ["first text alone, s", ".2f"],
        ["first text among others, s", ".2f"], ["others before, tokens/s", ",.0f"], ["others meanwhile", ",.0f"],
    ]  # fmt: skip
    conditions = (
        f"A server of {', '.join(settings)}, random weights, {known.others} others whose prompts have {SHORT} tokens "
        f"and answers {ANSWER}"
    )
    where = card("cpu" if known.profile.startswith("cpu") else "cuda")
    command = "python -m scripts.lab.long_prompts OUT.json"
    rows = []
    for batched in known.batched:
        for row in measured(known.profile, settings, known.others, known.lengths, batched):
            rows.append(row)
            write_table(known.out, where, command, conditions, columns, rows)


if __name__ == "__main__":
    main()
