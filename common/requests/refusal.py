"""Why a request is not taken: the field to blame, and one sentence that every door gives on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from common.config import keys_of, remedy
from common.errors import ConfigError

_MOST_NAMED = 200  # characters of a path
Path = tuple[int | str, ...]


class RequestError(ConfigError):
    """A request that is not taken. field: a wish's name, or prompt or messages; None: no single one is to blame.
    reason: the sentence without it."""

    def __init__(self, field: str | None, reason: str) -> None:
        super().__init__(reason if field is None else f"{field}: {reason}")
        self.field = field
        self.reason = reason


def refusal(errors: Sequence[Mapping[str, Any]], kind: type[BaseModel]) -> RequestError:
    """Return what the first of pydantic's errors says. kind: whose fields those are."""
    error = first_error(errors)
    path = path_of(error)
    # A value that no part of a union takes has an error of each; the one that lies deepest knows most.
    deeper = (other for other in errors if path_of(other)[: len(path)] == path)
    error = max(deeper, key=lambda other: len(path_of(other)))
    path = path_of(error)
    name, told = ".".join(keys_of(path))[:_MOST_NAMED], error["msg"].removeprefix("Value error, ")
    if name and told.startswith((f"{name}:", f"{name}.")):  # it says where by itself
        where, _, reason = told.partition(": ")
        return RequestError(where, reason)
    return RequestError(name or None, remedy(error, path, kind))


def first_error(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the error to tell of: one of half a letter stands in all parts of a union alike."""
    return next((error for error in errors if error["type"] == "string_unicode"), errors[0])


def path_of(error: Mapping[str, Any]) -> Path:
    """Return the keys and places of an error, without the parts of unions that pydantic puts between them; FastAPI puts
    `body` in front."""
    parts = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    parts = [part[:_MOST_NAMED] if isinstance(part, str) else part for part in parts]
    if error["type"] == "extra_forbidden":
        return tuple(parts)
    return tuple(part for part in parts if not re.match(r"(constrained-)?str$|list\[", str(part)))
