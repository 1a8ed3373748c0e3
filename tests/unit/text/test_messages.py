"""A conversation is the same through every door, and what transformers makes of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import transformers
from pydantic import ValidationError
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from common.batch import InputLine, prompt_or_reason
from common.batch.inputs import _problem
from common.checkpoint import load_tokenizer
from common.config import InputConfig
from common.errors import ConfigError
from common.evaluation.harness_model import HarnessModel
from common.requests import PromptMaker
from common.serving.http.explain import explained
from common.serving.http.fields import ChatFields, GenerateFields, TokenizeFields
from common.serving.http.prompts import Prompts
from common.text import conversation, why_no_conversation, why_no_variables

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}\n"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{%- if message.content is string %}{{ message.content }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if extra is defined %}{{ extra | tojson }}{% endif %}"
)
NONE = (
    "{% for m in messages %}{% if m['content'] is none %}<none>{{ m['tool_calls'][0]['id'] }}{% else %}"
    "{{ m['content'] }}{% endif %}|{% endfor %}"
)
PARTS = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message['content'] %}[{{ part['text'] }}{{ part.cache or '' }}]{% endfor %}{% endif %}{% endfor %}"
)
RENAMED = "{% for m in messages %}{% set c = m.content %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endfor %}"
FIRST = "{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}"
MACRO = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for one in content %}{{ one.text }};"
    "{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% generation %}"
    "{% endgeneration %}{% endfor %}"
)
WHOLE = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
DEVELOPER = "{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}"

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": [1, None], "a": "é"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"content": "What is 1 + 2?", "role": "user", "name": "Ann"},
    {"role": "assistant", "content": "", "reasoning_content": "hm <|im_end|>", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "ipython", "content": "\u2028 語"},
]
PART = {"type": "text", "text": "one "}
IN_PARTS: list[dict[str, Any]] = [{"role": "user", "content": [PART, {"type": "text", "text": "two", "cache": 1}]}]
NULLS: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, TALK[1]]


def write_folder(folder: Path, template: str) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Fast(models.BPE(vocab=letters, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def through_the_doors(folder: Path, messages: list[dict[str, Any]], **variables: Any) -> list[list[int]]:
    """Token ids by /tokenize, /generate, a chat, a batch line, the Python API and lm-eval."""
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(tokenizer, PromptMaker(tokenizer, max_tokens=10_000, vocab_size=300), 300)
    found = []
    for kind in (TokenizeFields, GenerateFields, ChatFields):
        body = json.loads(json.dumps({"messages": messages, "chat_template_kwargs": variables}))
        fields: Any = kind.model_validate(body)
        found.append(list(asyncio.run(prompts.of_chat(fields.messages, fields.chat_template_kwargs))))
    line = {"messages": messages, "chat_template_kwargs": variables}
    assert _problem(line, None) is None
    of_line = prompt_or_reason(InputLine("a", 1, line), InputConfig(path="-"), tokenizer)
    assert not isinstance(of_line, str), of_line
    found += [list(of_line), tokenizer.encode(tokenizer.chat_text(messages, variables))]
    if not variables:
        model = HarnessModel(cast("Any", SimpleNamespace(tokenizer=tokenizer)))
        found.append(tokenizer.encode(model.apply_chat_template(messages)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "messages", "variables"),
    [
        (CHATML, TALK, {}),
        (TOOLS, TALK, {}),
        (TOOLS, TALK, {"enable_thinking": False, "extra": {"b": 1, "a": [None]}}),
        (TOOLS, NULLS, {}),
        (NONE, NULLS, {}),
        (PARTS, IN_PARTS, {}),
        (PARTS, TALK, {}),
        (RENAMED, IN_PARTS, {}),
        (FIRST, IN_PARTS, {}),
        (MACRO, IN_PARTS, {}),
        (WHOLE, TALK, {}),
        (DEVELOPER, [{"role": "developer", "content": "a"}], {}),
    ],
)
def test_every_door_makes_what_transformers_makes(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    write_folder(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)
    assert through_the_doors(tmp_path, messages, **variables) == [expected] * (5 if variables else 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "messages", "same"),
    [
        (CHATML, IN_PARTS, [{"role": "user", "content": "one two"}]),
        (CHATML, [{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        (CHATML, [{"role": "assistant", "content": None}, {"role": "user"}],
         [{"role": "assistant", "content": ""}, {"role": "user", "content": ""}]),
        (CHATML, [{"role": "developer", "content": "a"}], [{"role": "system", "content": "a"}]),
        (WHOLE, [{"role": "user", "content": "a", "tool_calls": None}], [{"role": "user", "content": "a"}]),
    ],
)  # fmt: skip
def test_what_a_template_cannot_take_is_fitted_to_it(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], same: list[dict[str, Any]]
) -> None:
    write_folder(tmp_path, template)
    assert through_the_doors(tmp_path, messages) == through_the_doors(tmp_path, same)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages: write a list"),
        ("a", "messages: write a list"),
        ([1], "messages.0: write it as an object"),
        ([{"content": "a"}], "messages.0.role: write it as text"),
        ([{"role": "user", "content": 5}], "messages.0.content: write it as text"),
        ([TALK[0], {"role": "user", "content": [PART, {"type": "image_url", "image_url": {}}]}],
         "messages.1.content.1.type: 'image_url', and the model reads text only: send parts of type text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text: write it as text"),
        ([{"role": "user", "content": ["a"]}], "messages.0.content.0: write it as"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_told_by_its_place(messages: Any, problem: str) -> None:
    found = why_no_conversation(messages)
    assert found is not None and found.startswith(problem)
    assert (_problem({"messages": messages}, None) or "").startswith(problem)
    with pytest.raises(ConfigError, match=r"^messages"):
        conversation(messages)
    with pytest.raises(ValidationError) as refused:
        ChatFields.model_validate({"messages": messages})
    assert str(explained(refused.value.errors())) == found


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ([], "chat_template_kwargs: write an object"),
        ({"a b": 1}, "chat_template_kwargs: 'a b' is no name"),
        ({"tokenize": True}, "chat_template_kwargs.tokenize: "),
        ({"messages": []}, "chat_template_kwargs.messages: "),
        ({"tools": []}, "chat_template_kwargs.tools: a chat has its tools beside its messages"),
        ({f"a{place}": 1 for place in range(65)}, "chat_template_kwargs: 65 variables, at most 64"),
    ],
)
def test_what_a_template_may_not_be_given(variables: Any, problem: str) -> None:
    assert (why_no_variables(variables) or "").startswith(problem)
    assert (_problem({"messages": TALK, "chat_template_kwargs": variables}, None) or "").startswith(problem)
    with pytest.raises(ValidationError) as refused:
        ChatFields.model_validate({"messages": TALK, "chat_template_kwargs": variables})
    assert str(explained(refused.value.errors())) == why_no_variables(variables)
