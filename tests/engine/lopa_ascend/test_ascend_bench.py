"""The bench measures the Ascend engine: what the first run on a device will print."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.bench import BenchOptions, run_bench
from common.checkpoint import load_model_config
from common.commands.bench.steps import parse
from common.config import DecodeConfig, DeviceProfile, RunConfig, find_config
from common.config.files import load_run
from tests.conftest import GOLDEN

ROOT = Path(__file__).parents[3]
DECODE = DecodeConfig(
    num_lookahead=2, block_size=8, max_new_tokens=32, stop_at_eos=False, window_attention="block_causal"
)
OPTIONS = BenchOptions(cases=((1, 8), (2, 16)), mixes=((163, (8, 16)),), num_cached=40, num_steps=2, num_requests=1)


@pytest.mark.slow
def test_every_section_is_measured(tmp_path: Path) -> None:
    profile = DeviceProfile.model_validate(
        {"name": "t", "engine": "lopa_ascend", "device": "cpu", "quantization": "w8a8", "max_model_len": 256}
    )
    options = BenchOptions(
        **{**{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}, "output": str(tmp_path / "b.json")}
    )
    result = run_bench(profile, RunConfig(model=str(GOLDEN / "model_b"), decode=DECODE, max_num_requests=2), options)
    assert all(shape["device_ms"] > 0 for shape in result["shapes"])
    assert result["floors"]["int8_ops_per_s"] > 0
    assert result["conditions"]["engine"] == "lopa_ascend"
    assert "rows/rank" in (tmp_path / "b.md").read_text()


@pytest.mark.slow
def test_mixes_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    profile = DeviceProfile(name="t", engine="lopa_ascend", device="cpu", max_model_len=256)
    options = replace(OPTIONS, mixes=())
    run_bench(profile, RunConfig(model=str(GOLDEN / "model_b"), decode=DECODE, max_num_requests=2), options)
    printed = capsys.readouterr().out
    assert "mean window |" not in printed and "accepted a step" in printed
    given = parse(["-p", "p", "r", "--no-mixes", "--requests", "2"])
    assert given.no_mixes and given.requests == 2


def test_the_first_runs_model_has_dream_7bs_shapes() -> None:
    run = load_run(find_config("runs", "first_910c"), [])
    config = load_model_config(ROOT / run.model)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.head_size) == (28, 3584, 28, 128)
    assert run.load_format == "dummy" and run.decode.window_attention == "block_causal"
