"""Say in one sentence why a body is refused: the field's path, what is wrong with it, what to send instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ValidationError

from common.config import given_value
from common.requests import RequestError, first_error, path_of, refusal
from common.serving.http.errors import ApiError
from common.serving.http.fields import Sampling

_SOME_IDS = "send whole numbers from 0 on, as this model's tokenizer makes them"


def checked(given: Any, kind: type[BaseModel]) -> Any:
    """Return what a body says, as this kind of fields. Raises ApiError."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise explained(error.errors(include_url=False)) from None


@contextmanager
def refusing() -> Iterator[None]:
    """Make ApiErrors of what the one door for requests says."""
    try:
        yield
    except RequestError as error:
        raise ApiError(400, str(error), error.field) from None


def explained(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return what the client is told of pydantic's errors: the first."""
    error = first_error(errors)
    path = path_of(error)
    if not path and error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        name, colon, _ = message.partition(":")
        return ApiError(400, message, name if colon else None)
    if not path:
        if error["type"] == "string_unicode":
            return ApiError(400, "the body: a key is no valid Unicode text; correct it")
        return ApiError(400, "the body: send a JSON object, with the header Content-Type: application/json")
    if path == ("prompt",) and error["type"] not in ("missing", "string_unicode"):
        is_text = error["loc"][-1] == "prompt"  # and no part of a union
        return ApiError(400, "prompt: send a text" if is_text else _of_prompt(error["input"]), "prompt")
    refused = refusal(errors, Sampling)
    return ApiError(400, f"{refused.field}: {refused.reason}", refused.field)


def _of_prompt(given: Any) -> str:
    """What is wrong with what neither is a text nor holds token ids."""
    if not isinstance(given, list):
        return "prompt: send a text, or token ids in a list"
    kinds = set(map(type, given))
    if len(kinds) > 1 and kinds & {str, list}:
        return "prompt: a list of several kinds; send texts only, token ids only, or lists of token ids only"
    if kinds == {list}:
        places = ((f"{outer}.{inner}", item) for outer, ids in enumerate(given) for inner, item in enumerate(ids))
    else:
        places = ((str(index), item) for index, item in enumerate(given) if kinds != {str})
    for index, item in places:
        if not _is_id(item):
            return f"prompt.{index}: {given_value(item)} is no token id; {_SOME_IDS}"
    return "prompt: this route takes one; send a text, or token ids in a list"


def _is_id(item: Any) -> bool:
    return type(item) is int and 0 <= item < 2**31
