"""What a client is told of a body that cannot be taken: the field's path, and what to send instead."""

from __future__ import annotations

import asyncio
import json
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
from asgi import asked
from pydantic import BaseModel, ValidationError

from common.errors import EngineError
from common.serving.http import bodies
from common.serving.http.app import build_app
from common.serving.http.errors import ApiError
from common.serving.http.explain import explained
from common.serving.http.fields import ChatFields, CompletionFields, GenerateFields
from common.serving.http.prompts import Prompts


def refused(kind: type[BaseModel], fields: dict[str, Any]) -> ApiError:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(fields)
    return explained([{**error, "loc": ("body", *error["loc"])} for error in found.value.errors()])


IDS = "is no token id; send whole numbers"


@pytest.mark.parametrize("kind", [CompletionFields, GenerateFields])
@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([-1], f"prompt.0: -1 {IDS}"),
        ([3, True], f"prompt.1: True {IDS}"),
        ([1.0], f"prompt.0: 1.0 {IDS}"),
        ([2**40], f"prompt.0: 1099511627776 {IDS}"),
        ([None], f"prompt.0: None {IDS}"),
        ([[1], [2, -3]], f"prompt.1.1: -3 {IDS}"),
        ([1, "a"], "prompt: a list of several kinds; send texts only"),
        (5, "prompt: send a text, or token ids in a list"),
        ({"a": 1}, "prompt: send a text, or token ids in a list"),
    ],
)
def test_a_wrong_prompt_is_told_by_its_place(kind: type[BaseModel], prompt: Any, sentence: str) -> None:
    error = refused(kind, {"prompt": prompt})
    assert str(error).startswith(sentence) and (error.status, error.param) == (400, "prompt")


def test_two_names_of_one_thing_are_one_too_many() -> None:
    lengths = {"prompt": "a", "max_tokens": 5, "max_completion_tokens": 15}
    assert str(refused(CompletionFields, lengths)) == (
        "max_tokens: max_completion_tokens is another length; send one of the two"
    )
    assert CompletionFields.model_validate({**lengths, "max_tokens": 15}).wishes.max_tokens == 15
    assert "given twice" in str(refused(GenerateFields, {"text": "a", "prompt": "b"}))
    asked = GenerateFields.model_validate({"text": "a", "sampling_params": {"max_new_tokens": 4}})
    assert (asked.prompt, asked.wishes.max_tokens, asked.is_rollout) == ("a", 4, True)


def test_several_prompts_are_one_routes() -> None:
    assert CompletionFields.model_validate({"prompt": [[1], [2]]})
    assert "takes one" in str(refused(GenerateFields, {"prompt": [[1], [2]]}))


@pytest.mark.parametrize(
    ("settings", "param", "sentence"),
    [
        ({"num_lookahed": 1}, "diffusion.num_lookahed", "unknown key; did you mean diffusion.num_lookahead?"),
        ({"temperature": 1}, "diffusion.temperature", "unknown key; write it as temperature"),
        ({"qqq": 1}, "diffusion.qqq", "unknown key; known keys of diffusion: "),
        ({"num_lookahead": "2"}, "diffusion.num_lookahead", "set it to a whole number (given '2')"),
        ({"num_lookahead": True}, "diffusion.num_lookahead", "set it to a whole number (given True)"),
        ({"num_lookahead": -1}, "diffusion.num_lookahead", "set it to 0 or more (given -1)"),
        ({"block_size": 9999}, "diffusion.block_size", "set it to 4096 or less (given 9999)"),
        ({"skip_threshold": "a"}, "diffusion.skip_threshold", "set it to a number (given 'a')"),
        ({"stats": 1}, "diffusion.stats", "set it to true or false (given 1)"),
        ({"stream_mode": "x"}, "diffusion.stream_mode", "set it to 'prefix' or 'block' (given 'x')"),
        ([], "diffusion", "write it as"),
        ("x", "diffusion", "write it as"),
    ],
)
def test_a_wrong_setting_of_diffusion_is_told_by_its_path(settings: Any, param: str, sentence: str) -> None:
    error = refused(CompletionFields, {"prompt": "a", "diffusion": settings})
    assert str(error).startswith(f"{param}: {sentence}") and (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stop": [1]}, "stop.0: write it as text"),
        ({"request_id": "a b"}, "request_id: write 1 to 128 visible ASCII characters"),
        ({"request_id": "a" * 129}, "request_id: write 1 to 128 visible ASCII characters"),
        ({"request_id": "a\n"}, "request_id: write 1 to 128 visible ASCII characters"),
        ({"messages": [{"role": "user"}, {}]}, "messages.1.role: write it as text, such as user or assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]},
            "messages.0.content.0.type: 'image', and the model reads text only: send parts of type text",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: a chat has its tools beside its"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs: 'a b' is no name that a template can have"),
        ({"stream_options": 5}, "stream_options: write it as"),
        ({"stream_options": {}}, "stream_options: only with stream true"),
    ],
)
def test_other_fields_are_told_by_their_paths(fields: dict[str, Any], sentence: str) -> None:
    error = refused(ChatFields, {"messages": [{"role": "user"}], **fields})
    assert str(error).startswith(sentence) and error.param == sentence.partition(":")[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "[0-9]"), ("json_schema", "{}"), ("ebnf", "root ::= x"), ("stop_regex", "x+"), ("no_stop_trim", True),
        ("structural_tag", "x"), ("presence_penalty", 1),
    ],
)  # fmt: skip
def test_what_sampling_params_cannot_have_is_refused_as_in_the_body(name: str, value: Any) -> None:
    for fields in ({name: value}, {"sampling_params": {name: value}}):
        found = GenerateFields.model_validate({"prompt": "x", **fields}).unsupported()
        assert found is not None and found[0] == name and f"remove {name}" in found[1]


def test_sampling_params_have_their_own_names_of_lengths() -> None:
    own = {"max_new_tokens": 7, "min_new_tokens": 3}
    fields = GenerateFields.model_validate({"prompt": "x", "sampling_params": own})
    assert (fields.max_tokens, fields.min_tokens) == (7, 3)
    found = GenerateFields.model_validate({"prompt": "x", "max_new_tokens": 7}).unsupported()
    assert found is not None and "is named max_tokens: set that" in found[1]


def test_a_name_of_any_length_is_cut() -> None:
    error = refused(CompletionFields, {"prompt": "a", "diffusion": {"x" * 9999: 1}})
    assert error.param is not None and len(error.param) == 200 and len(str(error)) < 500


def app_of_nothing() -> Any:
    """The routes without an engine."""
    run = SimpleNamespace(serve=SimpleNamespace(max_body_bytes=10**6, keep_alive_s=1))
    return build_app(
        cast("Any", SimpleNamespace(run=run, engine=None, metrics=SimpleNamespace(http=lambda *_: None))), ()
    )


def answered(*parts: bytes, route: str = "/tokenize", ends: bool = True, **headers: str) -> tuple[int, str]:
    """Status and message of what a route says to a body."""
    own = {"content-type": "application/json", **headers}
    status, body = asked(app_of_nothing(), "POST", route, *parts, ends=ends, **own)
    return status, json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"prompt": "\xff"}', "the body is not valid JSON ('utf-8' codec can't decode byte 0xff"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "the body holds a number of more than 4,300 digits"),
        (b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "the body is nested too deeply"),
        (b'{"prompt":', "the body is not valid JSON (Expecting value"),
        (b'{"prompt": "a", "prompt": "b"}', "the body is not valid JSON (an object has the key 'prompt' twice)"),
        (
            b'{"prompt": "a", "diffusion": {"a": 1, "a": 1, "a": 1}}',
            "the body is not valid JSON (an object has the key 'a' 3",
        ),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(body: bytes, why: str) -> None:
    status, message = answered(body)
    assert status == 400 and message.startswith(why)


@pytest.mark.parametrize(
    ("sign", "most"), [("1,", 2**18), ('"",', 2**18), ("[],", 2**17), ("{},", 2**17), ('"":1,', 2**17)]
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(sign: str, most: int) -> None:
    body = f'{{"prompt": [{sign * (most + 1)}1]}}'.encode()
    parts = [body[place : place + 2**16] for place in range(0, len(body), 2**16)]
    status, message = answered(*parts)
    assert status == 413 and message.endswith("send it in several calls")


@pytest.mark.parametrize("headers", [{}, {"content-length": "1000001"}])
def test_a_body_that_is_too_long_is_refused(headers: dict[str, str]) -> None:
    assert answered(b"a" * 600_000, b"a" * 600_000, **headers) == (
        413,
        "the body has more than 1000000 bytes: send less",
    )


def test_a_body_that_is_packed_is_refused() -> None:
    assert answered(b"{}", **{"content-encoding": "gzip"}) == (
        415,
        "Content-Encoding gzip is not undone here: send the body as it is",
    )
    assert answered(b'{"prompt":', **{"content-encoding": "identity"})[0] == 400


def test_a_body_that_does_not_go_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_PART_S", 0.05)
    status, message = answered(b'{"prompt":', ends=False)
    assert status == 408 and message.startswith("after 10 bytes the body came too slowly")


def test_chats_that_cannot_be_rendered_are_told_to_come_again() -> None:
    def fails(*_: object) -> str:
        raise EngineError("chat templates cannot be rendered (no process): end other processes")

    tokenizer, maker = SimpleNamespace(has_chat_template=False), SimpleNamespace(chat_text=fails)
    with pytest.raises(ApiError, match=r"^chat templates cannot be rendered") as refused:
        asyncio.run(Prompts(cast("Any", tokenizer), cast("Any", maker), 10).of_chat([], {}))
    assert refused.value.status == 503


def test_bodies_that_are_held_leave_room_for_small_ones() -> None:
    shared = bodies.Bodies(2**30)
    shared.hold(bodies._MOST_HELD_BYTES, bodies._MOST_HELD_BYTES)
    shared.hold(1000, 2000)
    with pytest.raises(ApiError, match="take all the room") as refused:
        shared.hold(1000, 10**6)
    assert refused.value.status == 503
    shared.let_go(bodies._MOST_HELD_BYTES)
    shared.hold(1000, 10**6)


@pytest.mark.parametrize("ids", [[1], [[1]], [1.5], ["a"], [], [None]])
def test_ids_are_no_text_to_tokenize(ids: list[Any]) -> None:
    status, message = answered(json.dumps({"prompt": ids}).encode())
    assert (status, message) == (400, "prompt: send a text")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["n", "seed", "max_tokens", "top_k", "temperature"])
def test_a_number_of_thousands_of_digits_is_refused(name: str, route: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], name: 10**4299}
    status, message = answered(json.dumps(body).encode(), route=route)
    assert status == 400 and message.startswith(f"{name}: ") and len(message) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", *[1] * 10**5]},
        {"prompt": [1.0] * 10**5},
        {"prompt": [[1]] * 10**4 + [["a"]] * 10**4},
        {"prompt": "a", "stop": [1] * 10**5},
        {"prompt": "a", "diffusion": {f"k{number}": 1 for number in range(10**5)}},
        {"prompt": "a", **{f"k{number}": 1 for number in range(10**5)}},
    ],
)
def test_the_errors_of_a_long_list_are_few(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        CompletionFields.model_validate(fields)
    assert found.value.error_count() < 10
    assert explained(found.value.errors()).status == 400


@pytest.mark.parametrize("deep", ["[", '{"a":'])
def test_what_is_deep_can_be_told_of(deep: str) -> None:
    value: Any = 1
    for _ in range(900):
        value = [value] if deep == "[" else {"a": value}
    for fields in ({"prompt": value}, {"prompt": "a", "stop": value}, {"prompt": "a", "diffusion": {"x": value}}):
        assert len(str(refused(CompletionFields, fields))) < 1000


def test_the_description_names_what_is_refused_and_each_operation_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        description = app_of_nothing().openapi()
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names)) > 10
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            assert "default" in operation["responses"] and "422" not in operation["responses"], path
            if method == "post":
                assert {"400", "401", "403", "404", "408", "413", "503"} <= operation["responses"].keys(), path
                assert operation["requestBody"]["content"]["application/json"]["schema"], path


def test_a_page_lists_the_routes_and_leads_to_their_description() -> None:
    status, body = asked(app_of_nothing(), "GET", "/docs")
    assert status == 200 and b"POST /v1/chat/completions" in body and b"openapi.json" in body


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        ("/v1/embeddings", 404, "GET /v1/embeddings: there is no such route; GET /docs lists them"),
        ("/v1/completions", 405, "GET /v1/completions: the route takes another method; GET /docs lists the routes"),
    ],
)
def test_what_is_no_route_is_told_where_they_stand(path: str, status: int, why: str) -> None:
    found, body = asked(app_of_nothing(), "GET", path)
    assert (found, json.loads(body)["error"]["message"]) == (status, why)
