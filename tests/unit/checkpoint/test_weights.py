"""Checkpoint folders made up on the spot: what a rank gets, and what a broken folder says."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import bounded
from safetensors.torch import save_file

from common.checkpoint import ModelConfig, load_model_config, load_weights, shard_bounds
from common.checkpoint.rules import checkpoint_shapes, rules_of
from common.checkpoint.sources import DummySource
from common.errors import ConfigError

CONFIG_JSON: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "hidden_act": "silu",
    "vocab_size": 51,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mask_token_id": 50,
    "eos_token_id": 48,
    "pad_token_id": 48,
}
ROW_SPLIT = ("qkv_proj.weight", "qkv_proj.bias", "gate_up_proj.weight")


def write_config(folder: Path, **changes: Any) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    tree = {key: value for key, value in {**CONFIG_JSON, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(tree))
    return load_model_config(folder)


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = checkpoint_shapes(config)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 3) -> None:
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return write_config(tmp_path)


def load(
    folder: Path, config: ModelConfig, tp_rank: int = 0, tp_size: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    return load_weights(folder, config, tp_rank=tp_rank, tp_size=tp_size, **{"dtype": torch.float32, **options})


def test_whole_model_is_the_checkpoint_with_qkv_and_gate_up_stacked(tmp_path: Path, config: ModelConfig) -> None:
    tensors = random_tensors(config)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, config)
    layer = "model.layers.1."
    qkv = [tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(weights["layers.1.qkv_proj.weight"], torch.cat(qkv))
    assert torch.equal(weights["layers.1.gate_up_proj.weight"], torch.cat(gate_up))
    assert torch.equal(weights["layers.1.down_proj.weight"], tensors[f"{layer}mlp.down_proj.weight"])
    assert torch.equal(weights["lm_head.weight"], tensors["lm_head.weight"])
    assert set(weights) == {rule.name for rule in rules_of(config)}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_slices_of_all_ranks_make_up_the_whole(tmp_path: Path, config: ModelConfig, load_format: str) -> None:
    save_sharded(tmp_path, random_tensors(config))
    whole = load(tmp_path, config, load_format=load_format)
    ranks = [load(tmp_path, config, rank, 2, load_format=load_format) for rank in range(2)]
    for name, full in whole.items():
        shares = [rank[name] for rank in ranks]
        assert torch.equal(full, _reassembled(name, shares, config)), name


def _reassembled(name: str, shares: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    if name.endswith(ROW_SPLIT):
        query, kv = config.num_heads * config.head_size // 2, config.num_kv_heads * config.head_size // 2
        sizes = [query, kv, kv] if "qkv" in name else [config.intermediate_size // 2] * 2
        stacked = zip(*(share.split(sizes) for share in shares), strict=True)
        return torch.cat([torch.cat(pair) for pair in stacked])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.cat(shares, dim=1)
    if name == "lm_head.weight":
        return torch.cat(shares)
    assert torch.equal(shares[0], shares[1])
    return shares[0]


@pytest.mark.parametrize(("size", "tp_size"), [(51, 2), (9, 4), (152064, 4), (1, 3)])
def test_shards_tile_the_dimension(size: int, tp_size: int) -> None:
    bounds = [shard_bounds(size, rank, tp_size) for rank in range(tp_size)]
    assert bounds[0][0] == 0 and bounds[-1][1] == size
    assert all(left[1] == right[0] for left, right in pairwise(bounds))


def test_a_rank_may_have_no_vocabulary_at_all(tmp_path: Path) -> None:
    ids = {"mask_token_id": 8, "eos_token_id": 7}
    config = write_config(tmp_path, vocab_size=9, num_key_value_heads=4, **ids)
    save_file(random_tensors(config), tmp_path / "model.safetensors")
    for load_format in ("auto", "dummy"):
        sizes = [len(load(tmp_path, config, rank, 4, load_format=load_format)["lm_head.weight"]) for rank in range(4)]
        assert sizes == [3, 3, 3, 0]


def test_weights_are_cast_and_own_their_memory(tmp_path: Path, config: ModelConfig) -> None:
    save_file(random_tensors(config, torch.bfloat16), tmp_path / "model.safetensors")
    weights = load(tmp_path, config, dtype=torch.bfloat16)
    before = weights["norm.weight"].clone()
    weights["norm.weight"] += 1  # would fault or reach the file if it were mapped
    assert torch.equal(load(tmp_path, config, dtype=torch.bfloat16)["norm.weight"], before)
    assert load(tmp_path, config, dtype=torch.float16)["norm.weight"].dtype == torch.float16
    assert all(weight.is_contiguous() for weight in weights.values())


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    config = write_config(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    start, stop = shard_bounds(config.vocab_size, 1, 2)
    weights = load(tmp_path, config, 1, 2)
    assert torch.equal(weights["lm_head.weight"], weights["embed_tokens.weight"][start:stop])


@pytest.mark.parametrize(("tp_size", "fix"), [(3, "set it to 1 or 2 or 4"), (8, "does not divide 4 heads")])
def test_tp_must_divide_heads(tmp_path: Path, config: ModelConfig, tp_size: int, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        load(tmp_path, config, 0, tp_size)


def test_unused_tensors_are_named_once(tmp_path: Path, config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    save_file({**random_tensors(config), "model.extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        for rank in range(2):
            load(tmp_path, config, rank, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "1 tensors of the checkpoint are not used: model.extra"
    ]
    many = {f"extra\n{number}": torch.ones(1) for number in range(1000)}
    save_file({**random_tensors(config), **many}, tmp_path / "model.safetensors")
    caplog.clear()
    load(tmp_path, config)
    message = caplog.records[0].getMessage()
    assert message.startswith("1000 tensors") and message.isprintable() and len(message) < 1000


def test_missing_tensor_and_wrong_shape_are_named(tmp_path: Path, config: ModelConfig) -> None:
    tensors = random_tensors(config)
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model\.safetensors: {name}: missing"):
        load(tmp_path, config)
    save_file({**tensors, name: torch.ones(16, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name}: shape \[16, 8\], but config.json says \[16, 16\]"):
        load(tmp_path, config)


def test_integer_weights_are_refused(tmp_path: Path, config: ModelConfig) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = random_tensors(config)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name}: holds torch.int8, quantized weights .*use the unquantized"):
        load(tmp_path, config)


def test_broken_index_names_file_and_tensor(tmp_path: Path, config: ModelConfig) -> None:
    save_sharded(tmp_path, random_tensors(config))
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(
        json.dumps({"weight_map": {**good["weight_map"], "model.more": "model-00001-of-00003.safetensors"}})
    )
    with pytest.raises(
        ConfigError, match=r"model-00001-of-00003\.safetensors: model\.more: not in this file, .* nor in"
    ):
        load(tmp_path, config)
    for file, message in [
        ("model-9.safetensors", r"model-9\.safetensors: no such file, but .*puts lm_head\.weight there"),
        ("../model.safetensors", r"lm_head\.weight: '\.\./model\.safetensors' is not a file of this folder"),
    ]:
        home = good["weight_map"]["lm_head.weight"]
        assert file != home
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "lm_head.weight": file}}))
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, config)
    index.write_text("{")
    with pytest.raises(ConfigError, match=r"index\.json: not valid JSON"):
        load(tmp_path, config)


@pytest.mark.parametrize("rank", [0, 1])
def test_truncated_file_is_named(tmp_path: Path, config: ModelConfig, rank: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(random_tensors(config), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: truncated or corrupt"):
        load(tmp_path, config, rank, 2)


@pytest.mark.parametrize(
    ("header_size", "header"),
    [
        (2**63, b"{}"),
        (16 * 2**20 + 1, b"{}"),
        (200_000, b'{"a":' * 40_000),
        (200_000, b"[" * 200_000),
        (0, b""),
        (60, b'{"a":{"dtype":"F32","shape":[9999999999999999999],"data_offse'),
    ],
)
def test_a_header_of_nonsense_is_refused_at_once(
    tmp_path: Path, config: ModelConfig, header_size: int, header: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_size.to_bytes(8, "little") + header + bytes(8))
    with bounded(5, 0.5), pytest.raises(ConfigError, match=r"model\.safetensors: truncated or corrupt") as caught:
        load(tmp_path, config)
    assert "\n" not in str(caught.value)


def test_names_of_an_index_cannot_garble_the_sentence(tmp_path: Path, config: ModelConfig) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for file in ("a" * 300, "a\0b", "a\nb", "\ud800", "..", "", "/etc/passwd", 5, None, ["a"]):
        index.write_text(json.dumps({"weight_map": {"x\ny" * 1000: file}}))
        with pytest.raises(
            ConfigError, match=r"is not a file of this folder|(no such file|a folder), but .* puts"
        ) as caught:
            load(tmp_path, config)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 800


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_that_are_a_pipe_are_no_regular_file(tmp_path: Path, config: ModelConfig, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}: no regular file; download it again"):
        load(tmp_path, config)


def test_git_lfs_pointer_and_empty_folder_say_what_to_do(tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="download the checkpoint in safetensors format"):
        load(tmp_path, config)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        load(tmp_path, config)


def test_dummy_weights_need_only_the_config_and_follow_the_seed(tmp_path: Path, config: ModelConfig) -> None:
    first, again, other = (load(tmp_path, config, load_format="dummy", seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(first["lm_head.weight"], first["embed_tokens.weight"])
    assert (first["norm.weight"] == 1).all()
    assert first["embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)


def test_no_two_rows_of_a_dummy_matrix_are_equal(config: ModelConfig) -> None:
    source = DummySource(replace(config, vocab_size=300_000), torch.float32, seed=0)  # longer than the pool
    rows = source.read("lm_head.weight")
    assert len(torch.unique(rows[:, :4], dim=0)) == len(rows)


def test_config_is_read_with_eos_from_either_file(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert (config.head_size, config.mask_token_id, config.eos_token_id) == (4, 50, 48)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [47, 48]}')
    assert write_config(tmp_path, eos_token_id=...).eos_token_id == 47


def test_rope_may_be_written_as_transformers_5_does(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    assert write_config(tmp_path, rope_theta=..., rope_parameters=rope).rope_theta == 5000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama' is not a supported family.*Dream"),
        ({"hidden_size": ...}, "config.json: hidden_size: missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
        ({"num_attention_heads": 6}, "6 does not divide hidden_size"),
        ({"mask_token_id": 51}, "mask_token_id: 51 is not an id of the 51"),
        ({"mask_token_id": ...}, "mask_token_id: missing"),
        ({"eos_token_id": ...}, "eos_token_id: missing here and in generation_config.json"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope type 'yarn' is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected an integer"),
    ],
)
def test_wrong_config_names_key_and_fix(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_config(tmp_path, **changes)


def test_missing_folder_and_corrupt_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_model_config(tmp_path / "Dream-org")
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        load_model_config(tmp_path)


def test_a_file_that_is_larger_than_the_process_may_map_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path)
    save_file(random_tensors(config), tmp_path / "model.safetensors")

    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr("common.checkpoint.sources.safe_open", refuse)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: its 0\.0 GiB are more than this process may map; raise"
    ):
        load_weights(tmp_path, config, tp_rank=0, tp_size=1, dtype=torch.float32)
