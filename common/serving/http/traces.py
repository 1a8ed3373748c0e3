"""A span a request for OpenTelemetry, made when the request ends and sent by a thread of its own.

A collector that is slow or gone costs spans and never a request: what waits for it is bounded, and the oldest goes.
Imported only where traces are wanted, since the packages are an extra.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from common.errors import ConfigError, first_line
from common.serving.http.engines.replica import GIVEN_UP, OTHER_FAILED, Answer
from common.serving.messages import Ended
from common.version import LOPA_VERSION

logger = logging.getLogger(__name__)
_LAST_WORDS_S = 2.0
_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion", "gen": "generate_content"}  # by what an id begins with


class Tracer:
    """Sends spans to `endpoint`, the whole address of OTLP over HTTP. The SDK's variables (OTEL_*) say the rest."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the exporter says it once, below
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "lopa"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        try:
            self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint)))
        except ValueError as error:
            raise ConfigError(f"OTEL_BSP_*: {first_line(error)}; correct or unset these variables") from None
        self._tracer = self._provider.get_tracer("lopa", LOPA_VERSION)
        self._model_name = model_name

    def of_call(self, call_id: str, headers: Mapping[str, str]) -> Spans:
        """Return what makes the spans of a call. headers: `traceparent` and `tracestate` name the caller's span."""
        return Spans(self, call_id, headers)

    def close(self) -> None:
        """Send what waits, for two seconds at most."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_LAST_WORDS_S)

    def send(
        self, spans: Spans, answer: Answer, attributes: Mapping[str, AttributeValue], problem: str | None = None
    ) -> None:
        """Queue a request's span, which ends at this moment. problem: why it has no answer."""
        request, decode, now = answer.order.request, answer.order.decode, time.time_ns()
        shared: dict[str, AttributeValue] = {
            "gen_ai.operation.name": spans.operation,
            "gen_ai.provider.name": "lopa",
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.temperature": decode.temperature,
            "gen_ai.response.id": spans.call_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.input_tokens": answer.order.num_prompt_tokens,
        }
        if request.max_tokens is not None:
            shared["gen_ai.request.max_tokens"] = request.max_tokens
        span = self._tracer.start_span(
            f"{spans.operation} {self._model_name}",
            spans.context,
            SpanKind.SERVER,
            {**shared, **attributes},
            start_time=now - round(1e9 * (time.monotonic() - answer.added_at)),
        )
        if problem is not None:
            span.set_status(StatusCode.ERROR, problem)
        span.end(now)


class Spans:
    """The spans of one call's requests."""

    def __init__(self, tracer: Tracer, call_id: str, headers: Mapping[str, str]) -> None:
        self.call_id = call_id
        self.operation = _OPERATIONS[call_id.partition("-")[0]]
        self.context = TraceContextTextMapPropagator().extract(headers)
        self._tracer = tracer
        self._sent: set[str] = set()

    def ended(self, answer: Answer, ended: Ended, reason: str, first_at: float | None) -> None:
        """Send the span of an answer. first_at: when its first tokens came, by `time.monotonic`."""
        num_tokens = answer.order.num_filled(ended.num_tokens)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.output_tokens": num_tokens,
            "gen_ai.latency.time_in_queue": ended.queue_s,
            "lopa.passes": ended.num_forwards,
            "lopa.tokens_per_pass": num_tokens / max(1, ended.num_forwards),
        }
        if first_at is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = first_at - answer.added_at
        self._sent.add(answer.id)
        self._tracer.send(self, answer, attributes)

    def close(self, answers: Sequence[Answer], *, has_failed: bool) -> None:
        """Send the spans of those that have ended without an answer. has_failed: one of them, and not the client."""
        for answer in answers:
            if answer.id not in self._sent:
                kind = "engine" if answer.is_over or has_failed else "client_gone"
                problem = OTHER_FAILED if has_failed else GIVEN_UP
                problem = "the engine did not answer" if answer.is_over else problem
                self._tracer.send(self, answer, {"error.type": kind}, problem)


class _Exporter(OTLPSpanExporter):  # type: ignore[misc]
    """Says once that a collector takes nothing, and once that it takes spans again."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._address, self._is_refused = endpoint, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        is_refused = result is not SpanExportResult.SUCCESS
        if is_refused and not self._is_refused:
            logger.warning("no collector takes traces at %s: requests go on, their spans are lost", self._address)
        elif self._is_refused and not is_refused:
            logger.info("the collector at %s takes traces again", self._address)
        self._is_refused = is_refused
        return result
