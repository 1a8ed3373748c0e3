"""The one door for requests: a prompt and somebody's wishes in, what the engine is asked for out.

    HTTP body, batch line, lm-eval's task, Python's keywords -> Wishes --.
    text, messages or token ids -> PromptMaker -> token ids -------------+-> RequestMaker -> GenerationRequest

A batch run, the server, lm-eval and `Generator.complete` all come through here, so a request means the same to each of
them and is refused with the same sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

from common.config import TAKE_ANY_LENGTH, DecodeConfig
from common.constraints import Automaton
from common.decoding import GenerationRequest, Room
from common.requests.canvases import any_text, canvas_of, held
from common.requests.formats import Formats, choices_of, most_tokens
from common.requests.prompts import PromptMaker
from common.requests.refusal import RequestError
from common.requests.wishes import Wishes

_NO_EOS = -1  # nothing ends the text
_MOST_CHECKED = 1000  # different settings whose check is remembered


def _any(decode: DecodeConfig) -> None:
    """Refuse no settings."""


class RequestMaker:
    """Makes requests beside a run's settings.

    base: the run's, unless names_base: then each request says what it is decoded by. check: raises ConfigError for
    settings by which the model cannot be decoded; it may have something to log, too. max_model_len: positions of the
    longest request.
    """

    def __init__(
        self,
        base: DecodeConfig,
        prompts: PromptMaker,
        *,
        max_model_len: int,
        check: Callable[[DecodeConfig], None] = _any,
        names_base: bool = False,
    ) -> None:
        self.base = base
        self.prompts = prompts
        self.max_model_len = max_model_len
        self._names_base = names_base
        self._check = lru_cache(_MOST_CHECKED)(check)

    def naming(self, base: DecodeConfig) -> RequestMaker:
        """Return a maker beside other settings than the run's, which each request names."""
        return RequestMaker(base, self.prompts, max_model_len=self.max_model_len, check=self._check, names_base=True)

    def request(
        self, id: str, prompt: tuple[int, ...], wishes: Wishes, noise_name: str | None = None
    ) -> GenerationRequest:
        """Make the request. Raises RequestError, and ConfigError for settings that the model cannot have."""
        canvas, field, asked = None, None, wishes
        if wishes.canvas_field is not None:
            field = wishes.canvas_field
            canvas = canvas_of(wishes, self._piece, self.base.max_new_tokens, self.max_model_len)
            asked = wishes._replace(max_tokens=len(canvas.token_ids))
        decode = asked.merged(self.base)
        if asked.max_tokens is not None:
            self._require_room(len(prompt), decode, asked.max_tokens, wishes.settings.get("block_size", 0), field)
        decode = self._checked(decode, asked)
        automaton = None
        if canvas is not None:
            decode, automaton = held(wishes, decode, self.prompts.vocab_size)
        elif wishes.format is not None:
            decode, automaton = self.formats.held(wishes, decode)
        elif wishes.logit_bias or (wishes.min_tokens and not wishes.ignore_eos):
            field = "logit_bias" if wishes.logit_bias else "min_tokens"
            decode, automaton = any_text(wishes, decode, self.prompts.vocab_size, field)
        if wishes.logit_bias:
            assert automaton is not None, "any text is one too"
            automaton = self._with_classes(automaton, wishes)
        options: tuple[tuple[int, ...], ...] = ()
        if wishes.tells_choices:
            options = tuple(self._piece(text, "structured_outputs") for text in choices_of(wishes))
            assert automaton is not None, "choices are a format"
            longest, most = max(map(len, options)), most_tokens(asked, decode)
            if longest > most:
                raise RequestError(
                    "max_tokens", f"a text of the choice has {longest} tokens, more than {most}: raise it"
                )
            automaton = automaton.apart([token for option in options for token in option])
        own = decode if decode is not self.base or self._names_base else None
        return GenerationRequest(
            id, prompt, own, wishes.seed, noise_name, wishes.max_tokens if canvas is None else canvas.num_shown, None,
            automaton, wishes.cache_salt, None if canvas is None else canvas.token_ids,
            options, wishes.logit_bias, wishes.sets_pace,
        )  # fmt: skip

    def _with_classes(self, automaton: Automaton, wishes: Wishes) -> Automaton:
        """Return the automaton with a class for each token that has a bias. Raises RequestError."""
        if wishes.ignore_eos:
            raise RequestError("logit_bias", "only in an answer that an end token ends: remove it, or ignore_eos")
        ids = [token for token, _ in wishes.logit_bias]
        self.prompts.check_ids(ids, "logit_bias")
        return automaton.apart(ids)

    def _piece(self, text: str, field: str) -> tuple[int, ...]:
        return self.prompts.of_text(text, with_bos=False, field=field) if text else ()

    @cached_property
    def formats(self) -> Formats:
        """What compiles the formats that answers are held to."""
        return Formats(self.prompts.token_bytes, self.prompts.vocab_size)

    def decode(self, wishes: Wishes) -> DecodeConfig:
        """Return the settings that the wishes come to; `base` itself where they ask for nothing. Raises as above."""
        return self._checked(wishes.merged(self.base), wishes)

    def _checked(self, decode: DecodeConfig, wishes: Wishes) -> DecodeConfig:
        if decode is not self.base:
            if "stop_token_ids" in wishes.settings:
                self.prompts.check_ids(wishes.settings["stop_token_ids"], "stop_token_ids")
            self._check(decode)
        return decode.model_copy(update={"eos_token_id": _NO_EOS}) if wishes.ignore_eos else decode

    def most_tokens(self, num_prompt_tokens: int, block_size: int | None = None) -> int:
        """Return the longest answer: the run's, or what the context leaves, in whole blocks where those are needed."""
        size, strategy = block_size or self.base.block_size, self.base.strategy
        if strategy.name in TAKE_ANY_LENGTH and not strategy.is_from_zero:
            size = 1
        # Blocks begin after the prompt, or at position 0.
        begin = 0 if strategy.is_from_zero else num_prompt_tokens
        end = begin + (self.max_model_len - begin) // size * size
        return max(1, min(self.base.max_new_tokens, end - num_prompt_tokens))

    def _require_room(
        self, num_prompt_tokens: int, decode: DecodeConfig, max_tokens: int, own_size: int, canvas_field: str | None
    ) -> None:
        num_positions = Room(num_prompt_tokens, decode).num_positions
        if num_positions <= self.max_model_len:
            return
        what, field = f"{max_tokens} tokens after a prompt of {num_prompt_tokens}", canvas_field or "max_tokens"
        if num_positions > num_prompt_tokens + max_tokens:
            what += f", in whole blocks up to {num_positions - num_prompt_tokens},"
            if max_tokens <= own_size and canvas_field is None:  # one block, however few tokens
                field = "block_size"
        fix = "shorten the prompt"
        if num_prompt_tokens < self.max_model_len:
            fix += f", or {'lower' if canvas_field is None else 'shorten the'} {field}"
        raise RequestError(field, f"{what} are more than the model's context of {self.max_model_len} tokens: {fix}")
