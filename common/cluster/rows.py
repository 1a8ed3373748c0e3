"""Callable classes for `Dataset.map_batches`: rows in, answers out, an actor a replica."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Mapping
from typing import Any

from common.batch import InputLine, LineRequests, parse_line
from common.cluster.replica import LastingReplica
from common.config import DeviceProfile, InputConfig, RunConfig
from common.decoding import GenerationRequest, Rejection
from common.parquet import plain

Columns = dict[str, Any]


class DecodeRequests:
    """Rows `id`, `request` become rows `id`, `result`, the latter two pickled: what the command line sends."""

    def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
        self._replica = LastingReplica(profile, run)

    async def __call__(self, batch: Mapping[str, Any]) -> Columns:
        results = await asyncio.gather(*(self._replica.result(pickle.loads(one)) for one in batch["request"]))
        return {"id": batch["id"], "result": [pickle.dumps(result) for result in results]}


class DecodeRows:
    """Rows with an `id` and a `prompt`, `messages` or `question` become rows `id`, `text`, `error`, `record`.

    A row means what a line of `lopa run`'s input does, by the run's `input` section too. text: the answer; None where
    error says why there is none. record: JSON, the line that `lopa run` writes, without marks. `map_options` has the
    keywords for `map_batches`. Raises EngineError where the engine does not start.
    """

    def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
        # Here: torch comes with them, and the class itself is only sent to the actors.
        from common.checkpoint import load_model_config, load_tokenizer
        from common.requests import PromptMaker, RequestMaker
        from common.runtime import check_decode

        self._replica = LastingReplica(profile, run)
        self._source = source = run.input or InputConfig(path="-")
        model_config = load_model_config(run.model)
        self._decode = run.decode
        self._tokenizer = load_tokenizer(run.tokenizer_folder, model_config.mask_of(run.decode.mask_token_id))
        ready = self._replica.ready
        prompts = PromptMaker(
            self._tokenizer, add_bos=source.add_bos_token, max_tokens=ready.max_model_len, vocab_size=ready.vocab_size
        )
        maker = RequestMaker(
            run.decode,
            prompts,
            max_model_len=ready.max_model_len,
            check=lambda decode: check_decode(decode, profile, model_config),
        )
        self._requests = LineRequests(source, maker)

    async def __call__(self, batch: Mapping[str, Any]) -> Columns:
        names = list(batch)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        records = await asyncio.gather(*(self._record(number, row) for number, row in enumerate(rows, start=1)))
        return {
            "id": [str(record["id"]) for record in records],
            "text": [record.get("text") for record in records],
            "error": [record.get("error") for record in records],
            "record": [json.dumps(record, ensure_ascii=False) for record in records],
        }

    async def _record(self, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        from common.scoring import request_record
        from common.text import answer_text

        line = line_of(number, row, self._source)
        made = self._requests.request_or_reason(line)
        if not isinstance(made, GenerationRequest):
            return {"id": line.id, "error": made}
        result = await self._replica.result(made)
        if isinstance(result, Rejection):
            return {"id": line.id, "error": result.reason}
        return request_record(
            line.id, answer_text(self._tokenizer, result.token_ids, made.decode or self._decode), result
        )


def line_of(number: int, row: Mapping[str, Any], source: InputConfig) -> InputLine:
    """Return the line of an input that says what the row says. number: its place in the batch, from 1."""
    fields = plain(dict(row))
    if "id" not in fields:
        return InputLine("", number, error="the row has no id: give each one its own, a text or a whole number")
    return parse_line(number, json.dumps(fields).encode(), source)
