"""Make a prompt of a text, a conversation or token ids, the same for HTTP, batch files and Python.

Tokenising 50 MB takes minutes, so a text that cannot fit whatever its tokens are is refused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import ConfigError, first_line
from common.requests.refusal import RequestError
from common.text import BEGIN_CALL, BEGIN_REASONING, END_REASONING, Reading

if TYPE_CHECKING:
    from common.checkpoint import CharacterBound, Tokenizer

LONG = 20_000  # characters: shorter texts are tokenised faster than their bound is found
_LAST_IDS = 12  # of a prompt, in which a tag would be that opens the answer


class Offered(NamedTuple):
    """Tools for a conversation. is_forced: the answer is a call, which the prompt begins."""

    tools: tuple[Mapping[str, Any], ...]
    is_forced: bool = False


class PromptMaker:
    """Makes token ids. All raise RequestError for what is no prompt, with the field that holds it.

    add_bos: put the begin token in front of texts. max_tokens: positions of the longest request; None: any number.
    vocab_size: None: unknown, ids are the engine's to judge.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_bos: bool = False,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self._max_tokens = max_tokens
        self.vocab_size = vocab_size
        self._shows_tools = False  # as far as is known

    def token_bytes(self) -> Mapping[int, bytes]:
        """Return what each token writes, by id. Raises ConfigError where tokens do not stand for bytes."""
        return self._tokenizer.token_bytes()

    @property
    def takes_chats(self) -> bool:
        return self._tokenizer.has_chat_template

    def of(self, given: object, field: str = "prompt") -> tuple[int, ...]:
        """Return the prompt of a text, of a list of messages, or of a list of token ids."""
        if isinstance(given, str):
            return self.of_text(given, field=field)
        if isinstance(given, (list, tuple)) and given and all(isinstance(item, Mapping) for item in given):
            return self.of_chat(given, field=field)
        if isinstance(given, (list, tuple)) and all(type(item) is int for item in given):
            return self.of_ids(given, field)
        raise RequestError(field, "write a text, a list of messages, or a list of token ids")

    def of_text(
        self, text: str, *, with_bos: bool = True, field: str = "prompt", beside_others: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of a text. with_bos: put the begin token in front of it, where texts have one. beside_others:
        other threads run meanwhile (`Tokenizer.encode`)."""
        self.check_length(text, field)
        aside = {"beside_others": True} if beside_others else {}
        try:
            token_ids = self._tokenizer.encode(text, add_bos=self._add_bos and with_bos, **aside)
        except ConfigError as error:
            raise RequestError(field, first_line(error)) from None
        return self.of_ids(token_ids, field)

    def of_ids(self, token_ids: Sequence[int], field: str = "prompt") -> tuple[int, ...]:
        if not token_ids:
            raise RequestError(field, "it is empty; send at least one token")
        self.check_ids(token_ids, field)
        return tuple(token_ids)

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        field: str = "messages",
        offered: Offered | None = None,
    ) -> tuple[int, ...]:
        """Return the ids up to where the answer begins. Raises EngineError where no conversation can be rendered."""
        return self.of_text(self.chat_text(messages, variables, field, offered), with_bos=False, field=field)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        field: str = "messages",
        offered: Offered | None = None,
    ) -> str:
        """Return the text that the chat template makes of a conversation. Raises as `of_chat`."""
        if not self.takes_chats:
            raise RequestError(field, "this model has no chat template; give a prompt instead")
        if offered is None:
            return self._rendered(messages, variables, field)
        text = self._rendered(messages, {**(variables or {}), "tools": list(offered.tools)}, field)
        if not self._shows_tools:
            self._shows_tools = text != self._rendered(messages, variables, field)
        if not self._shows_tools:
            raise RequestError(
                "tools", "this model's chat template shows none, so it would not see them: describe them in a message"
            )
        if not offered.is_forced:
            return text
        closing = f"\n{END_REASONING}\n\n" if text.rstrip().endswith(BEGIN_REASONING) else ""
        return f"{text}{closing}{BEGIN_CALL}\n"

    def reading(self, prompt: Sequence[int], *, has_calls: bool) -> Reading:
        """Return how a chat's answer is read: it begins with reasoning where the template knows of that."""
        if not self._tokenizer.marks_reasoning:
            return Reading(has_calls=has_calls)
        end = self._tokenizer.decode(prompt[-_LAST_IDS:], skip_special_tokens=False).rstrip()
        return Reading("reasoning" if end.endswith(BEGIN_REASONING) else "maybe", has_calls)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None, field: str) -> str:
        try:
            return self._tokenizer.chat_text(messages, variables)
        except ConfigError as error:
            raise RequestError(field, first_line(error)) from None

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Refuse ids that are none, and the mask's, which no text holds."""
        smallest, largest, mask_id = min(token_ids), max(token_ids), self._tokenizer.mask_id
        if mask_id in token_ids:
            raise RequestError(field, f"{mask_id} is the mask token; use this model's tokenizer")
        if smallest < 0 or (self.vocab_size is not None and largest >= self.vocab_size):
            stranger = smallest if smallest < 0 else largest
            raise RequestError(field, f"{stranger} is no token of this model; use this model's tokenizer")

    def check_length(self, text: str, field: str = "prompt") -> None:
        """Refuse a text of more characters than its tokens could stand for."""
        if len(text) <= LONG or self._max_tokens is None or self._bound is None:
            return
        most = self._bound.of(text, self._max_tokens)
        if len(text) > most:
            raise RequestError(
                field,
                f"{len(text)} characters, at most {most} fit into max_model_len {self._max_tokens}; shorten it, or "
                "raise max_model_len in the profile if the model has more positions",
            )

    @cached_property
    def _bound(self) -> CharacterBound | None:
        # Here: torch comes with it, which a run without a long text may do without.
        from common.checkpoint import Tokenizer, character_bound

        return character_bound(self._tokenizer) if isinstance(self._tokenizer, Tokenizer) else None
