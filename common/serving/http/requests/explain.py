"""From a refused body to one sentence: the field's path, what is wrong with it and what to send instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.config import given_value, remedy
from common.serving.http.errors import ApiError
from common.serving.http.requests.fields import Sampling

_MOST_NAMED = 200  # characters of a path
_SOME_IDS = "send whole numbers from 0 on, as this model's tokenizer makes them"
Path = tuple[int | str, ...]


def explained(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Of pydantic's errors the first; FastAPI puts `body` in front of its place."""
    error = next((error for error in errors if error["type"] == "string_unicode"), errors[0])
    path = _path(error)
    if not path and error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        name, colon, _ = message.partition(":")
        return ApiError(400, message, name if colon else None)
    if not path:
        return ApiError(400, f"the body: {error['msg']}; send a JSON object, with Content-Type application/json")
    if path == ("prompt",) and error["type"] not in ("missing", "string_unicode"):
        is_text = error["loc"][-1] == "prompt"  # and no part of a union
        return ApiError(400, "prompt: send a text" if is_text else _of_prompt(error["input"]), "prompt")
    # A value that no part of a union takes has an error of each; the one that lies deepest knows most.
    error = max((other for other in errors if _path(other)[: len(path)] == path), key=lambda other: len(_path(other)))
    path = _path(error)
    name = ".".join(map(str, path))[:_MOST_NAMED]
    return ApiError(400, f"{name}: {remedy(error, path, Sampling)}", name)


def _path(error: Mapping[str, Any]) -> Path:
    """The keys and places of an error, without the parts of unions that pydantic puts between them."""
    parts = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    parts = [part[:_MOST_NAMED] if isinstance(part, str) else part for part in parts]
    if error["type"] == "extra_forbidden":
        return tuple(parts)
    return tuple(part for part in parts if not re.match(r"(constrained-)?str$|list\[", str(part)))


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
        places = ((str(place), item) for place, item in enumerate(given) if kinds != {str})
    for place, item in places:
        if not _is_id(item):
            return f"prompt.{place}: {given_value(item)} is no token id; {_SOME_IDS}"
    return "prompt: this route takes one; send a text, or token ids in a list"


def _is_id(item: Any) -> bool:
    return type(item) is int and 0 <= item < 2**31
