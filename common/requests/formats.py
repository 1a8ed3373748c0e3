"""The door of formats: which settings an answer can be held to one by, and the automaton that does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from common.config import DecodeConfig
from common.constraints import Automaton, Compiler
from common.errors import ConfigError
from common.requests.refusal import RequestError
from common.requests.wishes import Wishes

_CONFIDENCES = ("default", "neg_entropy")
_DRAWS_FROM_ALL: dict[str, tuple[float | None, ...]] = {"top_p": (None, 1.0), "top_k": (None, 0, -1)}


class Formats:
    """Compiles the formats of requests. token_bytes, vocab_size: as the compiler's."""

    def __init__(self, token_bytes: Callable[[], Mapping[int, bytes]], vocab_size: int | None) -> None:
        self._compiler = Compiler(token_bytes, vocab_size)

    def compiled(self, wishes: Wishes) -> Automaton:
        """Return the automaton of the wishes' format, which takes seconds the first time. Raises RequestError."""
        assert wishes.format is not None, "the caller has looked"
        try:
            return self._compiler.automaton(wishes.format)
        except ConfigError as error:
            raise RequestError(wishes.format_field, str(error)) from None

    def is_compiled(self, wishes: Wishes) -> bool:
        """Return whether `compiled` takes no time; for any text, too."""
        return wishes.format is None or self._compiler.has(wishes.format)

    def held(self, wishes: Wishes, decode: DecodeConfig) -> tuple[DecodeConfig, Automaton]:
        """Return the settings that an answer of this format is decoded by, and its automaton. Raises RequestError for
        what a format does not go together with, and for a canvas that no text of the format fits into."""
        ends = "an answer that is held to a format ends"
        refuse_ends(
            wishes, f"{ends} where that does", f"{ends} with an end token", "the format says when an answer may end"
        )
        decode = limited(wishes, decode, "a format")
        automaton = self.compiled(wishes)
        most = most_tokens(wishes, decode)
        if automaton.shortest > most:
            raise RequestError(
                "max_tokens",
                f"the shortest answer of this format has {automaton.shortest} tokens, more than {most}: raise it",
            )
        return decode.model_copy(update={"stop": ()}), automaton  # the run's would cut a text of the format


def most_tokens(wishes: Wishes, decode: DecodeConfig) -> int:
    """Return how many tokens an answer can have at most."""
    return min(decode.max_new_tokens, wishes.max_tokens or decode.max_new_tokens)


def refuse_ends(wishes: Wishes, of_stop: str, of_ignore_eos: str, of_min_tokens: str) -> None:
    """Raise RequestError for wishes about where an answer ends, each for its own reason."""
    for name, is_set, why in (
        ("stop", wishes.settings.get("stop"), of_stop),
        ("stop_token_ids", wishes.settings.get("stop_token_ids"), of_stop),
        ("ignore_eos", wishes.ignore_eos, of_ignore_eos),
        ("min_tokens", wishes.min_tokens, of_min_tokens),
    ):
        if is_set:
            raise RequestError(name, f"{why}: remove it")


def choices_of(wishes: Wishes) -> list[str]:
    """Return the texts that the answer is one of. Raises RequestError."""
    if wishes.format is None or wishes.format.kind != "choice":
        raise RequestError("choice_probabilities", "only with structured_outputs.choice: set that, or remove it")
    found: list[str] = json.loads(wishes.format.text)
    return found


def limited(wishes: Wishes, decode: DecodeConfig, what: str) -> DecodeConfig:
    """Return settings by which tokens can be kept out of an answer: none is edited, and all that may stand at a place
    is drawn from. what: keeps them out, "a format" or a field. Raises RequestError where there are none."""
    for name, neutral in _DRAWS_FROM_ALL.items():
        if decode.temperature > 0 and wishes.settings.get(name) not in neutral:
            raise RequestError(name, f"an answer with {what} is drawn from all that may stand there: remove it")
    strategy, why = decode.strategy, f"leave {what.replace('a ', 'the ', 1)} out, or"
    if strategy.num_best:
        raise RequestError(None, f"{what} cannot be kept by {strategy.name}, which moves tokens: leave it out")
    if getattr(strategy, "edit_threshold", None) is not None:
        strategy = strategy.model_copy(update={"edit_threshold": None, "penalty_lambda": 0.0})
    if strategy.guidance or strategy.penalty:
        raise RequestError(None, f"{what} is not kept under cfg_scale and penalty_lambda: {why} set these to 0")
    if decode.mask_probability == "counted":
        raise RequestError(None, f"{what} is not kept with mask_probability counted: {why} set it to excluded")
    if decode.sampling_strategy not in _CONFIDENCES:
        named = " and ".join(_CONFIDENCES)
        raise RequestError(None, f"{what} is kept with sampling_strategy {named} only: {why} set one of these")
    return decode.model_copy(update={"strategy": strategy, "top_p": 1.0, "top_k": None})
