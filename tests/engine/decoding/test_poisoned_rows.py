"""A request without numbers, on a model: it leaves nothing in memory that others read, and a run does not end by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.batch import run_batch
from common.config import DecodeConfig, DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.decoding import Completion, GenerationRequest
from common.errors import EngineError
from common.generate import Generator, build_generator
from tests.engine.poisoned import BAD, GOOD, MODEL, poison

PROFILE = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=320)
D2F = DecodeConfig(num_lookahead=1, block_size=16, max_new_tokens=16, skip_threshold=0.95)
DECODES = {
    "d2f": D2F,
    "d2f, prefixes": D2F.changed({"strategy": {"reuse_prefix": True}}),
    "dual cache": D2F.changed({"strategy": {"name": "fast_dllm", "cache": "dual"}}),
    "lopa_ascend": D2F.changed({"window_attention": "block_causal", "shift_row": "fresh"}),
    "rebuilt": D2F.changed({"strategy": {"name": "multi_block", "cache_delay": 1}, "fill_rule": "entropy"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poison(tmp_path_factory.mktemp("model"))


def built(model: Path, decode: DecodeConfig, num_slots: int) -> Generator:
    engine = "lopa_ascend" if decode.window_attention == "block_causal" else "lopa_cuda"
    profile = PROFILE.model_copy(update={"engine": engine})
    return build_generator(profile, RunConfig(model=str(model), decode=decode, max_num_requests=num_slots))


def requests(generator: Generator, texts: list[str]) -> Iterator[GenerationRequest]:
    return (GenerationRequest(str(n), tuple(generator.tokenizer.encode(text))) for n, text in enumerate(texts))


def tokens_of(generator: Generator, texts: list[str]) -> list[Any]:
    """Return each text's tokens, None where its request has failed."""
    found = dict.fromkeys(range(len(texts)))
    for result in generator.generate(requests(generator, texts)):
        if isinstance(result, Completion):
            found[int(result.id)] = result.token_ids
        else:
            assert result.finish_reason == "error" and "not finite" in result.reason
    return [found[place] for place in range(len(texts))]


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("name", DECODES)
def test_others_beside_and_after_it_get_their_tokens(model: Path, name: str, num_slots: int) -> None:
    texts = [GOOD.format(10), BAD, GOOD.format(11), BAD + GOOD.format(12), GOOD.format(13), GOOD.format(14)]
    with built(model, DECODES[name], num_slots) as generator:
        found = tokens_of(generator, texts)
    assert [tokens is None for tokens in found] == ["~" in text for text in texts]
    if not DECODES[name].strategy.reuses_prefix:  # whose tokens depend on who came before
        with built(MODEL, DECODES[name], 1) as generator:
            wanted = tokens_of(generator, [text for text in texts if "~" not in text])
        assert [tokens for tokens in found if tokens is not None] == wanted


def run_config(model: Path, folder: Path) -> RunConfig:
    return RunConfig(
        model=str(model), decode=D2F, max_num_requests=2,
        input=InputConfig(path=str(folder / "in.jsonl")), output=OutputConfig(path=str(folder / "out.jsonl")),
    )  # fmt: skip


def records(folder: Path) -> dict[int, dict[str, Any]]:
    return {record["id"]: record for record in map(json.loads, (folder / "out.jsonl").read_text().splitlines())}


def test_a_batch_run_has_an_error_record_and_goes_on_and_a_resume_has_nothing_left(model: Path, tmp_path: Path) -> None:
    texts = [GOOD.format(10), BAD, GOOD.format(11), BAD, GOOD.format(12)]
    lines = [json.dumps({"id": n, "prompt": text}) for n, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    run = run_config(model, tmp_path)

    def start(**options: Any) -> dict[str, Any]:
        metrics = run_batch(PROFILE, run, lambda: build_generator(PROFILE, run), **options)
        assert metrics is not None
        return metrics["requests"]  # type: ignore[no-any-return]

    first = start()
    assert (first["finished"], first["errors"]) == (3, 2)
    found = records(tmp_path)
    assert all(("error" in found[place]) == ("~" in text) for place, text in enumerate(texts))
    assert "not finite" in found[1]["error"]
    assert start() == first and records(tmp_path) == found
    assert start(retry_errors=True) == first


def test_weights_that_have_numbers_for_nobody_end_a_run_in_a_sentence(tmp_path: Path) -> None:
    with (
        built(poison(tmp_path, all_rows=True), D2F, 2) as generator,
        pytest.raises(EngineError, match="not even for a prompt of one token: its weights hold NaN"),
    ):
        list(generator.generate(requests(generator, [GOOD.format(n) for n in range(5)])))
