"""Make output lines of input lines: prompts in, completions marked right or wrong out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from common.batch.inputs import InputLine
from common.batch.lines import LineRequests, prompt_of
from common.config import DecodeConfig, InputConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import first_line
from common.processes import Stopped
from common.requests import PromptMaker, RequestError
from common.scoring import MarkingPool, request_record
from common.text import answer_text

if TYPE_CHECKING:
    from common.generate import Generator

Ids = tuple[int, ...]
_COUNTS = "lopa"  # what a line of OpenAI's has beside its keys: the counts of a record
_STOP_LIMIT_S = 1.0  # for answers that are being marked when a run is stopped; those that take longer are decoded again


def records(
    generator: Generator, lines: Sequence[InputLine], turns: Iterator[int], source: InputConfig
) -> Iterator[dict[str, Any]]:
    """Yield the output lines of the requests that this replica takes, as they end and are marked.

    lines: those of all replicas. turns: places among them, each asked for when there is room for it.
    """
    maker = LineRequests(source, generator.requests_of(source))
    line_of = {line.key: line for line in lines}
    refused: list[dict[str, Any]] = []
    decode_of: dict[str, DecodeConfig] = {}  # of requests with settings that are not the run's
    marking = MarkingPool(source)
    has_step_map = generator.run.output is not None and generator.run.output.step_map
    try:
        for result in generator.generate(_requests((lines[place] for place in turns), maker, refused, decode_of)):
            line, own_decode = line_of[result.id], decode_of.pop(result.id, generator.run.decode)
            if isinstance(result, Rejection):
                yield {"id": line.id, "error": result.reason}
            elif generator.is_leader:
                text = answer_text(generator.tokenizer, result.token_ids, own_decode)
                record = request_record(line.id, text, result, has_step_map=has_step_map)
                marking.put(record, line.fields, text)
            yield from marking.done()
            yield from _drain(refused)
        yield from marking.rest()
    except Stopped:
        yield from marking.rest(_STOP_LIMIT_S)
        raise
    finally:
        marking.close()
    yield from _drain(refused)


def likelihood_records(
    generator: Generator, lines: Sequence[InputLine], turns: Iterator[int], source: InputConfig
) -> Iterator[dict[str, Any]]:
    """Yield, in the place of `records`, how likely the model takes each line's own text to be after its prompt.

    The lines are dealt out beforehand, since all ranks of a replica compute each of their passes; turns: not looked at.
    """
    prompts = generator.requests_of(source).prompts
    asked: list[tuple[InputLine, Ids, Ids]] = []
    for line in lines[generator.replica :: generator.num_replicas]:
        made = _text_of(line, source, prompts)
        reason = made if isinstance(made, str) else generator.scorer.why_not(*made)
        if not isinstance(made, str) and reason is None:
            asked.append((line, *made))
        elif generator.is_leader:
            yield {"id": line.id, "error": reason}
    found = generator.likelihoods((prompt, text) for _, prompt, text in asked)
    for (line, prompt, text), likelihood in zip(asked, found, strict=True):
        if generator.is_leader:
            nothing = Completion(line.key, len(prompt), (), (), 0, likelihood.num_rows, 0, "length", 0.0, 0.0)
            yield {
                **request_record(line.id, "", nothing),
                "finish_reason": "scored",
                "target_tokens": len(text),
                "loglikelihood": likelihood.logprob,
                "standard_error": likelihood.standard_error,
            }


def _text_of(line: InputLine, source: InputConfig, prompts: PromptMaker) -> tuple[Ids, Ids] | str:
    """Return prompt and text of a line, or why there are none."""
    field = source.target_field
    assert field is not None, "the caller has asked"
    if line.is_openai:
        return f"line {line.number}: it is of an OpenAI batch file, which has no texts to score: remove target_field"
    prompt, target = prompt_of(line, source, prompts), line.fields.get(field)
    if isinstance(prompt, str):
        return prompt
    try:
        is_ids = isinstance(target, list)
        return prompt, prompts.of(target, field) if is_ids else prompts.of_text(
            _checked(target, field), with_bos=False, field=field
        )
    except ValueError as error:
        return f"line {line.number}: {first_line(error)}"


def _checked(target: object, field: str) -> str:
    if not isinstance(target, str):
        raise RequestError(field, "write the text whose likelihood is wanted, or its token ids")
    return target


def _requests(
    lines: Iterable[InputLine], maker: LineRequests, refused: list[dict[str, Any]], decode_of: dict[str, DecodeConfig]
) -> Iterator[GenerationRequest]:
    for line in lines:
        request = maker.request_or_reason(line)
        if isinstance(request, str):
            refused.append({"id": line.id, "error": request})
            continue
        if request.decode is not None:
            decode_of[request.id] = request.decode
        yield request


def _drain(refused: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while refused:
        yield refused.pop(0)


def answered(custom_id: str | int, body: Mapping[str, Any], counts: Mapping[str, Any]) -> dict[str, Any]:
    """The output line of a request that was answered. body: as HTTP's."""
    return {**_line(custom_id, 200, body), _COUNTS: counts}


def refused(custom_id: str | int, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """The output line of a request that was refused. status, body: as HTTP's."""
    return _line(custom_id, status, body)


def unreadable(custom_id: str | int, sentence: str) -> dict[str, Any]:
    """The output line of an input line that holds no request."""
    error = {"code": "invalid_line", "message": sentence}
    return {"id": _name("batch_req", custom_id), "custom_id": custom_id, "response": None, "error": error}


def as_record(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an output in the terms of our records; one of our own as it is."""
    if "custom_id" not in line:
        return dict(line)
    id, response, error = line["custom_id"], line["response"], line["error"]
    if error is not None:
        return {"id": id, "error": error["message"]}
    if response["status_code"] != 200:
        return {"id": id, "error": response["body"]["error"]["message"]}
    return {"id": id, **line[_COUNTS]}


def _line(custom_id: str | int, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": _name("req", custom_id), "body": body}
    return {"id": _name("batch_req", custom_id), "custom_id": custom_id, "response": response, "error": None}


def _name(kind: str, custom_id: str | int) -> str:
    return f"{kind}_{hashlib.sha256(str(custom_id).encode(errors='backslashreplace')).hexdigest()[:24]}"
