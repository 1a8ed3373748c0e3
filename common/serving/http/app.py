"""The routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from common.serving.http.bodies import Bodies, checked_route
from common.serving.http.errors import ApiError
from common.serving.http.explain import explained
from common.serving.http.fields import (
    REQUEST_ID,
    AbortFields,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    GenerateFields,
    Sampling,
    TokenizeFields,
)
from common.serving.http.gate import Gate, error_response
from common.serving.http.orders import refuse_unsupported
from common.serving.http.responses.calls import Call, unless_gone
from common.serving.http.responses.generate import GenerateCall
from common.serving.http.responses.openai import OpenAiCall
from common.serving.http.responses.sse import event_stream
from common.serving.http.service import Service
from common.serving.page import colours
from common.version import LOPA_VERSION


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """What every refusal says."""

    error: ErrorFields


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe these refusals of a route."""
    described: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": HTTPStatus(status).phrase} for status in statuses
    }
    return {**described, "default": {"model": ErrorBody, "description": "Any other refusal"}}


def _linked(operation: str, field: str, source: str, description: str = "") -> dict[int | str, dict[str, Any]]:
    """An answer whose `source` is a `field` of another operation's body."""
    body = {field: f"$response.body#/{source}"}
    link = {operation: {"operationId": operation, "requestBody": body}}
    return {200: {"description": description or HTTPStatus.OK.phrase, "links": link}}


_STREAMED = _linked("abort_request", "request_id", "id", "One JSON, or events with stream true")
_STREAMED[200]["content"] = {"text/event-stream": {}}
_TAKES_BODY = refusals(400, 401, 403, 404, 408, 413, 503)
_NO_ROUTE = {
    404: "there is no such route; GET /docs lists them",
    405: "the route takes another method; GET /docs lists the routes",
}
_ROUTES = """<!doctype html>
<html lang="en"><meta name="viewport" content="width=device-width"><title>LoPA: routes</title>
<style>{colours}
body {{ margin: 2rem; background: var(--paper); color: var(--ink); font: 15px/1.6 system-ui, sans-serif }}
a {{ color: var(--accent) }}</style>
<main><h1>Routes</h1><ul>{routes}</ul>
<p><a href="openapi.json">openapi.json</a> describes their fields, docs/serving.md explains them.</p></main></html>
"""


def build_app(service: Service, keys: tuple[bytes, ...], hosts: frozenset[str] | None = None) -> FastAPI:
    """Build the server. keys: digests of API keys. hosts: the names that clients may call it by; None: any."""
    app = FastAPI(title="lopa", version=LOPA_VERSION, docs_url=None, redoc_url=None)
    app.router.route_class = checked_route(Bodies(service.run.serve.max_body_bytes))
    app.add_middleware(Gate, keys=keys, hosts=hosts, count=service.metrics.http)
    _add_errors(app)
    _add_state(app, service)
    _add_tokens(app, service)
    _add_decoding(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def _refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(explained(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # of a body: FastAPI makes 400 of it
            return error_response(error.__cause__)
        why = _NO_ROUTE.get(error.status_code, error.detail)
        return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {why}"), error.headers)


def _add_state(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.get("/", response_class=HTMLResponse, responses=refusals(403))
    async def page() -> Response:
        return HTMLResponse(service.page)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        routes = [f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods]
        listed = "".join(f"<li><code>{route}</code></li>" for route in routes)
        return HTMLResponse(_ROUTES.format(colours=colours(), routes=listed))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=refusals(403, 503))
    async def health() -> Response:
        engine.require_alive()
        return JSONResponse({"status": engine.state})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=refusals(403, 503))
    async def ready() -> Response:
        engine.require_ready()
        return JSONResponse({"status": "ready", "replicas": [replica.state for replica in engine.replicas]})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=PlainTextResponse, responses=refusals(403))
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", responses=refusals(401, 403))
    async def version() -> dict[str, str]:
        return {"version": LOPA_VERSION}

    @app.get("/v1/models", responses=refusals(401, 403))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card(name) for name in service.model_names]}

    @app.get("/v1/models/{name:path}", responses=refusals(401, 403, 404))
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card(name)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses={**_TAKES_BODY, **_linked("detokenize", "tokens", "tokens")})
    async def tokenize(fields: TokenizeFields) -> Response:
        service.check_model(fields.model)
        refuse_unsupported(fields)
        if fields.messages is not None:
            token_ids = await service.prompts.of_chat(fields.messages, fields.chat_template_kwargs)
        else:
            text = fields.prompt or ""
            token_ids = await service.prompts.of_text(text, add_special_tokens=fields.add_special_tokens)
        strings = await asyncio.to_thread(service.prompts.strings, token_ids) if fields.return_token_strs else None
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": service.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    @app.post("/detokenize", operation_id="detokenize", responses=_TAKES_BODY)
    async def detokenize(fields: DetokenizeFields) -> dict[str, str]:
        service.check_model(fields.model)
        return {"prompt": await asyncio.to_thread(service.prompts.decode_known, fields.tokens)}


def _add_decoding(app: FastAPI, service: Service) -> None:
    keep_alive_s = service.run.serve.keep_alive_s

    async def submitted(
        prefix: str, request: Request, fields: Sampling, prompts: Sequence[Sequence[int]], mode: str
    ) -> Call:
        header_id = request.headers.get("x-request-id", "")
        own_id = header_id if re.fullmatch(REQUEST_ID, header_id) else None
        call = await unless_gone(request, service.submit(prefix, fields, prompts, own_id, mode))
        if service.tracer is not None:
            call.spans = service.tracer.of_call(call.orders.id, request.headers)
        return call

    async def answer(request: Request, made: OpenAiCall | GenerateCall) -> Response:
        if made.call.fields.stream:
            return event_stream(made.events(), keep_alive_s)
        return JSONResponse(await unless_gone(request, made.body()))

    @app.post("/v1/completions", responses={**_TAKES_BODY, **_STREAMED})
    async def completions(request: Request, fields: CompletionFields) -> Response:
        prompts = await service.prompts_of(fields)
        call = await submitted("cmpl-", request, fields, prompts, fields.diffusion.stream_mode)
        echoes = [service.prompts.echo(order) for order in call.orders.orders] if fields.echo else []
        return await answer(request, OpenAiCall(call, service.name_of(fields), False, echoes))

    @app.post("/v1/chat/completions", responses={**_TAKES_BODY, **_STREAMED})
    async def chat(request: Request, fields: ChatFields) -> Response:
        service.check(fields)
        prompts = [await service.prompts.of_chat(fields.messages, fields.chat_template_kwargs, fields.offered)]
        call = await submitted("chatcmpl-", request, fields, prompts, fields.diffusion.stream_mode)
        return await answer(request, OpenAiCall(call, service.name_of(fields), True))

    @app.post("/generate", responses={**_TAKES_BODY, **_STREAMED})
    async def generate(request: Request, fields: GenerateFields) -> Response:
        service.check(fields)
        prompts = [await service.prompt_of(fields)]
        mode = fields.stream_mode or fields.diffusion.stream_mode
        call = await submitted("gen-", request, fields, prompts, mode)
        return await answer(request, GenerateCall(call))

    @app.post("/abort_request", operation_id="abort_request", responses=_TAKES_BODY)
    async def abort(fields: AbortFields) -> dict[str, int]:
        call_id = fields.request_id or fields.rid or None
        if fields.request_id and fields.rid:
            raise ApiError(400, "rid: request_id names a request too; send one of the two", "rid")
        if call_id is None and not fields.abort_all:
            raise ApiError(400, "request_id: name a request, or send abort_all true", "request_id")
        if call_id is not None and fields.abort_all:
            raise ApiError(400, "abort_all: a request is named too; send one of the two", "abort_all")
        return {"aborted": await service.engine.abort_call(call_id)}
