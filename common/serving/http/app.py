"""The routes."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from common.errors import first_line
from common.serving.http.errors import ApiError
from common.serving.http.gate import Gate, error_response
from common.serving.http.requests.explain import explained
from common.serving.http.requests.fields import (
    REQUEST_ID,
    AbortFields,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    GenerateFields,
    Sampling,
    TokenizeFields,
)
from common.serving.http.requests.orders import refuse_unsupported
from common.serving.http.responses.calls import Call, unless_gone
from common.serving.http.responses.generate import GenerateCall
from common.serving.http.responses.openai import OpenAiCall
from common.serving.http.responses.sse import event_stream
from common.serving.http.service import Service
from common.version import LOPA_VERSION

logger = logging.getLogger(__name__)
_PROBED = ["GET", "HEAD"]
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "One JSON, or events with stream true", "content": {"text/event-stream": {}}}
}


def build_app(service: Service, keys: tuple[bytes, ...]) -> FastAPI:
    """All of the server. keys: digests of API keys."""
    app = FastAPI(title="lopa", version=LOPA_VERSION, docs_url=None, redoc_url=None)
    max_body_bytes = service.run.serve.max_body_bytes
    app.add_middleware(Gate, keys=keys, max_body_bytes=max_body_bytes, count=service.metrics.http)
    _add_errors(app)
    _add_state(app, service)
    _add_tokens(app, service)
    _add_decoding(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    def _refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    def _invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(explained(error.errors()))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 400 and error.__cause__ is not None:  # FastAPI's, which does not say what is wrong
            message = f"the body is not valid JSON ({first_line(error.__cause__)}); correct it"
        return error_response(ApiError(error.status_code, message))

    @app.exception_handler(Exception)
    def _defect(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "the server failed at this request; its log says how"))


def _add_state(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        return HTMLResponse(service.page)

    @app.api_route("/ping", methods=_PROBED)
    @app.api_route("/health", methods=_PROBED)
    async def health() -> Response:
        if engine.state == "dead":
            raise ApiError(503, "the engine has ended; start the server again")
        return JSONResponse({"status": engine.state})

    @app.api_route("/readyz", methods=_PROBED)
    @app.api_route("/ready", methods=_PROBED)
    async def ready() -> Response:
        engine.require_ready()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": LOPA_VERSION}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card(name) for name in service.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card(name)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(fields: TokenizeFields) -> dict[str, Any]:
        service.check_model(fields.model)
        refuse_unsupported(fields)
        if fields.messages is not None:
            token_ids = await service.prompts.of_chat(fields.messages, fields.chat_template_kwargs)
        else:
            text = fields.prompt or ""
            token_ids = await service.prompts.of_text(text, add_special_tokens=fields.add_special_tokens)
        strings = service.prompts.strings(token_ids) if fields.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": service.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }

    @app.post("/detokenize")
    async def detokenize(fields: DetokenizeFields) -> dict[str, str]:
        service.check_model(fields.model)
        return {"prompt": service.prompts.decode_known(fields.tokens)}


def _add_decoding(app: FastAPI, service: Service) -> None:
    keep_alive_s = service.run.serve.keep_alive_s

    async def submitted(
        prefix: str, request: Request, fields: Sampling, prompts: Sequence[Sequence[int]], mode: str
    ) -> Call:
        header_id = request.headers.get("x-request-id", "")
        own_id = header_id if re.fullmatch(REQUEST_ID, header_id) else None
        return await service.submit(prefix, fields, prompts, own_id, mode)

    async def answer(request: Request, made: OpenAiCall | GenerateCall) -> Response:
        if made.call.fields.stream:
            return event_stream(made.events(), keep_alive_s)
        return JSONResponse(await unless_gone(request, made.body()))

    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(request: Request, fields: CompletionFields) -> Response:
        prompts = await service.prompts_of(fields)
        call = await submitted("cmpl-", request, fields, prompts, fields.diffusion.stream_mode)
        echoes = [service.prompts.echo(order) for order in call.orders.orders] if fields.echo else []
        return await answer(
            request, OpenAiCall.of(call, service.engine, service.name_of(fields), is_chat=False, echoes=echoes)
        )

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chat(request: Request, fields: ChatFields) -> Response:
        service.check(fields)
        prompts = [await service.prompts.of_chat(fields.messages, fields.chat_template_kwargs)]
        call = await submitted("chatcmpl-", request, fields, prompts, fields.diffusion.stream_mode)
        return await answer(
            request, OpenAiCall.of(call, service.engine, service.name_of(fields), is_chat=True, echoes=[])
        )

    @app.post("/generate", responses=_STREAMED)
    async def generate(request: Request, fields: GenerateFields) -> Response:
        service.check(fields)
        prompts = [await service.prompt_of(fields)]
        mode = fields.stream_mode or fields.diffusion.stream_mode
        call = await submitted("gen-", request, fields, prompts, mode)
        return await answer(request, GenerateCall(call, service.engine))

    @app.post("/abort_requests")
    @app.post("/abort_request")
    async def abort(fields: AbortFields) -> dict[str, int]:
        call_id = fields.request_id or fields.rid
        if call_id is None and not fields.abort_all:
            raise ApiError(400, "request_id: name a request, or send abort_all true", "request_id")
        return {"aborted": service.engine.abort_call(call_id)}
