"""What one request may want for itself, and the settings that come of it: one meaning for every door.

The fields are those of OpenAI's and vLLM's API. HTTP's bodies are checked by them, and so are a batch line's settings
and Python's keywords, which may name any other setting of `decode` too. null is the same as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    ValidationError,
    WithJsonSchema,
)

from common.config import MOST_STOP_TOKENS, TAKE_ANY_LENGTH, DecodeConfig, given_value, is_greedy, name_after
from common.constraints import Format, of_response_format, of_structured_outputs
from common.errors import ConfigError
from common.requests.refusal import RequestError, refusal

FIRST_ERROR = Field(fail_fast=True)  # a list of a million wrong items has one error
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
MaxTokens = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]


MOST_GIVEN = 2**16  # characters of a canvas: they are tokenized while other requests wait
_MOST_PIECES = 1024
_Stop = Annotated[str, Field(strict=True, max_length=MOST_GIVEN)]  # DecodeConfig takes fewer
_MOST_BIASES = 300  # as OpenAI has it: each is a class that a pass reduces logits to
_MOST_FIRST = 4096  # tokens before an end: a pass goes over as many states


def _read_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping) or len(value) > _MOST_BIASES:
        raise ValueError(
            f"write an object of at most {_MOST_BIASES} token ids and numbers (given {given_value(value)})"
        )
    found = {}
    for key, bias in value.items():
        id = str(key)
        if not (id.isascii() and id.isdecimal() and len(id) < 10 and str(int(id)) == id):
            raise ValueError(f"write token ids as keys (given {given_value(key)})")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise ValueError(f"write a number from -100 to 100 for token {id} (given {given_value(bias)})")
        found[int(id)] = float(bias)
    return tuple(found.items())


_BIASES = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
_Bias = Annotated[Any, BeforeValidator(_read_bias), WithJsonSchema(_BIASES)]


def _no_auto(value: Any) -> Any:
    if value == "auto":
        raise ValueError("the run's pace says that now: leave it out, or set it to a number")
    return value


class AnswerFields(BaseModel):
    """Which tokens are drawn, and where the answer ends.

    max_tokens: the answer is cut there, and its canvas has as many whole blocks as that takes. stop: beside the run's.
    top_k: 0 and -1 are none. ignore_eos: no token ends the answer. response_format, structured_outputs: what the answer
    is held to (`common.constraints.formats`). suffix: a text that stands after the answer. min_tokens: before any that
    ends it. logit_bias: what is added to the logits of tokens, by their ids. cache_salt: as in `GenerationRequest`.
    """

    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = None
    stop: _Stop | Annotated[list[_Stop], FIRST_ERROR] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)] = []
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    suffix: Annotated[str, Field(strict=True, max_length=MOST_GIVEN)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0, le=_MOST_FIRST)] = 0
    logit_bias: _Bias = ()
    cache_salt: Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None = None


class PaceFields(BaseModel):
    """How fast blocks are filled."""

    num_lookahead: Annotated[int, BeforeValidator(_no_auto), Field(strict=True, ge=0)] | None = None
    block_size: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    block_add_threshold: StrictFloat | None = None
    decoded_token_threshold: StrictFloat | None = None
    skip_threshold: StrictFloat | None = None


def _piece(value: Any) -> str | int:
    """Take a text, or a hole for its number of tokens."""
    if isinstance(value, str):
        return value
    count = value["mask"] if isinstance(value, dict) and value.keys() == {"mask"} else None
    if type(count) is not int or not 1 <= count < 2**31:
        raise ValueError(f"write a text, or {{'mask': 8}} for a hole of 8 tokens (given {given_value(value)})")
    return count


_PIECES = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"mask": {"type": "integer", "minimum": 1}}}]}
_Piece = Annotated[Any, BeforeValidator(_piece), WithJsonSchema(_PIECES)]


class CanvasFields(BaseModel):
    """canvas: the whole answer, texts and holes in turn, in the place of a length. choice_probabilities: tell how
    probable each of the texts of structured_outputs.choice is."""

    choice_probabilities: StrictBool = False
    canvas: Annotated[list[_Piece], Field(min_length=1, max_length=_MOST_PIECES, fail_fast=True)] | None = None


class _AllFields(AnswerFields, PaceFields, CanvasFields):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)


class _SeedField(BaseModel):
    seed: Seed


class Wishes(NamedTuple):
    """What one request wants in the place of the run's settings; what it does not name is the run's.

    settings: of `decode`; stop strings and stop tokens come beside the run's. seed: None: the run's. format: what the
    answer is held to. suffix: a text that stands after the answer. canvas: texts and lengths of holes that the answer
    consists of. min_tokens: before any that ends it. tells_choices: how probable each of the format's texts is.
    logit_bias: token ids and what is added to their logits.
    """

    settings: Mapping[str, Any] = MappingProxyType({})
    max_tokens: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    format: Format | None = None
    format_field: str = "response_format"  # that said so
    cache_salt: str | None = None
    suffix: str | None = None
    canvas: tuple[str | int, ...] | None = None
    min_tokens: int = 0
    tells_choices: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def read(cls, given: Mapping[str, Any], seed: object = None) -> Wishes:
        """Check what somebody wrote: the fields above, and other settings of `decode`. Raises RequestError."""
        try:
            read = _AllFields.model_validate(
                {
                    name: value
                    for name, value in given.items()
                    if value is not None or name not in _AllFields.model_fields
                }
            )
            own_seed = None if seed is None else _SeedField.model_validate({"seed": seed}).seed
        except ValidationError as error:
            raise refusal(error.errors(include_url=False), DecodeConfig) from None
        return cls.of(read, read, read, own_seed, read.model_extra or {})

    @classmethod
    def of(
        cls, answer: AnswerFields, pace: PaceFields, canvas: CanvasFields, seed: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Wishes:  # fmt: skip
        """Take fields that have been checked. more: other settings of `decode`, which are checked with the run's."""
        settings: dict[str, Any] = dict(more or {})
        for fields, names in ((answer, _OF_ANSWERS), (pace, _OF_PACE)):
            settings |= {name: value for name in names if (value := getattr(fields, name)) is not None}
        stop = (answer.stop,) if isinstance(answer.stop, str) else tuple(answer.stop)
        for name, own in (("stop", stop), ("stop_token_ids", tuple(answer.stop_token_ids))):
            if own:
                settings[name] = own
        pieces = None if canvas.canvas is None else tuple(canvas.canvas)
        return cls(
            settings, answer.max_tokens, answer.ignore_eos, seed, *_format(answer), answer.cache_salt,
            answer.suffix or None, pieces, answer.min_tokens, canvas.choice_probabilities, answer.logit_bias,
        )  # fmt: skip

    @property
    def canvas_field(self) -> str | None:
        """The field that says what stands in the answer or after it; None: nothing does."""
        return "suffix" if self.suffix is not None else "canvas" if self.canvas is not None else None

    @property
    def sets_pace(self) -> bool:
        """Whether a setting says how fast blocks are filled."""
        return not self.settings.keys().isdisjoint(_OF_PACE)

    def merged(self, base: DecodeConfig) -> DecodeConfig:
        """Return the run's settings with these in their place. Raises RequestError."""
        changes = dict(self.settings)
        for name in ("stop", "stop_token_ids"):
            if name in changes:
                changes[name] = tuple(dict.fromkeys([*changes[name], *getattr(base, name)]))
        if changes.get("top_k", 1) <= 0:
            changes["top_k"] = None
        if changes.keys() & _DRAWING and is_greedy(changes.get("temperature", base.temperature)):
            changes |= {"top_p": 1.0, "top_k": None}
        if self.max_tokens is not None:
            changes |= self._canvas(self.max_tokens, base)
        if not changes:
            return base
        try:
            _require_no_quotes(changes)
            return base.changed(changes)
        except ValidationError as error:
            raise self._refused(error) from None

    def _canvas(self, max_tokens: int, base: DecodeConfig) -> dict[str, Any]:
        """Return the settings of a canvas that holds so many tokens, in whole blocks."""
        if "max_new_tokens" in self.settings:
            raise RequestError("max_new_tokens", "max_tokens says how long the answer is: remove one of the two")
        size = self.settings.get("block_size", base.block_size)
        if name_after(base.strategy, self.settings.get("strategy", base.strategy)) in TAKE_ANY_LENGTH:
            size = 1  # any length will do
        changes: dict[str, Any] = {"max_new_tokens": -(-max_tokens // size) * size}
        if max_tokens > base.max_new_tokens and "max_steps" not in self.settings:
            changes["max_steps"] = None
        return changes

    def _refused(self, error: ValidationError) -> RequestError:
        """Name the wish that is to blame: of settings that contradict each other the sentence names all, and the
        request has one of them."""
        found = refusal(error.errors(include_url=False), DecodeConfig)
        if found.field is not None and found.field != "max_new_tokens":
            return found
        named = re.findall(r"\w+", found.reason) if found.field is None else []
        own = next((name for name in named if name in self.settings), found.field)
        return RequestError("max_tokens" if own not in self.settings and self.max_tokens else own, found.reason)


def _format(answer: AnswerFields) -> tuple[Format | None, str]:
    """Return what the answer is held to, and the field that says so. Raises RequestError."""
    found = {}
    for name, read in (("response_format", of_response_format), ("structured_outputs", of_structured_outputs)):
        given = getattr(answer, name)
        try:
            if given is not None and (format := read(given)) is not None:
                found[name] = format
        except ConfigError as error:
            raise RequestError(name, str(error)) from None
    if len(found) > 1:
        raise RequestError(
            "structured_outputs", "response_format says what the answer is held to: remove one of the two"
        )
    name, format = next(iter(found.items()), ("response_format", None))
    return format, name


_READ_APART = {
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "response_format",
    "structured_outputs",
    "suffix",
    "min_tokens",
    "logit_bias",
    "cache_salt",
}  # by `Wishes.of` and `Wishes.merged`
_OF_ANSWERS = tuple(name for name in AnswerFields.model_fields if name not in _READ_APART)
_OF_PACE = tuple(PaceFields.model_fields)
_DRAWING = {"temperature", "top_p", "top_k"}


def _require_no_quotes(changes: Mapping[str, Any]) -> None:
    """Raise RequestError for a text where a number, true or false belongs. Files may have it so, for YAML reads 1e-3 as
    a text; a request does not."""
    for name, value in changes.items():
        known = DecodeConfig.model_fields.get(name) if isinstance(value, str) else None
        kinds = () if known is None else getattr(known.annotation, "__args__", (known.annotation,))
        if {int, float, bool} & set(kinds):
            raise RequestError(name, f"write it without quotes (given {given_value(value)})")
