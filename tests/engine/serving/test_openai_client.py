"""The openai client, unchanged, against the demo model on a CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from started import lopa

from common.checkpoint import load_tokenizer
from tests.engine.serving.served import QUESTION, ROOT, WAIT_S, Served, events_of

SHORT = {"max_tokens": 16, "extra_body": {"diffusion": {"num_lookahead": 0}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("first\nsecond\n")
    options = ("max_num_requests=16", "decode.num_lookahead=2", "serve.max_body_bytes=100000")
    settings = [item for option in options for item in ("--set", option)]
    with Served(tmp_path_factory.mktemp("served") / "log", *settings, "--api-key-file", str(keys)) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="second", max_retries=0, timeout=WAIT_S)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_a_completion_of_text_is_that_of_its_token_ids(client: OpenAI) -> None:
    text = QUESTION.format(12) + "\n"
    ids = load_tokenizer(ROOT / "models" / "demo").encode(text)
    of_text = client.completions.create(model="demo", prompt=text, max_tokens=64)
    of_ids = client.completions.create(model="demo", prompt=ids, max_tokens=64)
    assert of_text.choices[0].text == of_ids.choices[0].text
    assert "17" in of_text.choices[0].text and of_text.choices[0].finish_reason == "stop"
    assert of_text.usage is not None and of_text.usage.prompt_tokens == len(ids)
    assert of_text.usage.total_tokens == len(ids) + of_text.usage.completion_tokens


def test_a_list_of_prompts_is_answered_in_its_order(client: OpenAI) -> None:
    prompts = [QUESTION.format(n) + "\n" for n in (2, 3)]
    together = client.completions.create(model="demo", prompt=prompts, **SHORT)
    alone = [client.completions.create(model="demo", prompt=prompt, **SHORT) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    assert [choice.index for choice in together.choices] == [0, 1]
    assert together.usage is not None and together.usage.completion_tokens == 32
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    assert {choice.finish_reason for choice in together.choices} == {"length"}


def test_a_chat_streams_what_it_answers_at_once(client: OpenAI) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION.format(12)}]}]
    whole = client.chat.completions.create(model="demo", messages=messages, max_completion_tokens=64)
    stream = client.chat.completions.create(
        model="demo", messages=messages, max_completion_tokens=64, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 1, "a stream that comes at once is none"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]


@pytest.mark.parametrize("mode", ["prefix", "block"])
def test_a_stop_string_is_cut_off_in_streams_too(client: OpenAI, mode: str) -> None:
    settings = {"model": "demo", "prompt": QUESTION.format(12) + "\n", "max_tokens": 64, "stop": ["Step 2", "zz"]}
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True, extra_body={"diffusion": {"stream_mode": mode}}))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole.choices[0].text and text.startswith("Step 1") and "Step 2" not in text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_completion_are_the_same_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": QUESTION.format(12) + "\n", "max_tokens": 64}
    plain = client.completions.create(**asked).choices[0]
    whole = client.completions.create(**asked, logprobs=3).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, logprobs=3, stream=True)]
    assert whole.text == plain.text == "".join(piece.text for piece in pieces) and plain.logprobs is None
    found = whole.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.text_offset and found.top_logprobs
    assert "".join(found.tokens).startswith(whole.text), "the end's token is there too"
    for text, offset in zip(found.tokens, found.text_offset, strict=True):
        assert whole.text[offset:].startswith(text) or offset + len(text) > len(whole.text)
    for own, top, text in zip(found.token_logprobs, found.top_logprobs, found.tokens, strict=True):
        assert len(top) == 3 and own == max(top.values()) == top[text] <= 0, "the most probable one is drawn"
    told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert len(told) > 1
    for name in ("tokens", "text_offset"):
        assert [item for one in told for item in getattr(one, name)] == getattr(found, name)
    streamed = [item for one in told for item in one.token_logprobs or []]
    assert streamed == pytest.approx(found.token_logprobs, abs=1e-4)
    given = ""
    for piece in pieces:
        given += piece.text
        for offset in (piece.logprobs.text_offset or []) if piece.logprobs and piece.finish_reason is None else []:
            assert offset < len(given), "a token came in front of its text"


def test_log_probabilities_of_a_chat_are_the_same_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": QUESTION.format(12)}], "max_completion_tokens": 64,
        "temperature": 0.7, "seed": 5,
    }  # fmt: skip
    plain = client.chat.completions.create(**asked).choices[0]
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
    pieces = [chunk.choices[0] for chunk in chunks]
    assert whole.message.content == plain.message.content == "".join(piece.delta.content or "" for piece in pieces)
    assert whole.logprobs is not None and whole.logprobs.content and plain.logprobs is None
    told = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content or []]
    assert [one.token for one in told] == [one.token for one in whole.logprobs.content]
    for one, again in zip(told, whole.logprobs.content, strict=True):
        assert one.bytes == again.bytes == list(one.token.encode()) and len(one.top_logprobs) == 2
        assert one.logprob == pytest.approx(again.logprob, abs=1e-4)
        assert all(one.logprob <= best.logprob + 1e-4 for best in one.top_logprobs[:1])


def test_a_rollout_has_ids_log_probabilities_and_passes(client: OpenAI, served: Served) -> None:
    ids = load_tokenizer(ROOT / "models" / "demo").encode(QUESTION.format(12) + "\n")
    sampling = {"max_new_tokens": 48, "temperature": 0.7, "ignore_eos": True, "top_k": -1}
    fields = {"input_ids": ids, "sampling_params": sampling, "seed": 3, "return_logprob": True, "return_step_map": True}

    def ask(**more: Any) -> str:
        body = json.dumps({**fields, "top_logprobs_num": 1, **more}).encode()
        status, text = served.send("POST", "/generate", body, Authorization="Bearer first")
        assert status == 200, text
        return text

    whole, events = json.loads(ask()), events_of(ask(stream=True))
    counts = whole["meta_info"]
    assert len(whole["output_ids"]) == len(whole["step_map"]) == counts["completion_tokens"] == 48
    assert counts["prompt_tokens"] == len(ids) and counts["finish_reason"] == {"type": "length"}
    triples = counts["output_token_logprobs"]
    assert [token for _, token, _ in triples] == whole["output_ids"] and all(own <= 0 for own, _, _ in triples)
    assert all(
        best[0][0] >= own - 1e-4 for best, (own, _, _) in zip(counts["output_top_logprobs"], triples, strict=True)
    )
    assert min(whole["step_map"]) == 1 and max(whole["step_map"]) <= whole["diffusion"]["forwards"]
    *pieces, last, _ = events
    told = [triple for event in pieces for triple in event["output_token_logprobs"]]
    assert [token for _, token, _ in told] == whole["output_ids"][: len(told)] and len(pieces) > 1
    assert last["step_map"] == whole["step_map"] and last["output_ids"] == whole["output_ids"]


def test_errors_come_by_class(client: OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{served.url}/v1", api_key="third", max_retries=0, timeout=WAIT_S).models.list()
    with pytest.raises(openai.BadRequestError, match="context of 512") as refused:
        client.completions.create(model="demo", prompt="a " * 30, max_tokens=500)
    assert refused.value.param == "max_tokens"
    for name, value in (("presence_penalty", 0.5), ("best_of", 2), ("suffix", "x"), ("logit_bias", {"x": 5})):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="demo", prompt="a", **{name: value})
        assert refused.value.param == name
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt="a", n=2)
    with pytest.raises(openai.APIStatusError) as too_large:
        client.completions.create(model="demo", prompt="a" * 100_000)
    assert too_large.value.status_code == 413


def test_no_answer_ends_before_min_tokens(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": QUESTION.format(12) + "\n", "max_tokens": 160}
    short = client.completions.create(**asked)
    assert short.choices[0].finish_reason == "stop" and short.usage is not None
    least = short.usage.completion_tokens + 12
    made = client.completions.create(**asked, extra_body={"min_tokens": least})
    assert made.usage is not None and made.usage.completion_tokens > least - 1
    same = client.completions.create(**asked, extra_body={"min_tokens": 4})
    assert same.choices[0].text == short.choices[0].text


def test_a_bias_keeps_a_token_out(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": QUESTION.format(12) + "\n", "max_tokens": 64}

    def token_ids(**more: Any) -> list[int]:
        made = client.completions.create(**asked, **more, extra_body={"return_token_ids": True})
        return list(made.choices[0].token_ids)  # type: ignore[attr-defined]

    plain = token_ids()
    assert token_ids(logit_bias={str(plain[0]): 0}) == plain
    reasons = [
        client.completions.create(**asked | {"max_tokens": 12}, **more).choices[0].finish_reason
        for more in ({}, {"logit_bias": {"5": 1}}, {"extra_body": {"min_tokens": 3}})
    ]
    assert reasons == ["length"] * 3
    assert plain[0] not in token_ids(logit_bias={str(plain[0]): -100})


def test_what_asks_for_nothing_is_taken(client: OpenAI) -> None:
    neutral = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0, "ignore_eos": True, "who_knows": 1, "stop": None}
    made = client.completions.create(
        model="demo", prompt="a", max_tokens=20, presence_penalty=0, n=1, logprobs=None, extra_body=neutral
    )
    assert made.usage is not None and made.usage.completion_tokens == 20, "without an end it is as long as it may be"


def test_a_stream_that_is_left_early_stops_being_decoded(client: OpenAI, served: Served) -> None:
    stream = client.completions.create(model="demo", prompt="a", max_tokens=192, stream=True)
    next(iter(stream))
    stream.close()
    served.wait_for(served.is_empty, "empty")


def test_an_aborted_answer_ends_with_what_it_has(client: OpenAI, served: Served) -> None:
    """Whole or streamed, and no client sends it again."""
    with ThreadPoolExecutor(2) as pool:
        with served.standing_still():
            fields: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 192}
            whole = pool.submit(client.completions.create, **fields, extra_body={"request_id": "w"})
            stream = pool.submit(client.completions.create, **fields, stream=True, extra_body={"request_id": "s"})
            served.wait_for(lambda: served.metrics()["lopa_requests_open"] == 2, "taken")
            bearer = {"Authorization": "Bearer first"}
            assert [abort(served, name, **bearer) for name in ("w", "s", "w-0", "t")] == [1, 1, 0, 0]
        assert whole.result(WAIT_S).choices[0].finish_reason == "abort"
        assert [chunk.choices[0].finish_reason for chunk in stream.result(WAIT_S)][-1] == "abort"
    served.wait_for(served.is_empty, "empty")


def abort(served: Served, request_id: str, **headers: str) -> int:
    body = json.dumps({"request_id": request_id}).encode()
    return int(json.loads(served.send("POST", "/abort_request", body, **headers)[1])["aborted"])


def test_64_tasks_at_once(served: Served) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="first", max_retries=0, timeout=WAIT_S) as many:
            calls = (many.completions.create(model="demo", prompt=f"{n}", **SHORT) for n in range(64))
            return [made.choices[0].text for made in await asyncio.gather(*calls)]

    assert len(asyncio.run(ask())) == 64
    served.wait_for(served.is_empty, "empty")


def test_tokens_there_and_back(served: Served) -> None:
    bearer = {"Authorization": "Bearer first"}
    _, text = served.send("POST", "/tokenize", b'{"prompt": "Tom has", "return_token_strs": true}', **bearer)
    made = json.loads(text)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 512
    body = json.dumps({"tokens": made["tokens"]}).encode()
    assert json.loads(served.send("POST", "/detokenize", body, **bearer)[1]) == {"prompt": "Tom has"}
    status, text = served.send("POST", "/detokenize", b'{"tokens": [5, 99999]}', **bearer)
    assert status == 400 and "99999 is no token" in text


def test_a_watched_request_tells_of_every_pass(served: Served) -> None:
    body = b'{"prompt": "Tom has 2 apples.\\n", "max_tokens": 32, "stream": true, "stream_mode": "denoise"}'
    status, text = served.send("POST", "/generate", body, Authorization="Bearer first")
    *passes, last, done = events_of(text)
    assert status == 200 and done == "[DONE]"
    assert [event["pass"] for event in passes] == list(range(1, last["diffusion"]["forwards"] + 1))
    assert [event["finished"] for event in passes] == [None] * (len(passes) - 1) + [last["finish_reason"]]
    drawn = {place - event["prompt_length"]: token for event in passes for place, token, _, _ in event["filled"]}
    assert [drawn[place] for place in range(len(last["token_ids"]))] == last["token_ids"]


def test_only_probes_and_metrics_need_no_key(served: Served) -> None:
    assert {served.get(path)[0] for path in ("/health", "/ready", "/metrics", "/")} == {200}
    assert {served.send("HEAD", path, b"")[0] for path in ("/health", "/ready", "/metrics")} == {200}
    assert {served.get(path)[0] for path in ("/v1/models", "/version", "/openapi.json")} == {401}


def test_its_log_has_a_line_a_request(served: Served, client: OpenAI) -> None:
    client.completions.create(
        model="demo", prompt="a", max_tokens=4, extra_body={"request_id": "seen", "ignore_eos": True}
    )
    served.wait_for(lambda: "lopa: cmpl-seen-0: 1 prompt token, 4 tokens" in served.text, "told of")
    assert "Traceback" not in served.text


def test_a_port_in_use_is_told_of_in_a_sentence(served: Served) -> None:
    done = lopa("serve", "--profile", "cpu", "demo", "--port", served.port)
    assert done.returncode == 2 and "choose another" in done.stderr and "Traceback" not in done.stderr
