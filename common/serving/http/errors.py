"""What a client is told when its request cannot be served: vLLM's shape, which is what OpenAI's client expects."""

from __future__ import annotations

from typing import Any

from common.errors import one_line

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_RETRY_AFTER_S = "1"


class ApiError(Exception):
    """A refusal. status: of HTTP. param: the field that is to blame."""

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
