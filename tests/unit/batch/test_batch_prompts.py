"""Prompts: which braces of a template are fields, and which texts are too long to be tokenised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import execute, records, write_input
from scripted import ScriptedGenerator, ScriptedTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.batch import prompt_or_reason, read_lines, run_batch
from common.batch.inputs import InputLine
from common.batch.lines import prompt_of
from common.checkpoint import load_tokenizer
from common.config import DeviceProfile, InputConfig, RunConfig
from common.errors import ConfigError, EngineError
from common.requests import PromptMaker


def prompts(tmp_path: Path, template: str, *lines: dict[str, Any]) -> list[str]:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = InputConfig(path=str(path), prompt_template=template)
    tokenizer = ScriptedTokenizer()
    found = [prompt_or_reason(line, config, tokenizer) for line in read_lines(config)]
    return [ids if isinstance(ids, str) else tokenizer.decode(list(ids)) for ids in found]


# Templates


@pytest.mark.parametrize("name", ["question", "Question", "q1", "my-field", "my_field", "_x", "Q", "Frage_2", "问题"])
def test_a_field_of_any_spelling_is_filled_in(tmp_path: Path, name: str) -> None:
    assert prompts(tmp_path, f"Q: {{{name}}}\nA:", {name: "why?"}) == ["Q: why?\nA:"]


@pytest.mark.parametrize(
    "text", ["{}", "{0}", "{ x }", "{1a}", "{a + b}", "{'a': 1}", "{x!r}", "{a.b}", "{-x}", "{", "}"]
)
def test_braces_around_anything_else_are_text(tmp_path: Path, text: str) -> None:
    assert prompts(tmp_path, f"{text} {{q}} {text}", {"q": "why?"}) == [f"{text} why? {text}"]


def test_a_template_may_hold_code(tmp_path: Path) -> None:
    template = "def f(x):\n    d = {'a': [x]}; s = {}\n    return {1, 2}  # {q}\n#include <a>\nint main() { return 0; }"
    assert prompts(tmp_path, template, {"q": "why?"}) == [template.replace("{q}", "why?")]


def test_what_is_filled_in_is_not_filled_in_again(tmp_path: Path) -> None:
    assert prompts(tmp_path, "{a} {b}", {"a": "{b}", "b": "x"}) == ["{b} x"]


def test_numbers_are_written_and_lists_become_lines(tmp_path: Path) -> None:
    line = {"a": 3, "b": 0.5, "c": ["x", 1]}
    assert prompts(tmp_path, "{a} {b} {c}", line) == ["3 0.5 x\n1"]


@pytest.mark.parametrize(
    ("template", "names"), [("{question} {q1}", r"\{q1\}"), ("{quesion}", r"\{quesion\}"), ("{a} {b}", r"\{a\}, \{b\}")]
)
def test_a_name_that_no_line_has_is_refused_with_those_that_there_are(
    tmp_path: Path, template: str, names: str
) -> None:
    expected = (
        rf"in.jsonl: no line has {names}, which input.prompt_template names, .*\(they have \{{question\}}, \{{id\}}\): "
        r".* as in --set input.prompt_template='\{text\}'"
    )
    with pytest.raises(ConfigError, match=expected):
        prompts(tmp_path, template, {"question": "hi"}, {"id": 2, "question": "ho"})


@pytest.mark.parametrize("template", ["no field", "{", "{}", "{question} {other}"])
def test_a_template_that_fits_no_line_is_refused(tmp_path: Path, template: str) -> None:
    lines = ({"question": "hi"}, {"prompt": "ho", "other": None})
    with pytest.raises(
        ConfigError, match=r"in.jsonl: input.prompt_template .* fits no line: name fields of its lines in braces"
    ):
        prompts(tmp_path, template, *lines)


def test_a_line_without_all_fields_keeps_its_own_prompt(tmp_path: Path) -> None:
    lines = ({"prompt": "a", "hint": "b"}, {"prompt": "c"}, {"prompt": "d", "hint": True})
    assert prompts(tmp_path, "{prompt}: {hint}", *lines) == ["a: b", "c", "d"]


# Length


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(folder: Path, **changes: Any) -> None:
    """A byte is a token, and so are two longer words."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)} | {"aa": 256, "aaaa": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "a"), ("aa", "aa")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    spec = {**json.loads(tokenizer.to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[-1].content | trim }}"}))


def counting(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Any, list[int]]:
    """The folder's tokenizer, and the lengths of the texts that it is given."""
    from common.checkpoint import Tokenizer as CheckpointTokenizer

    lengths: list[int] = []
    encode = CheckpointTokenizer.encode

    def count(self: CheckpointTokenizer, text: str, add_bos: bool = False) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_bos)

    monkeypatch.setattr(CheckpointTokenizer, "encode", count)
    return load_tokenizer(folder), lengths


@pytest.mark.parametrize("field", ["prompt", "question", "messages"])
def test_a_line_that_cannot_fit_is_refused_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    write_tokenizer(tmp_path)
    tokenizer, lengths = counting(monkeypatch, tmp_path)
    prompts = PromptMaker(tokenizer, max_tokens=50_000)  # 4 letters each

    def reason(length: int) -> tuple[int, ...] | str:
        value: Any = "a" * length
        if field == "messages":
            value = [{"role": "user", "content": value}]
        return prompt_of(InputLine("x", 1, {field: value}), InputConfig(path="p"), prompts)

    assert len(reason(200_000)) == 50_000  # just fits
    assert lengths == [200_000]
    assert reason(200_001) == (
        f"line 1: {field}: 200001 characters, at most 200000 fit into max_model_len 50000; shorten it, or raise "
        "max_model_len in the profile if the model has more positions"
    )
    assert lengths == [200_000]


def test_what_a_chat_template_leaves_out_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    tokenizer, _ = counting(monkeypatch, tmp_path)
    prompts = PromptMaker(tokenizer, max_tokens=100)
    messages = [{"role": "user", "content": "a" * 150_000}, {"role": "user", "content": "b" + " " * 150_000}]
    line = InputLine("x", 1, {"messages": messages})
    assert prompt_of(line, InputConfig(path="p"), prompts) == tuple(tokenizer.encode("b"))


def test_a_long_chat_is_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from common.checkpoint.chat import ChatRenderer

    write_tokenizer(tmp_path)
    tokenizer, _ = counting(monkeypatch, tmp_path)
    lengths: list[int] = []
    render = ChatRenderer.render

    def count(self: ChatRenderer, template: str, messages: Any, variables: Any) -> str:
        lengths.append(len(messages[0]["content"]))
        return render(self, template, messages, variables)

    monkeypatch.setattr(ChatRenderer, "render", count)
    prompts = PromptMaker(tokenizer, max_tokens=50_000)
    for length in (4, 150_000, 200_001):
        line = InputLine("x", 1, {"messages": [{"role": "user", "content": "a" * length}]})
        found = prompt_of(line, InputConfig(path="p"), prompts)
        assert isinstance(found, str) == (length > 200_000)
    assert lengths == [4, 150_000, 200_001]


def test_a_tokenizer_of_another_kind_has_no_bound() -> None:
    line = InputLine("x", 1, {"prompt": "a" * 150_000})
    found = prompt_of(line, InputConfig(path="p"), PromptMaker(ScriptedTokenizer(), max_tokens=10))
    assert len(found) == 150_000


def test_a_run_passes_the_profiles_length_on(
    cpu: DeviceProfile, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    tokenizer, lengths = counting(monkeypatch, tmp_path)
    write_input(run, [{"id": "short", "prompt": "a"}, {"id": "long", "prompt": "a" * 150_000}])

    class WithTokenizer(ScriptedGenerator):
        def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
            super().__init__(profile, run)
            self.tokenizer = tokenizer

    run_batch(cpu, run, lambda: WithTokenizer(cpu, run))
    assert lengths == [1]
    (error,) = [record["error"] for record in records(run) if "error" in record]
    assert "at most 2048 fit into max_model_len 512" in error


# A tokenizer that fails


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("no bos_token"), "line 2: question: no bos_token"),
        (
            ZeroDivisionError("division by zero"),
            "line 2: the prompt cannot be made: ZeroDivisionError: division by zero",
        ),
        (RecursionError(), "line 2: the prompt cannot be made: RecursionError: RecursionError()"),
        (MemoryError(), "line 2: the prompt cannot be made: MemoryError: MemoryError()"),
        (ValueError(), "line 2: ValueError()"),
    ],
)
def test_a_chat_template_that_fails_costs_its_line_and_no_other(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    write_input(run, [{"id": 1, "prompt": "a"}, {"id": 2, "question": "q"}, {"id": 3, "prompt": "b"}])
    chat: Callable[..., Any] = lambda *_: (_ for _ in ()).throw(error)  # noqa: E731
    monkeypatch.setattr(ScriptedTokenizer, "chat_text", chat)
    execute(cpu, run)
    assert {record["id"]: record.get("error") for record in records(run)} == {1: None, 2: reason, 3: None}


def test_chats_that_cannot_be_rendered_on_this_machine_end_the_run(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(run, [{"id": 1, "prompt": "a"}, {"id": 2, "question": "q"}, {"id": 3, "question": "r"}])
    error = EngineError("chat templates cannot be rendered (exit code 1): install transformers and jinja2 anew")
    chat: Callable[..., Any] = lambda *_: (_ for _ in ()).throw(error)  # noqa: E731
    monkeypatch.setattr(ScriptedTokenizer, "chat_text", chat)
    with pytest.raises(EngineError, match="cannot be rendered"):
        execute(cpu, run)
    assert [record["id"] for record in records(run)] == [1]
