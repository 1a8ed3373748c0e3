"""From input lines to output lines: prompts in, completions marked right or wrong out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from common.batch.inputs import InputLine
from common.batch.requests import LengthLimit, OwnSettings, TokenizerLike, prompt_or_reason
from common.config import DecodeConfig, InputConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError
from common.processes import Stopped
from common.scoring import MarkingPool, request_record, task_of
from common.text import answer_text

_STOP_LIMIT_S = 1.0  # for answers that are being marked when a run is stopped; those that take longer are decoded again


class TextGenerator(Protocol):
    """What a batch run needs of `common.generate.Generator`."""

    is_leader: bool
    replica: int
    num_replicas: int

    @property
    def run(self) -> RunConfig: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    def check(self, decode: DecodeConfig) -> None:
        """ConfigError for settings by which its model cannot be decoded."""

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]: ...

    def describe(self) -> dict[str, Any]: ...


def records(
    generator: TextGenerator,
    lines: Sequence[InputLine],
    source: InputConfig,
    stops: Sequence[str],
    max_model_len: int,
) -> Iterator[dict[str, Any]]:
    """The output lines of these requests, as they end and are marked.

    stops: where answers end, unless a line has its own; none are those of the input's benchmark, if it is one.
    """
    decode = None if stops else _of_benchmark(generator.run.decode, source)
    maker = _RequestMaker(generator, source, max_model_len, decode)
    line_of = {line.key: line for line in lines}
    refused: list[dict[str, Any]] = []
    decode_of: dict[str, DecodeConfig] = {}  # of requests with settings that are not the run's
    marking = MarkingPool(source)
    try:
        for result in generator.generate(_requests(lines, maker, refused, decode_of)):
            line, own_decode = line_of[result.id], decode_of.pop(result.id, generator.run.decode)
            if isinstance(result, Rejection):
                yield {"id": line.id, "error": result.reason}
            elif generator.is_leader:
                text = answer_text(generator.tokenizer, result.token_ids, own_decode)
                marking.put(request_record(line.id, text, result), line.fields, text)
            yield from marking.done()
            yield from _drain(refused)
        yield from marking.rest()
    except Stopped:
        yield from marking.rest(_STOP_LIMIT_S)
        raise
    finally:
        marking.close()
    yield from _drain(refused)


def _requests(
    lines: Iterable[InputLine],
    maker: _RequestMaker,
    refused: list[dict[str, Any]],
    decode_of: dict[str, DecodeConfig],
) -> Iterator[GenerationRequest]:
    for line in lines:
        request = maker.request_or_reason(line)
        if isinstance(request, str):
            refused.append({"id": line.id, "error": request})
            continue
        if request.decode is not None:
            decode_of[request.id] = request.decode
        yield request


class _RequestMaker:
    """From lines to requests. decode: of lines without settings of their own; None: the run's."""

    def __init__(
        self, generator: TextGenerator, source: InputConfig, max_model_len: int, decode: DecodeConfig | None
    ) -> None:
        self._source, self._tokenizer, self._decode = source, generator.tokenizer, decode
        self._limit = LengthLimit(generator.tokenizer, max_model_len)
        self._settings = OwnSettings(source, decode or generator.run.decode, generator.check)

    def request_or_reason(self, line: InputLine) -> GenerationRequest | str:
        """Or why there is none: the text of an error record."""
        prompt = prompt_or_reason(line, self._source, self._tokenizer, self._limit)
        if isinstance(prompt, str):
            return prompt
        try:
            own = self._settings.of(line)
        except ConfigError as error:
            return str(error)
        return GenerationRequest(line.key, prompt, own.decode or self._decode, own.seed)


def _of_benchmark(decode: DecodeConfig, source: InputConfig) -> DecodeConfig | None:
    task = task_of(source)
    return None if task is None else decode.model_copy(update={"stop": task.stop})


def _drain(refused: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while refused:
        yield refused.pop(0)
