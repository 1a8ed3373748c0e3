"""Numbers of config.json that no model can have are refused by file and key, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import bounded
from test_weights import CONFIG_JSON, load, write_config

from common.checkpoint import load_model_config, sanity
from common.errors import ConfigError, EngineError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("rope_theta", [0, 0.5, -1, INF, NAN, 1e13, 10**400, True, "1", [1]], r"expected a number in 1\.\.1e\+12"),
        ("rms_norm_eps", [0, -1e-6, 1.5, INF, NAN, 10**400, True, "1e-6", {}], r"expected a number in 1e-45\.\.1"),
        (
            "vocab_size",
            [0, -1, 2**24 + 1, 10**9, 10**40, 51.0, True, "51"],
            r"an integer of at least 1 and at most 16777",
        ),
        ("num_hidden_layers", [0, 1001, 2**31, NAN], "an integer of at least 1 and at most 1000,"),
        ("num_attention_heads", [0, 2**16 + 1, 1e400], "an integer of at least 1 and at most 65536"),
        ("num_key_value_heads", [0, 2**31], "an integer of at least 1 and at most 65536"),
        ("hidden_size", [0, 2**31 + 1, False], "an integer of at least 1 and at most 2147483648"),
        ("intermediate_size", [-(10**30), 2**40], "an integer of at least 1"),
        ("max_position_embeddings", [0, 2**31 + 1], "an integer of at least 1"),
        ("head_dim", [0, 2**31 + 2, True], "an integer of at least 1"),
        ("head_dim", [3], "heads of odd size 3"),
        ("mask_token_id", [-1, 1.5, True, 10**40], "an integer of at least 0"),
        ("mask_token_id", [51], "51 is not an id of the 51"),
        ("mask_token_id", [48], "48 is the end token too"),
        ("eos_token_id", [True, -1, 51, "48", [True], [{}]], "is not an id of the 51"),
        ("tie_word_embeddings", ["false", 0, 1], "expected true or false"),
        ("model_type", ["x\n" * 10**5, [[]]], "is not a supported family"),
        ("hidden_act", ["x\n" * 10**5, 5], "is not implemented"),
        ("rope_scaling", ["default\n" * 10**4, {"type": ["yarn"] * 10**4}, 5], "is not implemented"),
        ("rope_parameters", [{"rope_theta": INF}, {"rope_theta": True}], r"expected a number in 1\.\.1e\+12"),
    ],
)
def test_nonsense_is_refused_by_key(tmp_path: Path, key: str, values: list[Any], message: str) -> None:
    for value in values:
        changes = {"architectures": [], key: value} if key == "model_type" else {key: value}
        with pytest.raises(ConfigError, match=rf"config\.json: {key}[a-z_.]*: .*{message}") as caught:
            write_config(tmp_path, **changes)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500, value


def test_the_mask_is_no_end_token(tmp_path: Path) -> None:
    for eos in (50, [50, 48]):
        with pytest.raises(ConfigError, match=r"config\.json: mask_token_id: 50 is the end token too"):
            write_config(tmp_path, eos_token_id=eos)


def test_an_end_token_is_refused_by_the_file_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 51}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id: 51 is not an id"):
        write_config(tmp_path, eos_token_id=...)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 50}')
    with pytest.raises(ConfigError, match=r"config\.json: mask_token_id: 50 is the end token too"):
        write_config(tmp_path, eos_token_id=...)


def test_rope_that_says_no_more_than_default_is_read(tmp_path: Path) -> None:
    assert write_config(tmp_path, rope_scaling="default").rope_theta == 1e4
    assert write_config(tmp_path, rope_parameters={"rope_theta": None}).rope_theta == 1e4


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 2**24, "hidden_size": 2**20},
        {"hidden_size": 2**31, "head_dim": 2**30},
        {"intermediate_size": 2**31, "num_hidden_layers": 1000},
    ],
)
def test_made_up_weights_larger_than_the_machine_end_in_a_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = write_config(tmp_path, **changes)
    with bounded(), pytest.raises(EngineError, match=r"the weights need .* GiB and this machine has") as caught:
        load(tmp_path, config, load_format="dummy")
    assert "\n" not in str(caught.value)


def test_memory_that_is_promised_and_not_there_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanity, "_memory", lambda: None)  # as where the system does not say
    config = write_config(tmp_path, vocab_size=2**24, hidden_size=2**20)
    with bounded(), pytest.raises(EngineError, match=r"embed_tokens.weight: no memory for this weight .*: free what"):
        load(tmp_path, config, load_format="dummy", dtype=torch.bfloat16)


def test_files_are_compared_with_the_config_before_memory_is(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    config = write_config(tmp_path, vocab_size=2**24, hidden_size=2**20)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight: shape \[2, 2\], but config\.json says"):
        load(tmp_path, config)


def test_the_shipped_and_the_usual_numbers_are_read(tmp_path: Path) -> None:
    usual = {"rope_theta": 1_000_000, "rms_norm_eps": 1e-5, "vocab_size": 152_064, "num_hidden_layers": 28}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG_JSON, **usual}))
    assert load_model_config(tmp_path).rope_theta == 1e6
