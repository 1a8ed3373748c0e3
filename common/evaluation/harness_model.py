"""A generator as what lm-eval (EleutherAI) calls a model: requests of its tasks in, texts out.

Nothing here imports lm-eval: `harness.register` puts its base class under this one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from common.config import DecodeConfig
from common.decoding import GenerationRequest, Rejection
from common.errors import ConfigError
from common.requests import RequestError, Wishes
from common.text import answer_text

if TYPE_CHECKING:
    from common.generate import Generator

logger = logging.getLogger(__name__)
_NO_ROLLING = (
    "the likelihood of whole documents is not estimated: take tasks whose output_type is multiple_choice, "
    "loglikelihood or generate_until"
)
Instance = Any  # a request of lm-eval's, whose `args` are its context and what the task asks of the generation
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_TEXT = ("stop_token_ids", "skip_special_tokens")
_KNOWN = {"until", "seed", "do_sample", "temperature", "top_p", "top_k", *_LIMITS, *_TEXT}


class HarnessModel:
    """The methods of lm-eval's `LM`. All requests of a call go through one `Generator.generate`."""

    cache_hook: Any = None  # of lm-eval's base class

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self._generator = generator
        self._has_conversations = False  # lm-eval renders all of a run's requests, or none

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the texts, in the requests' order, each without the stop string that ended it.

        A prompt that is too long for the model has no text, and a warning says how many there are. Raises ConfigError
        if that is so for all of them.
        """
        wished = [self.wishes_of(request.args[1]) for request in requests]
        decodes = [self._decode_of(wishes) for wishes in wished]
        if self._has_conversations and (stops := {text for decode in decodes for text in decode.stop}):
            logger.warning(
                "answers of a chat end with these stop strings too, also inside of a fence, which marks right programs "
                "wrong: %s; pass --gen_kwargs 'until=[]' to leave out the task's",
                ", ".join(map(repr, sorted(stops))),
            )
        texts = [""] * len(requests)
        asked = [self._asked(index, request, wished[index]) for index, request in enumerate(requests)]
        reasons = [reason for reason in asked if isinstance(reason, str)]
        made = [request for request in asked if isinstance(request, GenerationRequest)]
        with tqdm(total=len(made), disable=disable_tqdm, desc="generate_until") as progress:
            for result in self._generator.generate(made):
                index = int(result.id)
                if isinstance(result, Rejection):
                    reasons.append(result.reason)
                else:
                    texts[index] = answer_text(self._generator.tokenizer, result.token_ids, decodes[index])
                    self._remember(requests[index], texts[index])
                progress.update()
        _report(reasons, len(requests))
        return texts

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the estimated log likelihood of each continuation after its context (`common.decoding.TextScorer`).

        Whether it is the most probable one is not computed: always False. A context that is too long loses its
        beginning, and a warning says how many do. Raises ConfigError for a continuation that does not fit.
        """
        scorer, texts, num_cut = self._generator.scorer, [], 0
        for request in requests:
            prompt, text = self._split(*request.args)
            most = max(scorer.longest_prompt(len(text)), 1)
            num_cut += len(prompt) > most
            texts.append((prompt[-most:], text))
            if (reason := scorer.why_not(*texts[-1])) is not None:
                raise ConfigError(f"the continuation {request.args[1]!r:.100} cannot be scored: {reason}")
        if num_cut:
            logger.warning(
                "%d of %d contexts are too long for the model: their beginnings are cut", num_cut, len(texts)
            )
        found = []
        with tqdm(total=len(texts), disable=disable_tqdm, desc="loglikelihood") as progress:
            for request, likelihood in zip(requests, self._generator.likelihoods(texts), strict=True):
                found.append((likelihood.logprob, False))
                if self.cache_hook is not None:
                    self.cache_hook.add_partial("loglikelihood", request.args, found[-1])
                progress.update()
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> NoReturn:
        raise ConfigError(_NO_ROLLING)

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return both as token ids, tokenised together as lm-eval's own models do; spaces that end the context belong
        to the continuation."""
        tokenizer, run = self._generator.tokenizer, self._generator.run
        stem = context.rstrip()
        continuation, context = context[len(stem) :] + continuation, stem
        has_bos = run.input is not None and run.input.add_bos_token and not self._has_conversations
        if not context:
            ends = [id for id in (tokenizer.bos_id, tokenizer.eos_id) if id is not None]
            return ends[:1], tokenizer.encode(continuation)
        prompt = tokenizer.encode(context, add_bos=has_bos)
        return prompt, tokenizer.encode(context + continuation, add_bos=has_bos)[len(prompt) :]

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; a last message of the assistant's is what the answer begins with."""
        self._has_conversations = True
        tokenizer, messages = self._generator.tokenizer, list(chat_history)
        if not tokenizer.has_chat_template:
            raise ConfigError(f"{self.tokenizer_name} has no chat template: leave out --apply_chat_template")
        begun = messages.pop()["content"] if not add_generation_prompt else ""
        return tokenizer.chat_text(messages) + begun

    @property
    def tokenizer_name(self) -> str:
        return self._generator.run.model

    def wishes_of(self, asked: Mapping[str, Any]) -> Wishes:
        """What the task asks for: its stop strings, its temperature, and at most as many tokens as it wants, of those
        that the run gives. Raises ConfigError."""
        with _of_task():
            wanted = [_whole(name, asked[name]) for name in _LIMITS if asked.get(name) is not None]
            given = {
                "stop": _stops(asked.get("until") or ()),
                **({"max_tokens": min([self._generator.run.decode.max_new_tokens, *wanted])} if wanted else {}),
                **{name: asked[name] for name in _TEXT if asked.get(name) is not None},
                **_sampling(asked),
            }
            return Wishes.read(given, asked.get("seed"))

    def _asked(self, index: int, request: Instance, wishes: Wishes) -> GenerationRequest | str:
        """Return the request, or why there is none."""
        maker = self._generator.requests
        try:
            prompt = maker.prompts.of_text(request.args[0], with_bos=not self._has_conversations)
            return maker.request(str(index), prompt, wishes)
        except RequestError as error:
            return str(error)

    def _decode_of(self, wishes: Wishes) -> DecodeConfig:
        with _of_task():
            return self._generator.requests.decode(wishes)

    def _remember(self, request: Instance, text: str) -> None:
        if self.cache_hook is not None:
            self.cache_hook.add_partial("generate_until", request.args, text)


def _stops(until: object) -> list[str]:
    texts = [until] if isinstance(until, str) else until
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"until: write a text or a list of texts (given {until!r:.60})")
    return [text for text in texts if text]


def _whole(name: str, limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise ConfigError(f"{name}: write a whole number (given {limit!r:.60})")
    return limit


@cache
def _tell_left_out(names: str) -> None:
    logger.warning("generation_kwargs without a meaning here, left out: %s", names)


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the task draws tokens; nothing where it does not say, so that the run's settings stand."""
    is_said = bool(asked.keys() & {"do_sample", "temperature"})
    left_out = sorted(asked.keys() - (_KNOWN if is_said else _KNOWN - {"top_p", "top_k"}))
    if left_out:
        _tell_left_out(", ".join(left_out))
    if not is_said:
        return {}
    temperature = asked.get("temperature", 1.0 if asked.get("do_sample") else 0.0)
    if not temperature or asked.get("do_sample") is False:
        return {"temperature": 0.0}
    return {"temperature": temperature, "top_p": asked.get("top_p", 1.0), "top_k": asked.get("top_k", 0)}


@contextmanager
def _of_task() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"generation_kwargs of the task: {error}; change --gen_kwargs") from None


def _report(reasons: Iterable[str], num_requests: int) -> None:
    reasons = list(reasons)
    if reasons and len(reasons) == num_requests:
        raise ConfigError(f"none of {num_requests} requests could be decoded ({reasons[0]})")
    if reasons:
        logger.warning("%d of %d requests have no text (%s)", len(reasons), num_requests, reasons[0])
