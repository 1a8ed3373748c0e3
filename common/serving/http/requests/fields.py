"""What requests may hold. Unknown fields are taken and logged, null is the same as absent."""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictStr, model_validator

logger = logging.getLogger(__name__)

FIRST_ERROR = Field(fail_fast=True)  # a list of a million wrong items has one error
Name = Annotated[str, Field(strict=True, max_length=1024)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], FIRST_ERROR]
Stop = Annotated[str, Field(strict=True, max_length=4096)]
REQUEST_ID = r"[\x21-\x7e]{1,128}"


def _is_request_id(value: str) -> str:
    if not re.fullmatch(REQUEST_ID, value):
        raise ValueError("write 1 to 128 visible ASCII characters")
    return value


RequestId = Annotated[StrictStr, AfterValidator(_is_request_id)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
_MOST_KEYS = 256  # of one object
_MOST_LOGGED = 200  # unknown names
_logged: set[str] = set()

# What a diffusion model cannot do, by the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "min_p": (0,), "min_tokens": (0,), "best_of": (1,), "top_logprobs": (0,), "logprobs": (False,),
    "prompt_logprobs": (False,), "logit_bias": ({},), "suffix": ("",), "stop_token_ids": ([],), "bad_words": ([],),
    "allowed_token_ids": ([],), "include_stop_str_in_output": (False,), "use_beam_search": (False,),
    "response_format": ({"type": "text"},), "structured_outputs": ({},), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "reasoning_effort": ("none",), "modalities": (["text"],), "audio": (),
    "prediction": (), "chat_template": (), "chat_template_kwargs": ({},), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "documents": ([],), "truncate_prompt_tokens": (), "logits_processors": ([],),
    "web_search_options": (),
}  # fmt: skip
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "priority", "cache_salt", "parallel_tool_calls", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip


class Fields(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > _MOST_KEYS:
            raise ValueError(f"write at most {_MOST_KEYS} keys")
        return {key: item for key, item in value.items() if item is not None}


class StreamOptions(Fields):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Diffusion(Fields):
    """Settings of `decode` that a request may have of its own, and how its stream is cut.

    stream_mode: send what is final after each pass (`prefix`), or whole blocks (`block`). stats: add counts of passes
    to the answer.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    num_lookahead: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    block_size: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    block_add_threshold: StrictFloat | None = None
    decoded_token_threshold: StrictFloat | None = None
    skip_threshold: StrictFloat | None = None
    stream_mode: Literal["prefix", "block"] = "prefix"
    stats: StrictBool = False


class Sampling(Fields):
    """What completions, chats and /generate share."""

    model: Name | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, lt=2**31)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], FIRST_ERROR] = []
    seed: Seed | None = None
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    add_special_tokens: StrictBool = True
    return_token_ids: StrictBool = False
    request_id: RequestId | None = None
    diffusion: Diffusion = Diffusion()

    @model_validator(mode="after")
    def _asks_for_what_there_is(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream true; set stream, or remove stream_options")
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats and not options.include_usage:
            raise ValueError("stream_options.continuous_usage_stats: only with include_usage true; set that too")
        return self

    def unsupported(self) -> str | None:
        """A field that asks for what a diffusion model cannot do. Logs the unknown ones."""
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL:
                if not any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
                    return name
            elif name not in _WITHOUT_EFFECT and name not in _logged and len(_logged) < _MOST_LOGGED:
                _logged.add(name)
                logger.warning("%.100r is no field that this server knows: ignored, and not told of again", name)
        return None


class CompletionFields(Sampling):
    prompt: StrictStr | TokenIds | Annotated[list[StrictStr], FIRST_ERROR] | Annotated[list[TokenIds], FIRST_ERROR]
    echo: StrictBool = False


class Part(Fields):
    type: Literal["text"]
    text: StrictStr


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[Part], Field(max_length=4096, fail_fast=True)] = ""

    def as_template_input(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


class ChatFields(Sampling):
    messages: Messages
    echo: Literal[False] = False


class GenerateFields(Sampling):
    """prompt: one. stream_mode: also `denoise`, an event a pass."""

    prompt: StrictStr | TokenIds | None = None
    messages: Messages | None = None
    n: Literal[1] = 1
    stream_mode: Literal["prefix", "block", "denoise"] | None = None

    @model_validator(mode="after")
    def _has_one_prompt(self) -> GenerateFields:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: send either prompt or messages")
        return self


class TokenizeFields(Fields):
    model: Name | None = None
    prompt: StrictStr | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _has_one_prompt(self) -> TokenizeFields:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: send either prompt or messages")
        return self


class DetokenizeFields(Fields):
    model: Name | None = None
    tokens: TokenIds


class AbortFields(Fields):
    request_id: Name | None = None
    rid: Name | None = None
    abort_all: StrictBool = False


def _is_same(value: Any, neutral: Any) -> bool:
    """Python counts False as 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
