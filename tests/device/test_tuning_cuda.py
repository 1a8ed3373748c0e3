"""`lopa tune` on a GPU: a small model's linears are measured, what is kept is right, and the next start takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from lopa_cuda.assemble import assemble
from lopa_cuda.tiles import Kind, LinearShape, ModelLinear, model_linears, read_tiles, this_device
from lopa_cuda.tuning.candidates import candidates

pytestmark = pytest.mark.cuda
if torch.cuda.is_available():
    pytest.importorskip("triton", reason="the kernels need Triton")
    from lopa_cuda.tuning.pair import LayerSizes, LinearPair

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "Dream", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 2048, "mask_token_id": 2000, "eos_token_id": 2001, "pad_token_id": 2001,
    "tie_word_embeddings": False,
}  # fmt: skip
SIZES = (512, 4, 2, 128, 128)  # of that model's layers


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    decode = DecodeConfig(num_lookahead=1, block_size=16, max_new_tokens=32)
    return RunConfig(model=str(tmp_path / "model"), load_format="dummy", decode=decode)


def lopa_tune(tmp_path: Path, *arguments: str) -> list[str]:
    (tmp_path / "run.yaml").write_text(f"model: {tmp_path / 'model'}\nload_format: dummy\n")
    command = [
        sys.executable,
        "-m",
        "common.commands",
        "tune",
        "-p",
        "h200_tp1_bp1",
        str(tmp_path / "run.yaml"),
        *arguments,
    ]
    environment = {**os.environ, "LOPA_TILES": str(tmp_path / "tiles")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_tuned_model_starts_with_its_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, run: RunConfig
) -> None:
    lines = lopa_tune(tmp_path, "--tokens", "64")
    path = tmp_path / "tiles" / this_device().file_name
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cuda", max_model_len=1024)
    linears = model_linears(profile, run, load_model_config(run.model), 1)
    assert sum("64 tokens: " in line for line in lines) == len(linears) == 5
    assert not any("no tile" in line for line in lines)
    file = read_tiles(path)
    assert file.device == this_device().name and file.entries.keys() == {linear.shape for linear in linears}
    assert all([most for most, _ in entry.tiles] == [64] for entry in file.entries.values())
    again = lopa_tune(tmp_path, "--tokens", "64")
    assert sum(line.endswith(f"already in {path}") for line in again) == 5
    monkeypatch.setenv("LOPA_TILES", str(tmp_path / "tiles"))
    with caplog.at_level("INFO", "lopa_cuda"):
        engine = assemble(profile, run)
    try:
        assert str(path) in engine.describe()["tiles"]
        assert not any("for want of an entry" in message for message in caplog.messages)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("fusion", ["none", "swiglu"])
@pytest.mark.parametrize("num_tokens", [16, 192])
def test_proposed_tiles_compute_what_the_library_does(kind: Kind, fusion: str, num_tokens: int) -> None:
    shape = LinearShape(kind, 3072, 512, "swiglu") if fusion == "swiglu" else LinearShape(kind, 1024, 512, "none")
    pair = LinearPair(ModelLinear("gate_up" if fusion == "swiglu" else "qkv", shape), LayerSizes(*SIZES))
    first, second, *_ = candidates(shape, num_tokens, torch.cuda.get_device_properties().multi_processor_count)
    for tile in (first, second):
        assert pair.is_right(num_tokens, tile)
        assert 0 < pair.us(num_tokens, tile, replays=3) < 1000
    assert 0 < pair.us(num_tokens, None, replays=3) < 1000
