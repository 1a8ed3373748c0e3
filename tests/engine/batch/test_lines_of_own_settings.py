"""Lines with settings of their own, decoded beside others by the engine on a small random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.batch import run_batch
from common.config import DecodeConfig, DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.generate import build_generator

DECODE = DecodeConfig(num_lookahead=3, block_size=8, max_new_tokens=32, stop_at_eos=False)
OWN: list[dict[str, Any]] = [
    {"num_lookahead": 0},
    {"num_lookahead": 7, "max_new_tokens": 64},
    {"temperature": 0.7, "top_p": 0.9},
    {"block_size": 16, "skip_threshold": 0.02, "block_add_threshold": 0.5, "decoded_token_threshold": 0.6},
    {"strategy": {"name": "fast_dllm", "cache": "dual"}},
    {"shift_row": "fresh", "stop": ["<"]},
]


def decoded(
    profile: DeviceProfile, model: Path, folder: Path, lines: list[dict[str, Any]], **changes: Any
) -> dict[str | int, dict[str, Any]]:
    """Records by id, without times."""
    folder.mkdir()
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = InputConfig(path=str(folder / "in.jsonl"), settings_field="decode")
    output = OutputConfig(path=str(folder / "o.jsonl"))
    run = RunConfig(**{"model": str(model), "decode": DECODE, "input": source, "output": output, **changes})
    run_batch(profile, run, lambda: build_generator(profile, run))
    records = [json.loads(line) for line in (folder / "o.jsonl").read_text().splitlines()]
    return {record["id"]: {key: value for key, value in record.items() if not _is_time(key)} for record in records}


def _is_time(key: str) -> bool:
    return "seconds" in key or key.startswith("tps")


@pytest.mark.parametrize("num_at_once", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_line_gets_what_a_run_of_its_settings_gives_it(
    cpu: DeviceProfile, model: Path, tmp_path: Path, num_at_once: int
) -> None:
    lines: list[dict[str, Any]] = [{"id": f"plain {number}", "prompt": f"question {number}"} for number in range(2)]
    lines += [
        {"id": f"own {number}", "prompt": "question 0", "decode": own, "seed": 3 + number}
        for number, own in enumerate(OWN)
    ]
    found = decoded(cpu, model, tmp_path / "mixed", lines, max_num_requests=num_at_once)
    assert not any("error" in record for record in found.values())
    assert len({record["text"] for record in found.values()}) > len(OWN) // 2
    plain = decoded(cpu, model, tmp_path / "plain", lines[:2])
    assert {name: found[name] for name in plain} == plain
    for number, own in enumerate(OWN):
        alone = {key: value for key, value in lines[2 + number].items() if key in ("id", "prompt")}
        settings = {"decode": DECODE.changed(own), "seed": 3 + number}
        expected = decoded(cpu, model, tmp_path / str(number), [alone], **settings)
        assert {f"own {number}": found[f"own {number}"]} == expected


def test_what_the_engine_cannot_do_beside_the_run_is_the_lines_error(
    cpu: DeviceProfile, model: Path, tmp_path: Path
) -> None:
    from_zero = {"strategy": "block_diffusion", "window_attention": "block_causal"}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"max_new_tokens": 512}, "line 1: decode.max_new_tokens 512 leaves no room for a prompt: the model has"),
        ({"max_new_tokens": 504}, "the prompt has 10 tokens, 8 fit beside max_new_tokens 504"),
        ({"window_attention": "block_causal"}, "its window_attention block_causal cannot share a pass with the run's"),
        ({"eos_token_id": 5000}, "line 4: decode.eos_token_id 5000 is no token: the model's vocabulary has 320"),
        (from_zero, "line 5: decode.strategy block_diffusion: the model's blocks (dream) are counted from the prompt"),
        ({"mask_token_id": 311}, "its mask_token_id 311 cannot share a pass with the run's None"),
        ({"strategy": {"reuse_prefix": 2}}, "line 7: decode.strategy.reuse_prefix: set it to true or false"),
        (
            {"temperature_acts_on": "draw_and_confidence"},
            "its temperature_acts_on draw_and_confidence cannot share a pass with the run's draw",
        ),
        ({"num_lookahead": 2**31}, "line 9: decode.num_lookahead: set it to 1000 or less (given 2147483648)"),
    ]
    lines: list[dict[str, Any]] = [{"prompt": f"question {n}", "decode": own} for n, (own, _) in enumerate(bad)]
    found = decoded(cpu, model, tmp_path / "run", [*lines, {"id": "good", "prompt": "question 9"}])
    assert "text" in found["good"]
    for (_, sentence), record in zip(bad, (found[number] for number in range(1, len(bad) + 1)), strict=True):
        assert record["error"].startswith(sentence)
