"""What lm-eval asks of a model, answered by a generator; lm-eval itself is played by a few lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from scripted import ScriptedGenerator

from common.config import DecodeConfig, DeviceProfile, InputConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Likelihood, Rejection
from common.errors import ConfigError
from common.evaluation import drive
from common.evaluation.harness import settings_of
from common.evaluation.harness_model import HarnessModel

RUN = RunConfig(
    model="folder",
    decode=DecodeConfig(max_new_tokens=96, stop=("</s>",)),
    input=InputConfig(path="x", add_bos_token=True),
)


class Request(NamedTuple):
    args: tuple[str, dict[str, Any]]


class Backwards(ScriptedGenerator):
    """Answers come in the order in which they end."""

    asked: list[GenerationRequest]

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
        self.asked = list(requests)
        yield from super().generate(reversed(self.asked))


@pytest.fixture
def generator(cpu: DeviceProfile) -> Backwards:
    return Backwards(cpu, RUN)


@pytest.fixture
def model(generator: Backwards) -> HarnessModel:
    return HarnessModel(generator)  # type: ignore[arg-type]


def decode_of(model: HarnessModel, asked: dict[str, Any]) -> DecodeConfig:
    return model._decode_of(model.wishes_of(asked))


def ask(*texts: str, **asked: Any) -> list[Request]:
    return [Request((text, asked)) for text in texts]


def test_answers_come_back_in_the_order_of_the_requests(model: HarnessModel, generator: Backwards) -> None:
    assert model.generate_until(ask("a", "b", "c"), disable_tqdm=True) == ["A", "B", "C"]
    assert all(request.prompt[0] == 1 for request in generator.asked)  # the run's add_bos_token


def test_an_answer_ends_at_the_tasks_stop_string_or_the_runs(model: HarnessModel) -> None:
    assert model.generate_until(ask("one question: two", until=["QUESTION:"]), disable_tqdm=True) == ["ONE "]
    assert decode_of(model, {"until": "x"}).stop == ("x", "</s>")
    assert decode_of(model, {"until": ["x", "", "</s>"]}).stop == ("x", "</s>")
    assert decode_of(model, {}).stop == ("</s>",)


@pytest.mark.parametrize(
    ("asked", "most", "canvas"),
    [
        ({}, None, 96), ({"max_gen_toks": 1024}, 96, 96), ({"max_gen_toks": 40}, 40, 64),
        ({"max_gen_toks": 90}, 90, 96), ({"max_tokens": 8}, 8, 32),
    ],
)  # fmt: skip
def test_a_task_may_ask_for_fewer_tokens_and_its_canvas_has_whole_blocks(
    model: HarnessModel, generator: Backwards, asked: dict[str, Any], most: int | None, canvas: int
) -> None:
    model.generate_until(ask("a", **asked), disable_tqdm=True)
    assert generator.asked[0].max_tokens == most
    assert decode_of(model, asked).max_new_tokens == canvas


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (0.5, 0.9, None)),
        ({"do_sample": False, "temperature": 0.7}, (0.0, 1.0, None)),
        ({"temperature": 0.0}, (0.0, 1.0, None)),
        ({"do_sample": True, "temperature": 1e-40, "top_p": 0.8}, (0.0, 1.0, None)),
        ({"do_sample": True}, (1.0, 1.0, None)),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 5}, (0.7, 0.8, 5)),
    ],
)
def test_sampling_is_the_tasks_where_it_says_so(
    cpu: DeviceProfile, asked: dict[str, Any], expected: tuple[float, float, int | None]
) -> None:
    run = RUN.model_copy(update={"decode": DecodeConfig(temperature=0.5, top_p=0.9)})
    decode = decode_of(HarnessModel(ScriptedGenerator(cpu, run)), asked)  # type: ignore[arg-type]
    assert (decode.temperature, decode.top_p, decode.top_k) == expected


def test_what_a_task_asks_for_is_checked(model: HarnessModel) -> None:
    with pytest.raises(ConfigError, match=r"generation_kwargs of the task: top_p: .*; change --gen_kwargs"):
        model.generate_until(ask("a", do_sample=True, top_p=3), disable_tqdm=True)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"until": 5}, "until: write a text or a list of texts"),
        ({"until": ["a", 5]}, "until: write a text or a list of texts"),
        ({"max_gen_toks": "abc"}, "max_gen_toks: write a whole number"),
        ({"max_tokens": True}, "max_tokens: write a whole number"),
    ],
)
def test_a_value_of_another_type_is_told(model: HarnessModel, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^generation_kwargs of the task: {problem} .*; change --gen_kwargs"):
        model.wishes_of(asked)


def test_a_seed_is_passed_on_and_what_has_no_meaning_is_told_once(
    model: HarnessModel, caplog: pytest.LogCaptureFixture
) -> None:
    assert model.wishes_of({"seed": 7}).seed == 7
    for _ in range(2):
        model.wishes_of({"repetition_penalty": 1.5, "a_new_one": 1, "top_k": 3})
    model.wishes_of({"do_sample": True, "top_k": 3})
    assert [record.getMessage() for record in caplog.records] == [
        "generation_kwargs without a meaning here, left out: a_new_one, repetition_penalty, top_k"
    ]


def test_prompts_that_do_not_fit_have_no_text(model: HarnessModel, caplog: pytest.LogCaptureFixture) -> None:
    assert model.generate_until(ask("a", "b" * 500), disable_tqdm=True) == ["A", ""]
    assert "1 of 2 requests have no text (the prompt has 501 tokens" in caplog.text
    with pytest.raises(ConfigError, match="none of 1 requests could be decoded"):
        model.generate_until(ask("b" * 500), disable_tqdm=True)


def test_whole_documents_have_no_likelihood(model: HarnessModel) -> None:
    with pytest.raises(ConfigError, match="is not estimated: take tasks whose output_type is multiple_choice"):
        model.loglikelihood_rolling([])


class Scoring(Backwards):
    """A likelihood is the number of tokens of the prompt, and of the text as decimals."""

    scored: list[tuple[list[int], list[int]]]

    @property
    def scorer(self) -> Any:
        def why_not(prompt: list[int], text: list[int]) -> str | None:
            return f"{len(text)} tokens are too many" if len(text) > 9 else None

        return SimpleNamespace(longest_prompt=lambda length: 10 - length, why_not=why_not)

    def likelihoods(self, texts: Iterable[tuple[list[int], list[int]]]) -> Iterator[Likelihood]:
        self.scored = list(texts)
        return (Likelihood(len(prompt) + len(text) / 100, 0.1, 1) for prompt, text in self.scored)


def test_continuations_are_scored_after_their_contexts(cpu: DeviceProfile, caplog: pytest.LogCaptureFixture) -> None:
    generator = Scoring(cpu, RUN)
    model = HarnessModel(generator)  # type: ignore[arg-type]
    asked = [Request(("ab ", "cd")), Request(("a" * 20, "xyz"))]  # type: ignore[arg-type]
    assert model.loglikelihood(asked, disable_tqdm=True) == [(3.03, False), (7.03, False)]
    (first, second), _ = generator.scored
    assert first == [1, ord("a"), ord("b")] and second == [ord(" "), ord("c"), ord("d")], "the space goes along"
    assert "1 of 2 contexts are too long for the model: their beginnings are cut" in caplog.text
    with pytest.raises(ConfigError, match="the continuation 'bbbbbbbbbb' cannot be scored: 10 tokens are too many"):
        model.loglikelihood([Request(("a", "b" * 10))], disable_tqdm=True)  # type: ignore[arg-type]


def test_model_args_name_a_run_a_profile_and_settings() -> None:
    arguments = {"run": "demo", "profile": "cpu", "decode.num_lookahead": 7, "stop_at_eos": True, "batch_size": 1}
    assert settings_of(arguments) == ("cpu", "demo", ["decode.num_lookahead=7", "stop_at_eos=true"])
    assert settings_of({"run": "demo", "device": None}) == (None, "demo", [])
    with pytest.raises(ConfigError, match="--model_args has no run: write --model_args run=MODEL"):
        settings_of({"profile": "cpu"})


def test_without_lm_eval_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"install it with pip install 'lopa\[eval\]'"):
        drive([], lambda *_: None)  # type: ignore[arg-type, return-value]


def test_lm_eval_finds_the_model_by_its_name(monkeypatch: pytest.MonkeyPatch, generator: Backwards) -> None:
    models: dict[str, Any] = {}
    texts: list[str] = []

    class LM:
        def __init__(self) -> None:
            self.cache_hook = None

    def cli_evaluate() -> None:
        assert sys.argv == ["lm_eval", "--model", "lopa"]
        model = models["lopa"](run="demo", profile="cpu", max_num_requests=4, batch_size=1, device=None)
        assert isinstance(model, LM)
        texts.extend(model.generate_until(ask("a"), disable_tqdm=True))

        for given in ({"run": "demo", "device": "cuda"}, {"run": "demo", "batch_size": 4}):
            with pytest.raises(ConfigError, match=r"^--model_args (device|batch_size): the profile says what runs"):
                models["lopa"].create_from_arg_obj(given, {"batch_size": 1, "device": None})
        assert isinstance(models["lopa"].create_from_arg_obj({"run": "demo"}, {"batch_size": 1}), LM)

    contents = {
        "lm_eval": {},
        "lm_eval.__main__": {"cli_evaluate": cli_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda model: models.update({name: model})},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "argv", ["lopa"])
    built: list[Any] = []
    drive(["--model", "lopa"], lambda *given: built.append(given) or generator)  # type: ignore[arg-type, func-returns-value, return-value]
    assert texts == ["A"] and built == [("cpu", "demo", ["max_num_requests=4"]), (None, "demo", [])]


@pytest.mark.parametrize(
    ("module", "name", "sentence"),
    [
        ("datasets.exceptions", "DatasetsError", "lm-eval: the task's data: a line is cut (not whole); correct it"),
        ("jinja2", "TemplateError", "lm-eval: a template of the task: a line is cut; correct it"),
    ],
)
def test_broken_data_and_templates_of_a_task_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, sentence: str
) -> None:
    kind = type(name, (Exception,), {})

    def cli_evaluate() -> None:
        raise kind("a line is cut") from OSError("not whole")

    contents = {"lm_eval": {}, "lm_eval.__main__": {"cli_evaluate": cli_evaluate}, module: {name: kind}}
    for known, content in contents.items():
        made = ModuleType(known)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, known, made)
    monkeypatch.setattr("common.evaluation.harness.register", lambda build: None)
    monkeypatch.setattr(sys, "argv", ["lopa"])
    with pytest.raises(ConfigError, match=rf"^{re.escape(sentence)}$"):
        drive([], lambda *_: None)  # type: ignore[arg-type, return-value]


def test_stop_strings_that_would_cut_answers_of_a_chat_are_told(
    cpu: DeviceProfile, caplog: pytest.LogCaptureFixture
) -> None:
    model = HarnessModel(Backwards(cpu, RunConfig(model="folder")))  # type: ignore[arg-type]
    model._has_conversations = True  # as after apply_chat_template
    model.generate_until(ask("a", until=[]), disable_tqdm=True)
    assert not caplog.records
    model.generate_until(ask("a", until=["\ndef"]), disable_tqdm=True)
    assert "'\\ndef'; pass --gen_kwargs 'until=[]'" in caplog.text
