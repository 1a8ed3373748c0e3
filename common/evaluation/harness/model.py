"""A generator as what lm-eval (EleutherAI) calls a model: requests of its tasks in, texts out.

Nothing here imports lm-eval: `start` puts its base class under this one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pydantic import ValidationError
from tqdm import tqdm

from common.config import DecodeConfig, is_greedy
from common.decoding import GenerationRequest, Rejection
from common.errors import ConfigError
from common.text import answer_text

if TYPE_CHECKING:
    from common.generate import Generator

logger = logging.getLogger(__name__)
_NO_LIKELIHOOD = (
    "a diffusion model gives no left-to-right likelihood here: take tasks whose output_type is generate_until, such as "
    "gsm8k or humaneval"
)
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_TEXT = ("stop_token_ids", "skip_special_tokens")
_KNOWN = {"until", "do_sample", "temperature", "top_p", "top_k", *_LIMITS, *_TEXT}


class Instance(Protocol):
    """A request of lm-eval's: of `generate_until` its context and what the task asks of the generation."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class HarnessModel:
    """The methods of lm-eval's `LM`. All requests of a call go through one `Generator.generate`."""

    cache_hook: Any = None  # of lm-eval's base class

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self._generator = generator
        self._has_conversations = False  # lm-eval renders all of a run's requests, or none

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The texts, in the requests' order, each without the stop string that ended it.

        A prompt that is too long for the model has no text, and a warning says how many there are. Raises ConfigError
        if that is so for all of them.
        """
        decodes = [self.decode_of(request.args[1]) for request in requests]
        if self._has_conversations and (stops := {text for decode in decodes for text in decode.stop}):
            logger.warning(
                "answers of a chat end with these stop strings too, also inside of a fence, which marks right programs "
                "wrong: %s; pass --gen_kwargs 'until=[]' to leave out the task's",
                ", ".join(map(repr, sorted(stops))),
            )
        prompts = (
            GenerationRequest(str(place), tuple(self._encode(request.args[0])), decode)
            for place, (request, decode) in enumerate(zip(requests, decodes, strict=True))
        )
        texts, reasons = [""] * len(requests), []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as progress:
            for result in self._generator.generate(prompts):
                place = int(result.id)
                if isinstance(result, Rejection):
                    reasons.append(result.reason)
                else:
                    texts[place] = answer_text(self._generator.tokenizer, result.token_ids, decodes[place])
                    self._remember(requests[place], texts[place])
                progress.update()
        _report(reasons, len(requests))
        return texts

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        raise ConfigError(_NO_LIKELIHOOD)

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> NoReturn:
        raise ConfigError(_NO_LIKELIHOOD)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; a last message of the assistant's is what the answer begins with."""
        from common.checkpoint import chat_text  # here: torch comes with it

        self._has_conversations = True
        tokenizer, messages = self._generator.tokenizer, list(chat_history)
        if not tokenizer.has_chat_template:
            raise ConfigError(f"{self.tokenizer_name} has no chat template: leave out --apply_chat_template")
        begun = messages.pop()["content"] if not add_generation_prompt else ""
        return chat_text(tokenizer, messages) + begun

    @property
    def tokenizer_name(self) -> str:
        return self._generator.run.model

    def decode_of(self, asked: Mapping[str, Any]) -> DecodeConfig:
        """The run's settings under what the task asks for: its stop strings beside the run's, its temperature, and at
        most as many tokens as it wants. Raises ConfigError."""
        decode = self._generator.run.decode
        until = asked.get("until") or ()
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        wanted = [asked[name] for name in _LIMITS if asked.get(name) is not None]
        changes = {
            "stop": tuple(dict.fromkeys([*stop, *decode.stop])),
            "max_new_tokens": max(decode.block_size, min([decode.max_new_tokens, *wanted])),
            **{name: asked[name] for name in _TEXT if asked.get(name) is not None},
            **_sampling(asked),
        }
        try:
            return decode.changed(changes)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise ConfigError(f"generation_kwargs of the task: {where} {problem['msg']}; change --gen_kwargs") from None

    def _encode(self, text: str) -> list[int]:
        source = self._generator.run.input
        add_bos = source is not None and source.add_bos_token and not self._has_conversations
        return self._generator.tokenizer.encode(text, add_bos=add_bos)

    def _remember(self, request: Instance, text: str) -> None:
        if self.cache_hook is not None:
            self.cache_hook.add_partial("generate_until", request.args, text)


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing where the task says nothing of it, so that the run's settings stand."""
    unknown = sorted(asked.keys() - _KNOWN)
    if unknown:
        logger.debug("generation_kwargs without a meaning here: %s", ", ".join(unknown))
    if not asked.keys() & {"do_sample", "temperature"}:
        return {}
    temperature = asked.get("temperature", 1.0 if asked.get("do_sample") else 0.0)
    if not temperature or is_greedy(temperature) or asked.get("do_sample") is False:
        return {"temperature": 0.0}
    return {"temperature": temperature, "top_p": asked.get("top_p", 1.0), "top_k": asked.get("top_k")}


def _report(reasons: Iterable[str], num_requests: int) -> None:
    reasons = list(reasons)
    if reasons and len(reasons) == num_requests:
        raise ConfigError(f"none of {num_requests} requests could be decoded ({reasons[0]})")
    if reasons:
        logger.warning("%d of %d requests have no text (%s)", len(reasons), num_requests, reasons[0])
