"""The object that users hold, used as they might: twice at once, given up, with settings that do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import GenerationRequest
from common.errors import ConfigError, EngineError
from common.generate import Generator, build_generator

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "demo"
DECODE = DecodeConfig(num_lookahead=1, block_size=16, max_new_tokens=64, skip_threshold=0.95)
QUESTION = "Tom has 12 apples and buys 5 more. How many apples does he have now?\n"

pytestmark = pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="models/demo holds no checkpoint")


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=320)
    with build_generator(profile, RunConfig(model=str(MODEL), decode=DECODE)) as built:
        yield built


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(str(n), (5, 6, 7 + n)) for n in range(count)]


def test_random_weights_need_a_config_and_another_folders_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=320)
    decode = DECODE.model_copy(update={"max_new_tokens": 16})
    run = RunConfig(model=str(tmp_path), load_format="dummy", decode=decode)
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor vocab\.json with merges\.txt found"):
        build_generator(profile, run)
    with build_generator(profile, run.model_copy(update={"tokenizer": str(MODEL)})) as built:
        (text,) = built.complete(QUESTION)
        assert isinstance(text, str)


def test_a_second_generate_in_the_middle_of_the_first_is_refused_and_the_first_goes_on(generator: Generator) -> None:
    alone = [result.token_ids for result in generator.generate(requests(2))]
    first = generator.generate(requests(2))
    tokens = [next(first).token_ids]
    for second in (generator, generator.with_decode(DECODE)):
        with pytest.raises(EngineError, match="decoding already: finish or close the first"):
            second.complete(QUESTION)
    tokens += [result.token_ids for result in first]
    assert tokens == alone


def test_a_generate_that_was_given_up_or_failed_leaves_the_engine_free(generator: Generator) -> None:
    wanted = generator.complete(QUESTION)
    for _ in generator.generate(requests(3)):
        break
    assert generator.complete(QUESTION) == wanted

    def broken() -> Iterator[GenerationRequest]:
        yield requests(1)[0]
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(generator.generate(broken()))
    assert generator.complete(QUESTION) == wanted


def test_steps_driven_from_outside_give_what_generate_gives(generator: Generator) -> None:
    wanted = {result.id: result.token_ids for result in generator.generate(requests(3))}
    told: dict[str, tuple[int, ...]] = {}
    with generator.decoding() as core:
        for one in requests(3):
            core.add_request(one)
        with pytest.raises(EngineError, match="decoding already"):
            generator.complete(QUESTION)
        while core.has_work:
            for output in core.step():
                told[output.id] = told.get(output.id, ()) + output.token_ids
    assert told == wanted
    with generator.decoding() as core:
        core.add_request(requests(1)[0])
        core.step()
    assert {result.id: result.token_ids for result in generator.generate(requests(3))} == wanted


def test_steps_after_the_end_of_a_decoding_are_refused_and_harm_no_other(generator: Generator) -> None:
    wanted = [result.token_ids for result in generator.generate(requests(2))]
    with generator.decoding() as old:
        old.add_request(requests(1)[0])
        old.step()
    going = generator.generate(requests(2))
    tokens = [next(going).token_ids]
    for late in (old.step, lambda: old.add_request(requests(1)[0])):
        with pytest.raises(EngineError, match="this decoding is over"):
            late()
    assert [*tokens, *(result.token_ids for result in going)] == wanted


def test_a_closed_generator_decodes_no_more() -> None:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=320)
    built = build_generator(profile, RunConfig(model=str(MODEL), decode=DECODE))
    other = built.with_decode(DECODE)
    built.close()
    for closed in (built, other):
        with pytest.raises(EngineError, match="this generator is closed: build another one"):
            closed.complete(QUESTION)


@pytest.mark.slow
def test_complete_takes_ids_conversations_and_wishes(generator: Generator) -> None:
    ids = generator.tokenizer.encode(QUESTION)
    (whole,) = generator.generate([GenerationRequest("a", tuple(ids))])
    cut = generator.tokenizer.decode(whole.token_ids[:9])
    assert generator.complete(QUESTION, ids, max_tokens=9) == [cut, cut]
    talk = [{"role": "user", "content": QUESTION}]
    assert generator.complete(talk) == generator.complete(
        generator.tokenizer.encode(generator.tokenizer.chat_text(talk))
    )
    with pytest.raises(ValueError, match="num_lookahaed: unknown key; did you mean num_lookahead"):
        generator.complete(QUESTION, num_lookahaed=1)


def test_complete_takes_texts_and_leaves_the_stop_string_out(generator: Generator) -> None:
    with pytest.raises(ValueError, match="prompt 0: write a text, a list of messages, or a list of token ids"):
        generator.complete([QUESTION])  # type: ignore[arg-type]
    (whole,) = generator.complete(QUESTION)
    stop = whole[len(whole) // 2 :][:3]
    (cut,) = generator.with_decode(DECODE.model_copy(update={"stop": (stop,)})).complete(QUESTION)
    assert cut == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mask_token_id": 99999}, "mask_token_id 99999 is no token"),
        ({"mask_token_id": 0, "eos_token_id": 0}, "are both 0"),
        ({"max_new_tokens": 4096}, "leaves no room for a prompt"),
    ],
)
def test_other_settings_are_checked_as_the_first_were(
    generator: Generator, changes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        generator.with_decode(DECODE.model_copy(update=changes))


def test_a_mask_set_by_the_run_is_plain_text_to_the_tokenizer(generator: Generator) -> None:
    some_token = max(generator.tokenizer.encode("(seq"))
    text = generator.tokenizer.decode([some_token])
    assert len(text) > 1
    other = generator.with_decode(DECODE.model_copy(update={"mask_token_id": some_token}))
    assert some_token not in other.tokenizer.encode(text + " apples")
    assert other.tokenizer.decode(other.tokenizer.encode(text)) == text


@pytest.mark.slow
def test_the_python_api_applies_the_profiles_environment() -> None:
    code = (
        "import os, torch\n"
        "from common.processes import apply_environment\n"
        "torch.set_num_threads(2)\n"
        "apply_environment({'OMP_NUM_THREADS': '1', 'LOPA_SOME': 'x', 'LOPA_OWN': 'profile', 'KMP_BLOCKTIME': '0'})\n"
        "print(torch.get_num_threads(), os.environ['LOPA_SOME'], os.environ['LOPA_OWN'])\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "KMP_BLOCKTIME")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, "PYTHONPATH": str(ROOT), "LOPA_OWN": "user"},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "x", "user"]
    assert "KMP_BLOCKTIME: set them before torch is imported" in done.stderr
    assert "LOPA_SOME" not in done.stderr
