"""From input lines to output lines: prompts in, completions marked right or wrong out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from common.batch.inputs import InputLine
from common.batch.prompts import LengthLimit, TokenizerLike, prompt_or_reason
from common.config import InputConfig
from common.decoding import Completion, GenerationRequest, Rejection, without_stop
from common.metrics import request_record


class TextGenerator(Protocol):
    """What a batch run needs of `common.generate.Generator`."""

    is_leader: bool
    replica: int
    num_replicas: int

    @property
    def tokenizer(self) -> TokenizerLike: ...

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]: ...

    def describe(self) -> dict[str, Any]: ...


def records(
    generator: TextGenerator,
    lines: Sequence[InputLine],
    source: InputConfig,
    stops: Sequence[str],
    max_model_len: int,
) -> Iterator[dict[str, Any]]:
    """The output lines of these requests, as they end."""
    line_of = {line.key: line for line in lines}
    refused: list[dict[str, Any]] = []
    limit = LengthLimit(generator.tokenizer, max_model_len)
    for result in generator.generate(_requests(lines, source, generator.tokenizer, limit, refused)):
        line = line_of[result.id]
        if isinstance(result, Rejection):
            yield {"id": line.id, "error": result.reason}
        elif generator.is_leader:
            yield _scored(line, result, _text(result, generator.tokenizer, stops))
        yield from _drain(refused)
    yield from _drain(refused)


def _requests(
    lines: Iterable[InputLine],
    source: InputConfig,
    tokenizer: TokenizerLike,
    limit: LengthLimit,
    refused: list[dict[str, Any]],
) -> Iterator[GenerationRequest]:
    for line in lines:
        prompt = prompt_or_reason(line, source, tokenizer, limit)
        if isinstance(prompt, str):
            refused.append({"id": line.id, "error": prompt})
        else:
            yield GenerationRequest(line.key, prompt)


def _drain(refused: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while refused:
        yield refused.pop(0)


def _text(completion: Completion, tokenizer: TokenizerLike, stops: Sequence[str]) -> str:
    return without_stop(tokenizer.decode(list(completion.token_ids)), stops)


def _scored(line: InputLine, completion: Completion, text: str) -> dict[str, Any]:
    record = request_record(line.id, text, completion)
    if isinstance(line.fields.get("kind"), str):
        record["kind"] = line.fields["kind"]
    if is_checkable(line):
        record |= _mark(line, text)
    return record


def _mark(line: InputLine, text: str) -> dict[str, Any]:
    from common.metrics import score

    try:
        return {"correct": score(line.fields, text)}
    except Exception as error:
        # The answer in the input cannot be compared with, or its program not be run: the completion is as good as any
        # other. Only Stopped goes on, which is no Exception.
        return {"unscored": f"{type(error).__name__}: {error}"}


def is_checkable(line: InputLine) -> bool:
    """Whether common.metrics.scoring can tell right from wrong for this line."""
    if line.fields.get("kind") == "code":
        return all(key in line.fields for key in ("entry_point", "inputs", "expected"))
    answer = line.fields.get("answer")
    return "final" in line.fields or (isinstance(answer, str) and "####" in answer)
