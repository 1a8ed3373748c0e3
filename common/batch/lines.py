"""Make what the engine is asked for of an input line: `common.requests` in a batch's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.batch.inputs import InputLine
from common.batch.template import fill, fits
from common.config import InputConfig
from common.decoding import GenerationRequest
from common.errors import ConfigError, EngineError, first_line
from common.requests import PromptMaker, RequestError, RequestMaker, Wishes
from common.scoring import BenchmarkTask, Row, task_of

if TYPE_CHECKING:
    from common.checkpoint import Tokenizer

_NO_OBJECT = 'write it as an object, such as {"num_lookahead": 0}, or leave it out'


class LineRequests:
    """Makes requests of lines. Where neither line nor run says where answers end, the input's benchmark does."""

    def __init__(self, source: InputConfig, maker: RequestMaker) -> None:
        task = None if maker.base.stop else task_of(source)
        self._source = source
        self._maker = maker if task is None else maker.naming(maker.base.model_copy(update={"stop": task.stop}))

    def request_or_reason(self, line: InputLine) -> GenerationRequest | str:
        """Return the line's request, or why there is none: the text of an error record. Raises as
        `prompt_or_reason`."""
        if line.error is not None:
            return line.error
        field = self._source.settings_field
        try:
            wishes = Wishes() if field is None else self._wishes(line, field)
            prompt = prompt_of(line, self._source, self._maker.prompts)
            return prompt if isinstance(prompt, str) else self._maker.request(line.key, prompt, wishes)
        except RequestError as error:
            prefix = "" if error.field in (None, "seed") else f"{field}."
            return f"line {line.number}: {prefix}{error}"
        except ConfigError as error:
            return f"line {line.number}: {error}"

    def _wishes(self, line: InputLine, field: str) -> Wishes:
        given = line.fields.get(field)
        if given is not None and not isinstance(given, dict):
            raise ConfigError(f"{field}: {_NO_OBJECT}")
        if given and "seed" in given:
            raise ConfigError(f"{field}.seed: write it beside {field}, as a field of the line")
        return Wishes.read(given or {}, line.fields.get("seed"))


def why_unused(lines: Sequence[InputLine], source: InputConfig) -> str | None:
    """Return why no line has settings of its own although the run file lets them; None: some have, or it does not."""
    field = source.settings_field
    if field is None or any(field in line.fields or "seed" in line.fields for line in lines):
        return None
    return f"input.settings_field is {field}, and no line has this field: all are decoded by the run's settings"


def prompt_or_reason(line: InputLine, source: InputConfig, tokenizer: Tokenizer) -> tuple[int, ...] | str:
    """Return what `prompt_of` does, for prompts of any length."""
    return prompt_of(line, source, PromptMaker(tokenizer, add_bos=source.add_bos_token))


def prompt_of(line: InputLine, source: InputConfig, prompts: PromptMaker) -> tuple[int, ...] | str:
    """Return the line's prompt as token ids, or why there is none: the text of an error record.

    Raises EngineError where no line's prompt could be made on this machine.
    """
    if line.error is not None:
        return line.error
    if line.is_openai:
        return f"line {line.number}: it is of an OpenAI batch file, which `lopa run` answers, without --ray"
    try:
        return _prompt(line, source, prompts)
    except (ValueError, TypeError) as error:
        return f"line {line.number}: {first_line(error)}"
    except EngineError:
        raise
    except Exception as error:  # of a chat template, which is a program of the checkpoint's
        return f"line {line.number}: the prompt cannot be made: {type(error).__name__}: {first_line(error)}"


def _prompt(line: InputLine, source: InputConfig, prompts: PromptMaker) -> tuple[int, ...]:
    task = task_of(source)
    if task is not None:
        return _benchmark_prompt(task, line.fields, source, prompts)
    given = {name: value for name, value in line.fields.items() if value is not None}
    if "messages" in given:
        return prompts.of_chat(given["messages"], given.get("chat_template_kwargs"))
    if source.prompt_template is not None and fits(source.prompt_template, line.fields):
        return prompts.of_text(fill(source.prompt_template, line.fields))
    if "prompt" in given:
        return prompts.of(given["prompt"])
    if prompts.takes_chats:
        return prompts.of_chat([{"role": "user", "content": given["question"]}], field="question")
    return prompts.of_text(given["question"], field="question")


def _benchmark_prompt(task: BenchmarkTask, row: Row, source: InputConfig, prompts: PromptMaker) -> tuple[int, ...]:
    prompt = task.prompt(row)
    if not source.apply_chat_template:
        return prompts.of_text(prompt.text + prompt.begun)
    if not prompts.takes_chats:
        raise ValueError("input.apply_chat_template: the model has no chat template; set it to false")
    asked = prompts.of_chat([{"role": "user", "content": prompt.text}])
    return (*asked, *prompts.of_text(prompt.begun, with_bos=False)) if prompt.begun else asked
