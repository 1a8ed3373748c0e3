"""What requests may hold. Unknown fields are taken and logged, null is the same as absent."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    WithJsonSchema,
    model_validator,
)

from common.config import given_value
from common.requests import (
    FIRST_ERROR,
    AnswerFields,
    CanvasFields,
    MaxTokens,
    Offered,
    PaceFields,
    RequestError,
    Seed,
    TokenId,
    Wishes,
    forced_call,
    why_no_choice,
    why_no_tools,
)
from common.text import MOST_MESSAGES, why_no_conversation, why_no_variables

logger = logging.getLogger(__name__)

Name = Annotated[str, Field(strict=True, max_length=1024)]
TokenIds = Annotated[list[TokenId], FIRST_ERROR]
REQUEST_ID = r"[\x21-\x7e]{1,128}"


def _is_request_id(value: str) -> str:
    if not re.fullmatch(REQUEST_ID, value):
        raise ValueError("write 1 to 128 visible ASCII characters")
    return value


def _none_for_false(value: Any) -> Any:
    return None if value is False else value


RequestId = Annotated[StrictStr, AfterValidator(_is_request_id)]
_NumTop = Annotated[int, Field(strict=True, ge=0, le=20)]  # alternatives beside a token's own log probability
_MOST_KEYS = 256  # of one object
_MOST_LOGGED = 200  # unknown names
_logged: set[str] = set()

_IN_ANY_ORDER = "positions are filled in any order, so no text before a token could be counted"
_BY_ROUTE = (
    "/v1/completions takes the number as logprobs, chats take logprobs and top_logprobs, /generate return_logprob and "
    "top_logprobs_num: ask by these, and"
)
NO_PROMPT_LOGPROBS = "a prompt's tokens are given, not predicted, so no pass says how probable they are:"
_BIASED = "tokens become less or more likely by logit_bias: set that, and"
_NEW_NAME = "formats are named response_format and structured_outputs: write it there, and"
_NO_TOOLS = "only /v1/chat/completions takes tools, and only by tools and tool_choice: send them there, and"
_ROUTE = "only /v1/completions repeats its prompt:"
# What cannot be had here: the values that ask for nothing, and why others are refused.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), f"{_IN_ANY_ORDER}:"),
    "frequency_penalty": ((0,), f"{_IN_ANY_ORDER}:"),
    "repetition_penalty": ((1,), f"{_IN_ANY_ORDER}:"),
    "length_penalty": ((1,), "it is of beam search, which a diffusion model does not do:"),
    "use_beam_search": ((False,), "beams grow from left to right, which a diffusion model does not do:"),
    "min_p": ((0,), "tokens are drawn by top_p and top_k only: set these, and"),
    "best_of": ((1,), "answers are not ranked, for want of a likelihood: set n, and"),
    "logprobs": ((False,), _BY_ROUTE),
    "top_logprobs": ((0,), _BY_ROUTE),
    "prompt_logprobs": ((False,), NO_PROMPT_LOGPROBS),
    "logprob_start_len": ((-1,), NO_PROMPT_LOGPROBS),
    "bad_words": (([],), _BIASED),
    "allowed_token_ids": (([],), _BIASED),
    "logits_processors": (([],), _BIASED),
    "echo": ((False,), _ROUTE),
    "structural_tag": (("",), _NEW_NAME),
    "regex": (("",), _NEW_NAME),
    "json_schema": (("",), _NEW_NAME),
    "ebnf": (("",), _NEW_NAME),
    "grammar": (("",), _NEW_NAME),
    "stop_regex": (([], ""), "texts and tokens end an answer, not patterns: set stop, and"),
    "no_stop_trim": ((False,), "a stop text is kept by include_stop_str_in_output: set that, and"),
    "max_new_tokens": ((), "the longest answer is named max_tokens: set that, and"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "documents": (([],), "conversations are rendered without documents: write them into a message, and"),
    "reasoning_effort": (("none",), "only a chat template could read it: send it in chat_template_kwargs, and"),
    "modalities": ((["text"],), "the model reads and writes text only:"),
    "audio": ((), "the model reads and writes text only:"),
    "mm_processor_kwargs": (({},), "the model reads and writes text only:"),
    "prediction": ((), "an answer is not begun with a text that is expected:"),
    "prompt_embeds": ((), "a prompt is a text or token ids: send prompt, and"),
    "chat_template": ((), "a template is a program, and only the checkpoint's own is run:"),
    "chat_template_kwargs": (({},), "only messages are rendered by a template: send it with messages, or"),
    "add_generation_prompt": ((True,), "an answer begins where the template lets the assistant speak:"),
    "continue_final_message": (
        (False,),
        "a chat's answer is a message of its own: send a prompt to /v1/completions, or",
    ),
    "truncate_prompt_tokens": ((), "no prompt is cut: send a shorter one, and"),
    "detokenize": ((True,), "answers are texts: set return_token_ids for the ids too, and"),
    "spaces_between_special_tokens": ((True,), "tokens are joined as the tokenizer's own decoder does:"),
    "web_search_options": ((), "nothing is searched for:"),
}
_OF_SAMPLING_PARAMS: dict[Any, str] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "priority", "safety_identifier", "prompt_cache_key",
}  # fmt: skip


def _without_null(given: dict[Any, Any]) -> dict[Any, Any]:
    """Return what is given: null is the same as absent."""
    return {key: item for key, item in given.items() if item is not None}


class Fields(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > _MOST_KEYS:
            raise ValueError(f"write at most {_MOST_KEYS} keys")
        return _without_null(value)

    def unsupported(self) -> tuple[str, str] | None:
        """Return a field that asks for what cannot be had here, and a sentence that says why. Logs the unknown ones."""
        for name, value in (self.model_extra or {}).items():
            neutral, why = _NEUTRAL.get(name, ((), _NEW_NAME if name.startswith("guided_") else ""))
            if why and not any(_is_same(value, one) for one in neutral):
                return name, f"{name}: {given_value(value):.100} is refused, as {why} remove {name:.100}"
            if not why and name not in _WITHOUT_EFFECT and name not in _logged and len(_logged) < _MOST_LOGGED:
                _logged.add(name)
                logger.warning("%.100r is no field that this server knows: ignored, and not told of again", name)
        return None


class StreamOptions(Fields):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Diffusion(PaceFields, CanvasFields, Fields):
    """Settings of `decode` that a request may have of its own, and how its stream is cut.

    stream_mode: send what is final after each pass (`prefix`), or whole blocks (`block`). stats: add counts of passes
    to the answer.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    stream_mode: Literal["prefix", "block"] = "prefix"
    stats: StrictBool = False


class Sampling(AnswerFields, Fields):
    """What completions, chats and /generate share."""

    model: Name | None = None
    max_completion_tokens: MaxTokens | None = None
    n: Annotated[int, Field(strict=True, ge=1, lt=2**31)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: StrictBool = False
    seed: Seed | None = None
    add_special_tokens: StrictBool = True
    return_token_ids: StrictBool = False
    request_id: RequestId | None = None
    diffusion: Diffusion = Diffusion()

    @model_validator(mode="after")
    def _asks_for_what_there_is(self) -> Sampling:
        if self.max_completion_tokens and self.max_tokens not in (None, self.max_completion_tokens):
            raise ValueError("max_tokens: max_completion_tokens is another length; send one of the two")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream true; set stream, or remove stream_options")
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats and not options.include_usage:
            raise ValueError("stream_options.continuous_usage_stats: only with include_usage true; set that too")
        return self

    @property
    def is_held(self) -> bool:
        """Whether the answer may be held to a format."""
        return self.response_format is not None or self.structured_outputs is not None

    @property
    def num_logprobs(self) -> int | None:
        """The number in GenerationRequest; the routes name it differently."""
        return None

    @property
    def wishes(self) -> Wishes:
        """The fields that HTTP, batch files and Python share."""
        wishes = Wishes.of(self, self.diffusion, self.diffusion, self.seed)
        return wishes._replace(max_tokens=self.max_completion_tokens or self.max_tokens)


class CompletionFields(Sampling):
    prompt: StrictStr | TokenIds | Annotated[list[StrictStr], FIRST_ERROR] | Annotated[list[TokenIds], FIRST_ERROR]
    echo: StrictBool = False
    logprobs: Annotated[_NumTop | None, BeforeValidator(_none_for_false)] = None

    @model_validator(mode="after")
    def _echoes_no_logprobs(self) -> CompletionFields:
        if self.echo and self.logprobs is not None:
            raise ValueError(f"logprobs: with echo they are refused, as {NO_PROMPT_LOGPROBS} remove one of the two")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which one may stand without a list around it."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)


def _checked(why_not: Callable[[object], str | None]) -> AfterValidator:
    """Check as batch files and Python do; the error names the field."""

    def check(value: Any) -> Any:
        problem = why_not(value)
        if problem is not None:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


_SCHEMA = {
    "type": "array", "minItems": 1, "maxItems": MOST_MESSAGES,
    "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string", "minLength": 1}}},
}  # fmt: skip
Variables = Annotated[Any, _checked(why_no_variables), WithJsonSchema({"type": "object"})]
Tools = Annotated[Any, _checked(why_no_tools), WithJsonSchema({"type": "array", "items": {"type": "object"}})]
Messages = Annotated[Any, _checked(why_no_conversation), WithJsonSchema(_SCHEMA)]


class _OnePrompt(BaseModel):
    """prompt or messages. What a text and a conversation may hold beside is each route's."""

    messages: Messages | None = None
    chat_template_kwargs: Variables = {}

    @model_validator(mode="after")
    def _has_one_prompt(self) -> _OnePrompt:
        if (getattr(self, "prompt", None) is None) == (self.messages is None):
            raise ValueError("prompt: send either prompt or messages")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("chat_template_kwargs: only messages are rendered by a template: send these, or remove it")
        return self


class ChatFields(Sampling):
    """tool_choice: absent, it is auto. parallel_tool_calls: whether an answer may have several calls, else its first is
    given alone."""

    messages: Messages
    chat_template_kwargs: Variables = {}
    tools: Tools = []
    tool_choice: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = "auto"
    parallel_tool_calls: StrictBool = True
    logprobs: StrictBool = False
    top_logprobs: _NumTop = 0

    @model_validator(mode="after")
    def _asks_for_what_a_chat_has(self) -> ChatFields:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs true; set that too")
        if self.suffix:
            raise ValueError(
                "suffix: a chat's answer is a whole message; send a prompt to /v1/completions, or remove it"
            )
        if (problem := why_no_choice(self.tool_choice, self.tools)) is not None:
            raise ValueError(problem)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def offered(self) -> Offered | None:
        """The tools that the template shows; None where there are none, or none is to be called."""
        is_forced = self.tool_choice not in ("none", "auto")
        return Offered(tuple(self.tools), is_forced) if self.tools and self.tool_choice != "none" else None

    @property
    def is_held(self) -> bool:
        return super().is_held or (self.offered is not None and self.offered.is_forced)

    @property
    def wishes(self) -> Wishes:
        wishes, call = super().wishes, forced_call(self.tool_choice, self.tools)
        if call is None:
            return wishes
        if wishes.format is not None:
            raise RequestError("tool_choice", f"{wishes.format_field} says what the answer is held to: remove one")
        return wishes._replace(format=call, format_field="tools")


class GenerateFields(_OnePrompt, Sampling):
    """prompt: one. stream_mode: also `denoise`, an event a pass.

    input_ids, sampling_params, return_logprob, top_logprobs_num: SGLang's names, for rollouts. The first stands for
    prompt, the second holds fields of this body, of which max_new_tokens stands for max_tokens and min_new_tokens for
    min_tokens.
    """

    prompt: StrictStr | TokenIds | None = None
    n: Literal[1] = 1
    stream_mode: Literal["prefix", "block", "denoise"] | None = None
    text: StrictStr | None = None
    input_ids: TokenIds | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: StrictBool = False
    top_logprobs_num: _NumTop = 0
    return_step_map: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _takes_other_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = _without_null(value)
        own = given.get("sampling_params", {})
        if isinstance(own, dict):
            _add(given, {_OF_SAMPLING_PARAMS.get(str(key), str(key)): item for key, item in _without_null(own).items()})
        for name in ("text", "input_ids"):
            _add(given, {"prompt": given[name]} if name in given else {})
        return given

    @model_validator(mode="after")
    def _asks_for_logprobs_first(self) -> GenerateFields:
        if self.top_logprobs_num and not self.return_logprob:
            raise ValueError("top_logprobs_num: only with return_logprob true; set that too")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs_num if self.return_logprob else None

    @property
    def is_rollout(self) -> bool:
        """Whether the client speaks as SGLang's do."""
        given = self.text, self.input_ids, self.sampling_params
        return self.return_logprob or any(one is not None for one in given)


class TokenizeFields(_OnePrompt, Fields):
    model: Name | None = None
    prompt: StrictStr | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeFields(Fields):
    model: Name | None = None
    tokens: TokenIds


class AbortFields(Fields):
    request_id: Name | None = None
    rid: Name | None = None
    abort_all: StrictBool = False


def _add(given: dict[str, Any], more: dict[str, Any]) -> None:
    """Add fields that another name stands for. Raises ValueError for one that is there."""
    for name, value in more.items():
        if name in given:
            raise ValueError(f"{name}: it is given twice, once by another name; send one of the two")
        given[name] = value


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether two values are the same, where Python counts False as 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
