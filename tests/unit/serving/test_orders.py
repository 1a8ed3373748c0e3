"""What fields of a request become."""

from __future__ import annotations

from typing import Any

import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted import ScriptedTokenizer

from common.config import DecodeConfig, RunConfig, ServeConfig
from common.requests import PromptMaker, RequestMaker
from common.serving.http.errors import ApiError
from common.serving.http.fields import ChatFields, CompletionFields, GenerateFields
from common.serving.http.orders import OrderBook, Orders

DECODE = DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=64, temperature=0.7, top_p=0.9, stop=("END",))

BLOCKS = DecodeConfig(strategy="block_diffusion", block_size=16, max_new_tokens=64)  # counted from position 0


def book_of(run: RunConfig, max_model_len: int) -> OrderBook:
    prompts = PromptMaker(ScriptedTokenizer(), vocab_size=200)
    return OrderBook(run, RequestMaker(run.decode, prompts, max_model_len=max_model_len), num_slots=4)


def book(decode: DecodeConfig = DECODE, **serve: Any) -> OrderBook:
    run = RunConfig(model="m", decode=decode, serve=ServeConfig(**serve), seed=5)
    return book_of(run, 256)


def orders(prompt_length: int = 10, decode: DecodeConfig = DECODE, **fields: Any) -> Orders:
    made = CompletionFields.model_validate({"prompt": "a", **fields})
    return book(decode).orders("cmpl-", made, [range(prompt_length)], None)


def test_the_run_file_says_what_is_not_asked_for() -> None:
    (order,) = orders(max_tokens=64).orders
    assert order.decode == DECODE and order.request.seed == 5


def test_null_is_absent() -> None:
    names = ("max_tokens", "temperature", "stop", "seed", "n", "stream_options", "request_id", "top_k")
    (order,) = orders(**dict.fromkeys(names)).orders
    assert order.request.max_tokens == 16 and order.decode == DECODE.model_copy(update={"max_new_tokens": 16})


@pytest.mark.parametrize(("max_tokens", "canvas"), [(1, 16), (16, 16), (17, 32), (200, 208)])
def test_a_canvas_is_of_whole_blocks(max_tokens: int, canvas: int) -> None:
    (order,) = orders(max_tokens=max_tokens).orders
    assert (order.request.max_tokens, order.decode.max_new_tokens) == (max_tokens, canvas)


def test_the_padded_length_has_to_fit() -> None:
    assert orders(prompt_length=48, max_tokens=205).orders
    with pytest.raises(ApiError, match="whole blocks up to 208") as refused:
        orders(prompt_length=49, max_tokens=205)
    assert refused.value.status == 400 and refused.value.param == "max_tokens"


def test_a_block_that_does_not_fit_is_to_blame_itself() -> None:
    for max_tokens, block_size, param in ((4, 4096, "diffusion.block_size"), (250, 8, "max_tokens")):
        with pytest.raises(
            ApiError, match=rf"^{param}: {max_tokens} tokens after .*, or lower {param.rpartition('.')[2]}$"
        ) as refused:
            orders(max_tokens=max_tokens, diffusion={"block_size": block_size})
        assert refused.value.param == param


def test_a_chat_without_a_length_gets_the_runs_or_what_is_left() -> None:
    chat = ChatFields.model_validate({"messages": [{"role": "user", "content": "a"}]})
    lengths = [book().orders("c-", chat, [range(n)], None).orders[0].request.max_tokens for n in (10, 200, 230)]
    assert lengths == [64, 48, 16]


@pytest.mark.parametrize(("prompt_length", "longest"), [(10, 64), (200, 56), (207, 49), (230, 26)])
def test_blocks_from_position_0_end_with_the_context(prompt_length: int, longest: int) -> None:
    chat = ChatFields.model_validate({"messages": [{"role": "user", "content": "a"}]})
    (order,) = book(BLOCKS).orders("c-", chat, [range(prompt_length)], None).orders
    assert order.request.max_tokens == order.decode.max_new_tokens == longest


@pytest.mark.parametrize(("prompt_length", "longest"), [(10, 64), (200, 56), (230, 26), (255, 1)])
def test_a_canvas_of_any_length_ends_with_the_context(prompt_length: int, longest: int) -> None:
    chat = ChatFields.model_validate({"messages": [{"role": "user", "content": "a"}]})
    decode = DecodeConfig(strategy="vanilla", block_size=16, max_new_tokens=64)
    (order,) = book(decode).orders("c-", chat, [range(prompt_length)], None).orders
    assert order.request.max_tokens == order.decode.max_new_tokens == longest


def test_a_last_block_from_position_0_has_to_fit() -> None:
    run = RunConfig(model="m", decode=BLOCKS)
    own = book_of(run, 150)
    made = CompletionFields.model_validate({"prompt": "a", "max_tokens": 20})
    assert own.orders("c-", made, [range(124)], None).orders[0].decode.max_new_tokens == 20
    with pytest.raises(ApiError, match="whole blocks up to 35"):
        own.orders("c-", made, [range(125)], None)


def test_greedy_requests_need_no_top_p() -> None:
    for temperature in (0, -0.0, 5e-324, 1e-40, 5e-38, 0.000999):
        (order,) = orders(temperature=temperature, top_k=5).orders
        assert (order.decode.temperature, order.decode.top_p, order.decode.top_k) == (0, 1, None)


THRESHOLDS = ("skip_threshold", "block_add_threshold", "decoded_token_threshold")


@fuzzed
@given(
    name=st.sampled_from(["temperature", "top_p", *THRESHOLDS]),
    value=st.floats()
    | st.integers()
    | st.sampled_from([0, -0.0, 5e-324, 1e-40, 0.000999, 0.001, 1, 1.0000001, 100, 101, 1e308, 10**400, True, False]),
)
def test_a_number_means_what_it_means_in_a_run_file(name: str, value: float) -> None:
    try:
        wanted: DecodeConfig | None = DECODE.changed({name: value})
    except ValidationError:
        wanted = None
    try:
        fields = {"diffusion": {name: value}} if name in THRESHOLDS else {name: value}
        found: DecodeConfig | None = orders(max_tokens=64, **fields).orders[0].decode
    except (ValidationError, ApiError) as error:
        assert name in str(error)
        found = None
    assert found == wanted


def test_several_answers_differ_by_their_seeds_alone() -> None:
    made = orders(n=3, seed=7).orders
    assert [order.request.seed for order in made] == [7, 8, 9]
    assert {order.request.noise_name for order in made} == {""}
    assert len({order.request.id for order in made}) == 3
    with pytest.raises(ApiError, match="temperature") as refused:
        orders(n=2, temperature=1e-40)
    assert refused.value.param == "n"


def test_a_request_without_seed_and_name_differs_each_time() -> None:
    assert orders().orders[0].request.noise_name != orders().orders[0].request.noise_name
    assert orders(request_id="a").orders[0].request.noise_name == "a"


def test_ignore_eos_and_stop_are_the_requests_own() -> None:
    (order,) = orders(ignore_eos=True, stop="x").orders
    assert order.decode.eos_token_id == -1 and order.decode.stop == ("x", "END")


def test_settings_of_diffusion_have_limits() -> None:
    (order,) = orders(diffusion={"num_lookahead": 1, "block_size": 8, "skip_threshold": 0.5}).orders
    assert (order.decode.num_lookahead, order.decode.block_size, order.decode.skip_threshold) == (1, 8, 0.5)
    with pytest.raises(ApiError) as refused:
        orders(diffusion={"skip_threshold": 0})
    assert refused.value.param == "diffusion.skip_threshold"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 65}, "n"), ({"stop": ["a"] * 17}, "stop"), ({"tools": [{}]}, "tools"), ({"min_p": 0.1}, "min_p"),
        ({"diffusion": {"num_lookahead": 4}}, "diffusion.num_lookahead"),
    ],
)  # fmt: skip
def test_what_is_too_much_or_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        book().check(CompletionFields.model_validate({"prompt": "a", **fields}))
    assert refused.value.status == 400 and refused.value.param == param


@pytest.mark.parametrize(
    ("num_prompts", "n", "param"), [(6, 1, None), (3, 2, None), (7, 1, "prompt"), (1, 7, "n"), (2, 4, "n")]
)
def test_more_answers_than_could_ever_be_taken_are_no_matter_of_coming_again(
    num_prompts: int, n: int, param: str | None
) -> None:
    fields = CompletionFields.model_validate({"prompt": "a", "n": n})
    of_four_slots = book(max_queued_requests=2)
    if param is None:
        of_four_slots.check(fields, num_prompts)
        return
    with pytest.raises(ApiError, match=r"at most 6 can be taken at once, as 4 are decoded .* in several") as refused:
        of_four_slots.check(fields, num_prompts)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_generate_request_has_one_prompt() -> None:
    for wrong in ({}, {"prompt": "a", "messages": [{"role": "user"}]}):
        with pytest.raises(ValueError, match="either prompt or messages"):
            GenerateFields.model_validate(wrong)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"diffusion": {"skip_threshold": 2.0}}, "diffusion.skip_threshold"),
        ({"diffusion": {"block_size": 32}, "max_tokens": 2**31 - 1}, "max_tokens"),
        ({"top_k": 300}, "top_k"),
    ],
)
def test_what_is_refused_bears_the_name_that_the_client_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        orders(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("settings", "fields", "param"),
    [
        (
            {"strategy": {"name": "fast_dllm_v2", "sub_block_size": 8}},
            {"diffusion": {"block_size": 12}},
            "diffusion.block_size",
        ),
        ({"fill_rule": "static(steps=8)"}, {"diffusion": {"block_size": 4}}, "diffusion.block_size"),
        (
            {"strategy": {"name": "block_diffusion", "commit": "separate"}},
            {"diffusion": {"block_add_threshold": 0.5}},
            "diffusion.block_add_threshold",
        ),
        (
            {"strategy": {"name": "block_diffusion", "edit_threshold": 0.5}},
            {"diffusion": {"block_add_threshold": 0.5}},
            "diffusion.block_add_threshold",
        ),
        ({"mask_probability": "counted"}, {"temperature": 0.5, "top_p": 0.9}, "temperature"),
        ({}, {"diffusion": {"block_size": 32}, "max_completion_tokens": 300}, "max_completion_tokens"),
    ],
)
def test_of_settings_that_contradict_each_other_the_one_that_was_sent_is_named(
    settings: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    decode = DecodeConfig.model_validate({**BLOCKS.model_dump(exclude_unset=True), **settings})
    with pytest.raises(ApiError) as refused:
        orders(decode=decode, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert str(refused.value).count(param.removeprefix("diffusion.")) >= 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "0.7"}, {"temperature": True}, {"top_p": "1"}, {"max_tokens": "5"}, {"max_tokens": 2**63},
        {"diffusion": {"skip_threshold": "0.5"}}, {"max_completion_tokens": True},
    ],
)  # fmt: skip
def test_numbers_are_numbers(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionFields.model_validate({"prompt": "a", **fields})
    assert CompletionFields.model_validate({"prompt": "a", "temperature": 1}).temperature == 1


def test_a_completion_may_name_its_length_as_a_chat_does() -> None:
    (order,) = orders(max_completion_tokens=5).orders
    assert order.request.max_tokens == 5


def test_what_ends_answers_comes_beside_the_runs() -> None:
    own = DECODE.model_copy(update={"stop_token_ids": (4,), "skip_special_tokens": False})
    (order,) = orders(decode=own, stop=["x", "END"], stop_token_ids=[7, 4]).orders
    assert (order.decode.stop, order.decode.stop_token_ids) == (("x", "END"), (7, 4))
    assert not order.decode.skip_special_tokens
    (order,) = orders(decode=own, skip_special_tokens=True).orders
    assert (order.decode.stop, order.decode.stop_token_ids) == (("END",), (4,)) and order.decode.skip_special_tokens
    with pytest.raises(ApiError, match=r"^stop: a stop string has at most 1000 characters: shorten it"):
        orders(stop=["x", "y" * 1001])
    many = own.model_copy(update={"stop_token_ids": tuple(range(100))})
    with pytest.raises(ApiError, match=r"^stop_token_ids: write at most 128 of them"):
        orders(decode=many, stop_token_ids=list(range(100, 129)))


REFUSED: dict[str, tuple[Any, str]] = {
    "presence_penalty": (0.5, "any order"), "frequency_penalty": (1, "any order"),
    "repetition_penalty": (2, "any order"), "length_penalty": (2, "beam"), "use_beam_search": (True, "beam"),
    "min_p": (0.1, "top_p and top_k"), "best_of": (3, "set n"),
    "top_logprobs": (3, "as logprobs"), "prompt_logprobs": (1, "given, not predicted"),
    "bad_words": (["a"], "logit_bias"), "allowed_token_ids": ([1], "logit_bias"),
    "guided_json": ({}, "structured_outputs"), "guided_whitespace_pattern": ("a", "structured_outputs"),
    "tools": ([{}], "takes tools"),
    "tool_choice": ("required", "takes tools"), "functions": ([{}], "takes tools"),
    "documents": ([{}], "without documents"), "reasoning_effort": ("high", "chat_template_kwargs"),
    "audio": ({}, "text only"), "modalities": (["audio"], "text only"), "chat_template": ("a", "a program"),
    "chat_template_kwargs": ({"a": 1}, "with messages"), "add_generation_prompt": (False, "lets the assistant speak"),
    "continue_final_message": (True, "/v1/completions"), "truncate_prompt_tokens": (5, "shorter"),
    "spaces_between_special_tokens": (False, "decoder"), "detokenize": (False, "return_token_ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_with_its_reason(name: str) -> None:
    value, reason = REFUSED[name]
    with pytest.raises(ApiError) as refused:
        book().check(CompletionFields.model_validate({"prompt": "a", name: value}))
    sentence = str(refused.value)
    assert (refused.value.status, refused.value.param) == (400, name)
    assert sentence.startswith(f"{name}: ") and reason in sentence and sentence.endswith(f"remove {name}")
    assert "token by token" not in sentence and len(sentence) < 400


def test_a_refusal_shows_the_beginning_of_what_was_sent() -> None:
    for value in (["a" * 10_000] * 10_000, {"b": 10**5000}, [[[[[[[[]]]]]]]]):
        with pytest.raises(ApiError) as refused:
            book().check(CompletionFields.model_validate({"prompt": "a", "tools": value}))
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize(("header_id", "fields"), [(None, {}), ("a", {}), (None, {"request_id": "a"})], ids=str)
def test_equal_prompts_of_a_list_are_drawn_apart(header_id: str | None, fields: dict[str, Any]) -> None:
    made = CompletionFields.model_validate({"prompt": ["a", "a", "a"], **fields})
    names = [order.request.noise_name for order in book().orders("cmpl-", made, [range(10)] * 3, header_id).orders]
    first = names[0]
    assert first and names == [first, f"{first}-1", f"{first}-2"]


def test_only_completions_repeat_their_prompt() -> None:
    messages = [{"role": "user", "content": "a"}]
    for kind in (ChatFields, GenerateFields):
        with pytest.raises(ApiError, match="only /v1/completions repeats its prompt"):
            book().check(kind.model_validate({"messages": messages, "echo": True}))
        book().check(kind.model_validate({"messages": messages, "echo": False}))


def test_a_seed_answers_alike_whatever_a_proxy_calls_the_request() -> None:
    def noise(header_id: str | None, **fields: Any) -> str | None:
        made = CompletionFields.model_validate({"prompt": "a", **fields})
        (order,) = book().orders("cmpl-", made, [range(10)], header_id).orders
        return order.request.noise_name

    assert noise("a1", seed=7) == noise("b2", seed=7) == noise(None, seed=7)
    assert noise("a1") == "a1" and noise("a1", request_id="own", seed=7) == "own"
