"""From a line of the input to its prompt as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from json import dumps
from typing import TYPE_CHECKING, Any, Protocol

from common.batch.inputs import InputLine
from common.batch.template import fill, fits
from common.config import InputConfig
from common.errors import EngineError, first_line
from common.scoring import BenchmarkTask, Row, task_of
from common.text import Writing

if TYPE_CHECKING:
    from common.checkpoint import CharacterBound

_LONG = 100_000  # characters: shorter texts are tokenised faster than their bound is found


class TokenizerLike(Protocol):
    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_bos: bool = False) -> list[int]: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    @property
    def writing(self) -> Writing: ...


class LengthLimit:
    """Refuses texts that are too long whatever their tokens are, before hours are spent on tokenising them.

    max_tokens: positions of the longest request that can be decoded.
    """

    def __init__(self, tokenizer: TokenizerLike, max_tokens: int) -> None:
        self._tokenizer: Any = tokenizer
        self._max_tokens = max_tokens

    def check(self, text: str) -> None:
        """ValueError saying how much too long the text is."""
        if len(text) <= _LONG or self._bound is None:
            return
        most = self._bound.of(text, self._max_tokens)
        if len(text) > most:
            raise ValueError(
                f"the prompt has {len(text)} characters, at most {most} fit into max_model_len "
                f"{self._max_tokens}; shorten it, or raise max_model_len in the profile if the model has more positions"
            )

    def checked_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str | None:
        """The text of a conversation that may be too long; None for others, whose text nobody needs to see.

        A template may leave messages out: what counts is the text that it makes of them. Raises as `check`.
        """
        if len(dumps([messages, variables])) <= _LONG or self._bound is None:
            return None
        from common.checkpoint import chat_text

        text = chat_text(self._tokenizer, messages, variables)
        self.check(text)
        return text

    @cached_property
    def _bound(self) -> CharacterBound | None:
        # Here: torch comes with it, which a run without a long line may do without.
        from common.checkpoint import Tokenizer, character_bound

        return character_bound(self._tokenizer) if isinstance(self._tokenizer, Tokenizer) else None


def prompt_or_reason(
    line: InputLine, config: InputConfig, tokenizer: TokenizerLike, limit: LengthLimit | None = None
) -> tuple[int, ...] | str:
    """The line's prompt as token ids, or why there is none: the text of an error record.

    Raises EngineError where no line's prompt could be made on this machine.
    """
    if line.error is not None:
        return line.error
    try:
        return tuple(_encode(line, config, tokenizer, limit))
    except (ValueError, TypeError) as error:
        return first_line(error)
    except EngineError:
        raise
    except Exception as error:  # of a chat template, which is a program of the checkpoint's
        return f"the prompt cannot be made: {type(error).__name__}: {first_line(error)}"


def _encode(line: InputLine, config: InputConfig, tokenizer: TokenizerLike, limit: LengthLimit | None) -> Sequence[int]:
    task = task_of(config)
    if task is not None:
        return _benchmark_prompt(task, line.fields, config, tokenizer, limit)
    given = {name: value for name, value in line.fields.items() if value is not None}
    if "messages" in given:
        return _chat(given["messages"], tokenizer, limit, given.get("chat_template_kwargs"))
    if config.prompt_template is not None and fits(config.prompt_template, line.fields):
        text = fill(config.prompt_template, line.fields)
    elif "question" in given and tokenizer.has_chat_template:
        return _chat([{"role": "user", "content": given["question"]}], tokenizer, limit)
    else:
        text = given["prompt"] if "prompt" in given else given["question"]
    if limit is not None:
        limit.check(text)
    return tokenizer.encode(text, add_bos=config.add_bos_token)


def _benchmark_prompt(
    task: BenchmarkTask, row: Row, config: InputConfig, tokenizer: TokenizerLike, limit: LengthLimit | None
) -> Sequence[int]:
    prompt = task.prompt(row)
    if config.apply_chat_template:
        if not tokenizer.has_chat_template:
            raise ValueError("input.apply_chat_template: the model has no chat template; set it to false")
        asked = _chat([{"role": "user", "content": prompt.text}], tokenizer, limit)
        return [*asked, *tokenizer.encode(prompt.begun)] if prompt.begun else asked
    text = prompt.text + prompt.begun
    if limit is not None:
        limit.check(text)
    return tokenizer.encode(text, add_bos=config.add_bos_token)


def _chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: TokenizerLike,
    limit: LengthLimit | None,
    variables: Mapping[str, Any] | None = None,
) -> Sequence[int]:
    if not tokenizer.has_chat_template:
        raise ValueError("the line has messages but the model has no chat template; give a prompt instead")
    text = limit.checked_chat(messages, variables) if limit is not None else None
    return tokenizer.chat(messages, variables) if text is None else tokenizer.encode(text)
