"""What the routes share: the engine, the tokenizer, the model's names and the settings of the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from common.config import RunConfig
from common.hub import known_as
from common.requests import PromptMaker, RequestMaker
from common.serving.http.engines.client import EngineClient, QueueFull
from common.serving.http.engines.replica import Answer
from common.serving.http.errors import ApiError
from common.serving.http.fields import CompletionFields, GenerateFields, Sampling
from common.serving.http.metrics import Metrics
from common.serving.http.orders import OrderBook
from common.serving.http.responses.calls import Call
from common.serving.messages import Ready
from common.serving.served import check_model

if TYPE_CHECKING:
    from common.serving.http.prompts import Prompts
    from common.serving.http.traces import Tracer

logger = logging.getLogger(__name__)


class Service:
    """The state that the routes share. page: the HTML that `/` answers with."""

    def __init__(self, run: RunConfig, model_names: Sequence[str], engine: EngineClient, page: str) -> None:
        self.run = run
        self.model_names = model_names
        self.engine = engine
        self.page = page
        self.metrics = Metrics(model_names[0], engine)
        self._started_at = int(time.time())
        self._made: tuple[Prompts, OrderBook] | None = None
        self._compiling = asyncio.Lock()  # formats, one at a time; a client that leaves while it waits costs nothing
        self._compiler = ThreadPoolExecutor(1, "format")
        self.tracer: Tracer | None = None
        if run.serve.otlp_traces_endpoint is not None:
            from common.serving.http.traces import Tracer  # of the extra `otel`

            self.tracer = Tracer(run.serve.otlp_traces_endpoint, model_names[0])

    def load(self, ready: Ready) -> None:
        """Read the tokenizer, in a thread, since it takes a while. Raises ConfigError."""
        # Here: torch comes with them, and probes are to be answered while it is being loaded.
        from common.checkpoint import load_model_config, load_tokenizer
        from common.serving.http.prompts import Prompts

        mask_token_id = load_model_config(self.run.model).mask_of(self.run.decode.mask_token_id)
        tokenizer = load_tokenizer(self.run.tokenizer_folder, mask_token_id)
        maker = PromptMaker(
            tokenizer,
            add_bos=self.run.input is not None and self.run.input.add_bos_token,
            max_tokens=ready.max_model_len,
            vocab_size=ready.vocab_size,
        )
        requests = RequestMaker(ready.decode, maker, max_model_len=ready.max_model_len)
        book = OrderBook(self.run, requests, ready.num_slots)
        self._made = Prompts(tokenizer, maker, ready.vocab_size), book

    @property
    def prompts(self) -> Prompts:
        """Texts to ids and back. Raises ApiError while the model is being loaded."""
        return self._loaded()[0]

    @property
    def book(self) -> OrderBook:
        """What makes orders. Raises ApiError while the model is being loaded."""
        return self._loaded()[1]

    def close(self) -> None:
        """Send the traces that wait to be sent."""
        if self.tracer is not None:
            self.tracer.close()

    def _loaded(self) -> tuple[Prompts, OrderBook]:
        if self._made is None:
            self.engine.require_ready()
            raise ApiError(503, "the tokenizer is being loaded; send it again once GET /ready answers 200")
        return self._made

    @property
    def max_model_len(self) -> int | None:
        """Positions of the longest request; None while the model is being loaded."""
        return None if self.engine.ready is None else self.engine.ready.max_model_len

    def model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "lopa",
            "root": known_as(self.run.model),
            "parent": None,
            "max_model_len": self.max_model_len,
            "weight_version": self.engine.weight_version,
            "permission": [],
        }

    def name_of(self, fields: Sampling) -> str:
        return fields.model or self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not this one."""
        check_model(name, self.model_names)

    def check(self, fields: Sampling, num_prompts: int = 1) -> None:
        """Check everything that needs no prompt, before one is tokenised. Raises ApiError."""
        self.check_model(fields.model)
        self.engine.require_ready()
        self.book.check(fields, num_prompts)

    async def prompts_of(self, fields: CompletionFields) -> list[tuple[int, ...]]:
        """Return the prompts of a completion. Raises ApiError."""
        self.check(fields, len(fields.prompts))
        prompts = []
        for one in fields.prompts:
            prompts.append(await self._prompt(one, fields))
            await asyncio.sleep(0)  # each takes milliseconds
        return prompts

    async def prompt_of(self, fields: GenerateFields) -> tuple[int, ...]:
        """Return the prompt of /generate. Raises ApiError."""
        if fields.messages is not None:
            return await self.prompts.of_chat(fields.messages, fields.chat_template_kwargs)
        assert fields.prompt is not None, "one of the two is there"
        return await self._prompt(fields.prompt, fields)

    async def submit(
        self, prefix: str, fields: Sampling, prompts: Sequence[Sequence[int]], header_id: str | None, stream_mode: str
    ) -> Call:
        """Send a call's requests off; the engine takes all of them. Raises ApiError.

        The engine answers between two passes. Where one takes long a stream begins without that answer, so that no
        proxy cuts it, and a refusal is its last event.
        """
        if fields.is_held and not self.book.is_prepared(fields):
            async with self._compiling:
                await asyncio.get_running_loop().run_in_executor(self._compiler, self.book.prepare, fields)
        orders = self.book.orders(prefix, fields, prompts, header_id)
        try:
            answers = self.engine.submit(orders.orders, is_watched=stream_mode == "denoise" and fields.stream)
        except QueueFull:
            self.metrics.rejected()
            raise
        try:
            wait_s = self.run.serve.keep_alive_s if fields.stream else None
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_all_accepted(answers), wait_s)
        except BaseException:
            self.engine.abort(answers)
            raise
        return Call(self.engine, orders, fields, answers, self.prompts, self.metrics, stream_mode)

    async def _prompt(self, given: str | list[int], fields: Sampling) -> tuple[int, ...]:
        if isinstance(given, str):
            return await self.prompts.of_text(given, add_special_tokens=fields.add_special_tokens)
        return self.prompts.of_ids(given)


async def _all_accepted(answers: Sequence[Answer]) -> None:
    for answer in answers:
        await answer.accepted()
