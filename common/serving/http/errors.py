"""What a client is told when its request cannot be served: vLLM's shape, which is what OpenAI's client expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import one_line

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_RETRY_AFTER_S = "1"


class ApiError(Exception):
    """status: of HTTP. param: the field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": one_line(str(self)), "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": _RETRY_AFTER_S} if self.status == 503 else {}


def explained(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors; FastAPI puts `body` in front of its place."""
    error = errors[0]
    place = [str(part) for part in error["loc"] if part != "body"]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({error.get('ctx', {}).get('error', 'see its syntax')})")
    if error["type"] == "value_error" and not place:
        message = error["msg"].removeprefix("Value error, ")
        return ApiError(400, message, message.partition(":")[0])
    if not place:
        return ApiError(400, f"the body: {error['msg']}; send a JSON object, with Content-Type application/json")
    param = ".".join(place[:2]) if place[0] in ("diffusion", "stream_options") else place[0]
    return ApiError(400, f"{param}: {error['msg'].removeprefix('Value error, ')}", param[:200])
