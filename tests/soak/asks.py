"""What clients ask, and how an answer is judged: each request is to get exactly one end.

answered   the text of the undisturbed server
refused    a wrong request, by one sentence
failed     a right request, by one sentence: its replica died, or there was none
left       by the client itself
lost       no end: silence, or a connection that breaks off
doubled    a second end, or something after the first
wrong      another text, or an error that is no sentence
"""

from __future__ import annotations

import io
import json
import random
import socket
import time
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

from tests.engine.serving.served import QUESTION, Served, events_of
from tests.engine.serving.storms import leave_early, malformed

ENDS = ("answered", "refused", "failed", "left", "lost", "doubled", "wrong")
LOST_S = 180.0  # of silence on a connection
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_WRONG: tuple[Mapping[str, Any], ...] = (
    {"model": "another"}, {"max_tokens": 10**6}, {"temperature": -1}, {"n": 3}, {"temperature": "hot"}, {"top_p": 7},
    {"stop": ["a"] * 40}, {"stop_token_ids": [10**7]}, {"diffusion": {"num_lookahead": 99}}, {"top_k": 1.5},
    {"response_format": {"type": "nonsense"}}, {"stream_options": {"include_usage": True}},
    {"prompt": "long " * 5000},
)  # fmt: skip


class Ask(NamedTuple):
    kind: str
    route: str
    body: Mapping[str, Any]


class End(NamedTuple):
    what: str
    seconds: float
    said: str = ""
    texts: tuple[str, ...] = ()


def pool() -> list[Ask]:
    """Requests whose texts are known: the same each time, whatever else is being decoded."""
    asks = []
    for number in range(10, 14):
        prompt = QUESTION.format(number) + "\n"
        messages = [{"role": "user", "content": prompt.strip()}]
        asks += [
            Ask("whole", COMPLETIONS, {"prompt": prompt, "max_tokens": 40}),
            Ask("streamed", COMPLETIONS, {"prompt": prompt, "max_tokens": 56, "stream": True}),
            Ask("chat", CHAT, {"messages": messages, "max_tokens": 32}),
            Ask("streamed chat", CHAT, {"messages": messages, "max_tokens": 48, "stream": True}),
            Ask("sampled", COMPLETIONS, {"prompt": prompt, "max_tokens": 32, "temperature": 0.9, "seed": number}),
            Ask("several", COMPLETIONS, {"prompt": [prompt, "Mia has 3 pears.\n"], "max_tokens": 16}),
        ]
    long = {"prompt": QUESTION.format(30) + "\n", "max_tokens": 192, "ignore_eos": True}
    return [
        *asks,
        Ask("long", COMPLETIONS, {**long, "stream": True}),
        Ask("stopped", COMPLETIONS, {**long, "stop": ["Step 2"]}),
    ]


class _Said(io.BytesIO):
    """All that came on a connection, as the socket that http.client reads; what it leaves can be read after it."""

    def makefile(self, _mode: str) -> _Said:
        return self

    def close(self) -> None:
        """Nothing: it is still to be read."""


def _exchange(port: int, route: str, body: bytes) -> tuple[int, str, bytes]:
    """Status, text, and what came after the answer. Raises OSError or HTTPException where there is no whole one."""
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=LOST_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = _Said(b"".join(iter(lambda: connection.recv(65536), b"")))
    response = HTTPResponse(said)  # type: ignore[arg-type]
    response.begin()
    return response.status, response.read().decode(errors="replace"), said.read()


def send(port: int, ask: Ask, expected: tuple[str, ...] | None = None) -> End:
    """Send one request and judge its end; without expected texts any text is right."""
    began = time.monotonic()
    try:
        status, text, rest = _exchange(port, ask.route, json.dumps(ask.body).encode())
    except (OSError, HTTPException) as error:
        return End("lost", time.monotonic() - began, repr(error))
    seconds = time.monotonic() - began
    if rest:
        return End("doubled", seconds, f"after the answer: {rest[:200]!r}")
    if status != 200:
        return _refusal("failed" if status >= 500 else "wrong", status, text, seconds)
    what, said, texts = _judged_stream(text) if ask.body.get("stream") else _judged(text)
    if what == "answered" and expected is not None and texts != expected:
        what, said = "wrong", f"{ask.kind}: {texts!r} instead of {expected!r}"
    return End(what, seconds, said, texts)


def send_wrong(port: int, rng: random.Random) -> End:
    """Send what has to be refused: a right request with a wrong field, or what is hardly a request."""
    if rng.random() < 0.5:
        body = malformed(rng)
    else:
        body = json.dumps({"prompt": "a", "max_tokens": 4, **rng.choice(_WRONG)}).encode()
    began = time.monotonic()
    try:
        status, text, rest = _exchange(port, COMPLETIONS, body)
    except (OSError, HTTPException) as error:
        return End("lost", time.monotonic() - began, repr(error))
    seconds = time.monotonic() - began
    if rest:
        return End("doubled", seconds, f"after the answer: {rest[:200]!r}")
    if status == 503 or 400 <= status < 500:
        return _refusal("failed" if status == 503 else "refused", status, text, seconds)
    return End("wrong", seconds, f"{status} for {body[:200]!r}: {text[:300]}")


def leave(server: Served, rng: random.Random) -> End:
    """Hang up on a request, or abort it by its id."""
    began = time.monotonic()
    try:
        leave_early(server, rng)
    except (OSError, HTTPException, ValueError) as error:
        return End("lost", time.monotonic() - began, repr(error))
    return End("left", time.monotonic() - began)


def _refusal(what: str, status: int, text: str, seconds: float) -> End:
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return End("wrong", seconds, f"{status} without a sentence: {text[:300]}")
    is_sentence = isinstance(message, str) and message.strip() and "Traceback" not in message and "\n" not in message
    return End(what if is_sentence else "wrong", seconds, f"{status}: {message}")


def _judged(text: str) -> tuple[str, str, tuple[str, ...]]:
    choices = json.loads(text)["choices"]
    if sorted(choice["index"] for choice in choices) != list(range(len(choices))):
        return "doubled", f"choices {choices}", ()
    if any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
        return "wrong", f"finish reasons of {choices}", ()
    by_place = sorted(choices, key=lambda choice: choice["index"])
    return "answered", "", tuple(one["text"] if "text" in one else one["message"]["content"] for one in by_place)


def _judged_stream(text: str) -> tuple[str, str, tuple[str, ...]]:
    events = events_of(text)
    errors = [event["error"]["message"] for event in events if event != "[DONE]" and "error" in event]
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    num_ends = events.count("[DONE]") + len(errors)
    if num_ends > 1 or len(reasons) > 1:
        return "doubled", f"errors {errors}, finish reasons {reasons}, [DONE] {events.count('[DONE]')}", ()
    if not num_ends:
        return "lost", f"the stream breaks off: {text[-200:]!r}", ()
    if errors:
        return "failed", errors[0], ()
    if reasons not in (["stop"], ["length"]):
        return "wrong", f"finish reasons {reasons}", ()
    whole = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return "answered", "", (whole,)
