"""What these routes' bodies may hold."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictStr

from common.decoding import TAGS, Tag
from common.serving.http.fields import Fields, Name


class PauseFields(Fields):
    mode: Literal["abort", "wait", "in_place"] = "abort"


class ContinueFields(Fields):
    """Nothing, in braces or not at all."""


class TagFields(Fields):
    tags: tuple[Tag, ...] = TAGS


class ReplaceFields(Fields):
    """model_path: of a folder on the server's machine. weight_version: null counts on."""

    model_path: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    load_format: Literal["auto", "safetensors"] = "auto"
    weight_version: Annotated[Name, Field(min_length=1)] | None = None
    abort_all_requests: StrictBool = False
