"""The bench on the CPU: its sections, its files, its comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.bench import BenchOptions, compare, run_bench
from common.bench.timed import ScriptedEngine, TimedDecoding
from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.errors import ConfigError
from common.platforms import build_engine

GOLDEN = Path(__file__).parents[2] / "golden"
DECODE = DecodeConfig(num_lookahead=2, block_size=8, max_new_tokens=32, stop_at_eos=False)
OPTIONS = BenchOptions(cases=((1, 8), (2, 16)), mixes=((163, (8, 16)),), num_cached=40, num_steps=2, num_requests=1)


def run_of(model: str) -> RunConfig:
    return RunConfig(model=str(GOLDEN / model), decode=DECODE)


def test_a_run_measures_every_section_and_writes_its_files(cpu: DeviceProfile, tmp_path: Path) -> None:
    output = tmp_path / "out" / "bench.json"
    options = BenchOptions(**{**vars_of(OPTIONS), "output": str(output), "trace": str(tmp_path)})
    result = run_bench(cpu, run_of("model_b"), options)
    assert [(shape["rows"], shape["width"]) for shape in result["shapes"]] == [(1, 8), (2, 16)]
    assert all(shape["device_ms"] > 0 and shape["weight_floor_ms"] > 0 for shape in result["shapes"])
    assert json.loads(output.read_text())["floors"] == result["floors"]
    assert "accepted a step" in output.with_suffix(".md").read_text()
    assert "1.00x" in compare(output, output)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    num_passes = 10
    num_layers = load_model_config(GOLDEN / "model_b").num_layers
    attentions = [event for event in events if event.get("name") == "aten::scaled_dot_product_attention"]
    assert len(attentions) == num_passes * num_layers
    assert "aten::mm" in (tmp_path / "kernels.txt").read_text()


def test_scripted_steps_accept_the_number_asked_for(cpu: DeviceProfile) -> None:
    engine = build_engine(cpu, run_of("model_a"))
    decode = DECODE.model_copy(update={"num_lookahead": 0, "block_add_threshold": 0.01})
    mask_token_id = load_model_config(GOLDEN / "model_a").mask_token_id
    timed = TimedDecoding(ScriptedEngine(engine, 4), engine, decode, mask_token_id)
    completion = timed.decode((1, 2, 3))
    assert completion.num_canvas_tokens == 32
    assert 3 < completion.num_canvas_tokens / completion.num_forwards <= 5
    summary = timed.summary()
    assert summary["median_ms"]["step"] >= summary["median_ms"]["device"] > 0


@pytest.mark.parametrize(
    "content", ["{}", "[]", "5", '{"shapes": [1], "conditions": {}}', '{"shapes": [], "conditions": 1}']
)
def test_files_of_other_kinds_are_refused(tmp_path: Path, content: str) -> None:
    other = tmp_path / "other.json"
    other.write_text(content)
    with pytest.raises(ConfigError, match=r"not a result that scripts/bench\.sh"):
        compare(other, other)


def vars_of(options: BenchOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}
