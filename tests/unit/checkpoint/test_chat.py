"""Chat templates render in a process of their own: the same texts, and nothing that a template does ends the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from common.checkpoint import chat
from common.checkpoint.chat import ChatRenderer
from common.errors import ConfigError, EngineError

ROOT = Path(__file__).parents[3]
SPECIAL_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|endoftext|>"}
USER = [{"role": "user", "content": "How many? 1 < 2 & <b>'quotes'</b>\n  你好 🙂\u2028 "}]
TALK = [
    {"role": "system", "content": "  Be brief.  "},
    *USER,
    {"role": "assistant", "content": "Two.", "tool_calls": [{"name": "add", "arguments": {"b": 2, "a": [1.5, None]}}]},
    {"role": "user", "content": ""},
]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\n"
    "{% if add_generation_prompt %}\n    {{ '<|im_start|>assistant\n' }}\n{% endif %}"
)
LLAMA = (
    "{{- bos_token }}\n{%- set loop_messages = messages %}\n{%- for message in loop_messages %}\n"
    "    {%- if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "        {{- raise_exception('Roles must be system, user or assistant, found ' + message['role']) }}\n"
    "    {%- endif %}\n"
    "    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + eos_token %}\n    {{- content }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
TOOLS = (
    "{%- set ns = namespace(count=0) -%}\nToday is {{ strftime_now('%Y') }}.\n"
    "{% for message in messages if message.content %}{% set ns.count = ns.count + 1 %}"
    "{{ ns.count }}: {{ message | tojson(indent=2) }}{% if message.tool_calls is defined %}"
    "{% for call in message.tool_calls %}{{ call.arguments | tojson }}{% break %}{% endfor %}{% endif %}{% endfor %}"
)
DEMO = json.loads((ROOT / "models" / "demo" / "tokenizer_config.json").read_text())["chat_template"]


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    yield ChatRenderer(Path("folder"), SPECIAL_TOKENS)


def rendered_here(template: str, messages: list[dict[str, Any]]) -> str:
    no_vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    direct = transformers.PreTrainedTokenizerFast(tokenizer_object=no_vocabulary, **SPECIAL_TOKENS)
    text = direct.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("template", [DEMO, CHATML, LLAMA, TOOLS], ids=["demo", "chatml", "llama", "tools"])
@pytest.mark.parametrize("messages", [USER, TALK], ids=["user", "talk"])
def test_the_text_is_the_one_that_transformers_makes(
    renderer: ChatRenderer, template: str, messages: list[dict[str, Any]]
) -> None:
    assert renderer.render(template, messages) == rendered_here(template, messages)


def test_half_a_surrogate_pair_comes_back_as_it_went(renderer: ChatRenderer) -> None:
    assert renderer.render("{{ messages[0].content }}", [{"role": "user", "content": "\ud800x"}]) == "\ud800x"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no tools') }}", "no tools"),
        (LLAMA, "Roles must be system, user or assistant, found tool"),
        ("{{ raise_exception('a\nb' * 1000) }}", "a"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ],
)
def test_a_rejection_is_one_sentence(renderer: ChatRenderer, template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"folder: the chat template rejects the messages .*; send a list") as caught:
        renderer.render(template, [{"role": "tool", "content": "x"}])
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "maximum recursion depth"),
        ("{{ 'x' * 10 ** 10 }}", "more than 1024 MiB"),
        ("{% set n = namespace(x='xxxx') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "1024 MiB"),
        ("{{ 'x' * 5 * 10 ** 6 }}", "a text of 5000000 characters, more than 4194304"),
    ],
)
def test_a_template_that_fails_is_an_error_of_its_request_alone(
    renderer: ChatRenderer, template: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=r"folder: the chat template fails .*: correct it") as caught:
        renderer.render(template, USER)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert renderer.render("{{ messages | length }}", TALK) == "4"


@pytest.mark.slow
def test_a_template_that_never_ends_is_ended(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_WALL_SECONDS", 300.0)  # a busy machine gives its 5 s of a processor much later
    with pytest.raises(ConfigError, match=r"the chat template fails .it takes more than 5 s.: correct it"):
        renderer.render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", USER)
    assert renderer.render("yes", USER) == "yes"


def test_messages_that_are_no_data_are_rejected(renderer: ChatRenderer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    for more, reason in ((deep, "messages nested too deeply"), ({1, 2}, "rejects the messages")):
        with pytest.raises(ConfigError, match=reason):
            renderer.render("yes", [{"role": "user", "content": "hi", "more": more}])


def process_of(renderer: ChatRenderer) -> subprocess.Popen[str]:
    process = renderer._process
    assert process is not None
    return process


@pytest.mark.slow
def test_conversations_share_one_process_and_a_killed_one_is_replaced() -> None:
    renderer = ChatRenderer(Path("folder"), {})
    assert renderer._process is None
    assert renderer.render("one", USER) == "one"
    first = process_of(renderer)
    assert renderer.render("two", USER) == "two" and process_of(renderer) is first
    first.kill()
    assert renderer.render("three", USER) == "three" and process_of(renderer) is not first


def test_a_process_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(Path("folder"), {})
    renderer.render("one", USER)
    stopped = process_of(renderer)
    stopped.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(chat, "_WALL_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"takes more than 0\.5 s"):
        renderer.render("two", USER)
    assert stopped.poll() == -signal.SIGKILL


def test_where_nothing_can_be_rendered_the_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineError, match=r"chat templates cannot be rendered .*No such file"):
        ChatRenderer(Path("folder"), {}).render("one", USER)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"cannot be rendered .exit code 1"):
        ChatRenderer(Path("folder"), {}).render("one", USER)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the process ends when its input does")
def test_the_process_dies_with_a_parent_that_is_killed() -> None:
    code = (
        "import time; from pathlib import Path; from common.checkpoint.chat import ChatRenderer\n"
        "renderer = ChatRenderer(Path('folder'), {}); renderer.render('x', [{'role': 'user', 'content': ''}])\n"
        "renderer._process.send_signal(19)  # a process that is stopped does not see that its input has ended\n"
        "print(renderer._process.pid, flush=True); time.sleep(99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """A zombie has ended, whoever should have waited for it."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
