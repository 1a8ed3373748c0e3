"""Lines whose own text is scored, and records that say when each token was predicted, on a small random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from common.batch import run_batch
from common.config import DecodeConfig, DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.errors import ConfigError
from common.generate import build_generator

DECODE = DecodeConfig(num_lookahead=3, block_size=8, max_new_tokens=32, stop_at_eos=False)


def ran(
    profile: DeviceProfile, model: Path, folder: Path, lines: list[dict[str, Any]],
    source: dict[str, Any] | None = None, output: dict[str, Any] | None = None, **changes: Any,
) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:  # fmt: skip
    """Records by id, and the metrics."""
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunConfig.model_validate(
        {
            "model": str(model), "decode": DECODE, "input": {"path": str(folder / "in.jsonl"), **(source or {})},
            "output": {"path": str(folder / "o.jsonl"), **(output or {})}, "max_num_requests": 4, **changes,
        }
    )  # fmt: skip
    metrics = run_batch(profile, run, lambda: build_generator(profile, run))
    assert metrics is not None
    return {record["id"]: record for line in (folder / "o.jsonl").open() for record in [json.loads(line)]}, metrics


def test_a_given_text_has_a_likelihood_in_the_place_of_an_answer(
    cpu: DeviceProfile, model: Path, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "question", "target": "an answer"}, {"id": "b", "prompt": [5, 6, 7], "target": [8]},
        {"id": "none", "prompt": "question"}, {"id": "long", "prompt": "q" * 500, "target": "a" * 20},
        {"id": "mask", "prompt": "question", "target": [310]},
        {"custom_id": "file", "url": "/v1/completions", "body": {"prompt": "a"}},
    ]  # fmt: skip
    field = {"target_field": "target"}
    found, metrics = ran(cpu, model, tmp_path / "all", lines, field, num_maskings=16)
    assert found["a"]["loglikelihood"] < 0 < found["a"]["standard_error"]
    assert (found["a"]["target_tokens"], found["a"]["steps"], found["a"]["finish_reason"]) == (9, 16, "scored")
    assert (found["b"]["target_tokens"], found["b"]["steps"], found["b"]["standard_error"]) == (1, 1, 0)
    assert found["none"]["error"].startswith("line 3: target: write the text whose likelihood is wanted")
    assert "come to 520 positions, and 512 fit" in found["long"]["error"] and "mask token" in found["mask"]["error"]
    assert "has no texts to score" in found["file"]["error"]
    assert metrics["requests"]["finished"] == 2 and metrics["requests"]["errors"] == 4
    alone, _ = ran(cpu, model, tmp_path / "alone", lines[:1], field, num_maskings=16)
    assert alone["a"]["loglikelihood"] == pytest.approx(found["a"]["loglikelihood"], abs=1e-3)
    with pytest.raises(ConfigError, match="num_maskings"):
        ran(cpu, model, tmp_path / "alone", lines[:1], field, num_maskings=17)


@pytest.mark.parametrize("other", [{"benchmark": "gsm8k"}, {"settings_field": "decode"}])
def test_given_texts_are_not_decoded(other: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(other))} .*: remove (it, or )?target_field"):
        InputConfig.model_validate({"path": "x", "target_field": "target", **other})


def test_a_record_says_which_pass_predicted_each_token(cpu: DeviceProfile, model: Path, tmp_path: Path) -> None:
    lines = [{"id": n, "prompt": f"question {n}"} for n in range(3)]
    found, _ = ran(cpu, model, tmp_path / "steps", lines, output={"step_map": True})
    plain, _ = ran(cpu, model, tmp_path / "plain", lines)
    for id, record in found.items():
        assert record["text"] == plain[id]["text"] and "step_map" not in plain[id] and "token_ids" not in plain[id]
        assert len(record["step_map"]) == len(record["token_ids"]) == record["effective_tokens"] == 32
        assert min(record["step_map"]) == 1 and max(record["step_map"]) <= record["steps"]


def test_a_batch_file_of_openais_has_both(cpu: DeviceProfile, model: Path, tmp_path: Path) -> None:
    body = {"prompt": "question", "max_tokens": 16, "logprobs": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    from common.serving import openai_records

    folder = tmp_path / "openai"
    folder.mkdir()
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    run = RunConfig(
        model=str(model), decode=DECODE, input=InputConfig(path=str(folder / "in.jsonl")),
        output=OutputConfig(path=str(folder / "o.jsonl"), step_map=True),
    )  # fmt: skip
    run_batch(cpu, run, lambda: build_generator(cpu, run), openai=openai_records)
    (record,) = [json.loads(line) for line in (folder / "o.jsonl").open()]
    found = record["response"]["body"]["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["top_logprobs"]) == 16 == len(record["lopa"]["step_map"])
    assert all(logprob <= 0 for logprob in found["token_logprobs"])
