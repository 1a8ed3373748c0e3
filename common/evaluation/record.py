"""One prompt decoded with all that its passes did: the trace that `lopa trace` writes and the page replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from common.batch import InputLine, prompt_or_reason
from common.config import InputConfig
from common.decoding import Completion, GenerationRequest, Rejection, StepRecord
from common.errors import ConfigError, placed
from common.hub import known_as
from common.requests import Wishes
from common.serving import DenoiseEvents, shown_settings
from common.text import answer_text

if TYPE_CHECKING:
    from common.generate import Generator


def record_trace(generator: Generator, prompt: str) -> dict[str, Any] | None:
    """Decode the prompt as a `question` of the run's input and tell what every pass did, as docs/trace.md says.

    None on ranks that do not write. Raises ConfigError for a prompt that cannot be decoded, EngineError.
    """
    records: list[StepRecord] = []
    seconds: list[float] = []
    request, begin = request_of(generator, {"question": prompt}), time.perf_counter()

    def observe(record: StepRecord) -> None:
        seconds.append(round(time.perf_counter() - begin, 6))
        records.append(record)

    completion = watch(generator, request, observe)
    return None if completion is None else _trace(generator, prompt, request, completion, records, seconds)


def request_of(generator: Generator, fields: Mapping[str, Any]) -> GenerationRequest:
    """What a line of the run's input with these fields asks for, with as long an answer as its prompt leaves room for.

    Raises ConfigError for a prompt that is empty or cannot be made.
    """
    if "question" in fields and not fields["question"].strip():
        raise ConfigError("PROMPT is empty: give the text to answer")
    source = (generator.run.input or InputConfig(path="-")).model_copy(update={"benchmark": None})  # not a row of one
    tokens = prompt_or_reason(InputLine("trace", 1, fields), source, generator.tokenizer)
    if isinstance(tokens, str):
        raise ConfigError(f"PROMPT: {tokens}")
    most = generator.requests.most_tokens(len(tokens))
    wishes = Wishes.read({"max_tokens": most} if most < generator.run.decode.max_new_tokens else {})
    with placed("PROMPT"):
        return generator.requests.request("trace", tokens, wishes)


def watch(generator: Generator, request: GenerationRequest, observe: Callable[[StepRecord], None]) -> Completion | None:
    """Decode one request and let every pass be observed; None on ranks that do not write.

    Raises ConfigError for a request that cannot be decoded, EngineError.
    """
    result: Completion | Rejection | None = None
    with generator.decoding() as core:
        writes = generator.is_leader and generator.replica == 0
        if writes:
            core.add_request(request)
        core.scheduler.observe(observe)
        while core.has_work:
            result = next((output.result for output in core.step() if output.result is not None), result)
        core.end()
    if isinstance(result, Rejection):
        raise ConfigError(f"PROMPT: {result.reason}")
    return result if writes else None


def _trace(
    generator: Generator,
    prompt: str,
    request: GenerationRequest,
    completion: Completion,
    records: list[StepRecord],
    seconds: list[float],
) -> dict[str, Any]:
    tokenizer, decode = generator.tokenizer, request.decode or generator.run.decode
    text_of = partial(tokenizer.decode, skip_special_tokens=False)
    told = DenoiseEvents(completion.prompt_length, decode, text_of)
    events = [told.of(record) for record in records]
    events[-1]["finished"] = completion.finish_reason
    text = answer_text(tokenizer, completion.token_ids, decode)
    return {
        "model": known_as(generator.run.model),
        "profile": generator.profile.name,
        "prompt": prompt,
        "settings": shown_settings(decode),
        "answer": {"text": text, "length": len(completion.token_ids)},
        "num_lookahead_wins": completion.num_lookahead_wins,
        "seconds": seconds,
        "events": events,
    }
