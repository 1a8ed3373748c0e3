"""Each family's config.json as it is published, and what would make another model of it refused by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint import LoraSource, ModelConfig, SafetensorsFolder, load_model_config, load_weights
from common.checkpoint.families.names import TENSOR_NAMES
from common.checkpoint.model_config import Family
from common.checkpoint.rules import checkpoint_shapes, rules_of
from common.checkpoint.sources import DummySource
from common.errors import ConfigError
from tests.conftest import GOLDEN

FAMILIES = GOLDEN.parent / "golden_families"
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-6}
SDAR_MOE = {
    **SIZES, "model_type": "sdar_moe", "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rope_theta": 1e6, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "norm_topk_prob": True, "mask_token_id": 95, "eos_token_id": 94, "mlp_only_layers": [], "block_size": 4,
}  # fmt: skip
DIFFCODER = {
    **SIZES, "model_type": "llama", "architectures": ["StableDiffcoderForCausalLM"], "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "rope_theta": 5e5, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
SHIFT_ORIGIN_BLOCK = {
    "llada": (0, "prompt_end", None), "sdar": (0, "zero", 4), "fastdllm_v2": (1, "zero", 32),
    "llada2": (0, "zero", None), "llada2_2": (0, "zero", 32),
}  # fmt: skip


def published(family: str) -> dict[str, Any]:
    if family in ("sdar_moe", "diffcoder"):
        return SDAR_MOE if family == "sdar_moe" else DIFFCODER
    tree: dict[str, Any] = json.loads((FAMILIES / family / "model_a" / "config.json").read_text())
    return {"eos_token_id": 510, **tree}  # LLaDA2.2's stands in another file


def write(folder: Path, family: str, **changes: Any) -> ModelConfig:
    tree = {key: value for key, value in {**published(family), **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(tree))
    return load_model_config(folder)


@pytest.mark.parametrize("family", SHIFT_ORIGIN_BLOCK)
def test_the_conventions_of_a_family_are_read(family: str) -> None:
    config = load_model_config(FAMILIES / family / "model_a")
    assert (config.shift, config.block_origin, config.block_size) == SHIFT_ORIGIN_BLOCK[family]
    is_llada2 = family.startswith("llada2")
    assert config.qk_norm is (family == "sdar" or is_llada2) and config.attention_bias is (family == "fastdllm_v2")
    assert config.rotary_size == config.head_size // (2 if is_llada2 else 1)
    assert config.rounds_rotary is (family != "llada") and (config.moe is not None) is is_llada2


def test_llada2_2_chooses_experts_by_blocks_whatever_its_keys_of_groups_say(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [510, 509]}')
    config = write(tmp_path, "llada2_2", n_group=7, topk_group=9)
    assert config.moe is not None and config.routing_block == 32
    assert (config.moe.capacity, config.moe.num_groups, config.moe.top_groups) == (5, 1, 1)
    assert (config.stop_token_ids, config.edit_ids) == ((510, 509), (500, 501))
    by_group = write(tmp_path, "llada2_2", expert_capacity=None, delete_token_id=..., split_token_id=...)
    assert by_group.moe is not None and (by_group.moe.capacity, by_group.routing_block, by_group.edit_ids) == (
        0,
        0,
        None,
    )
    assert by_group.moe.num_groups == 8


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 1e4}, 3e6),  # what stands inside goes first
        ({"rope_theta": ...}, 3e6),
        ({"rope_parameters": ...}, 3e6),
        ({"rope_parameters": None, "rope_theta": 6e5}, 6e5),
    ],
)
def test_the_angles_of_llada2_2_are_read_from_either_key(tmp_path: Path, changes: dict[str, Any], theta: float) -> None:
    config = write(tmp_path, "llada2_2", **changes)
    assert (config.rope_theta, config.rotary_size) == (theta, 16)


def test_sdar_moe_and_stable_diffcoder_are_read(tmp_path: Path) -> None:
    moe = write(tmp_path, "sdar_moe").moe
    assert moe is not None and (moe.scoring, moe.num_groups, moe.first_dense) == ("softmax", 1, 0)
    config = write(tmp_path, "diffcoder")
    assert (config.family, config.shift, config.block_origin) == ("stable_diffcoder", 0, "zero")
    assert not config.attention_bias and not config.qk_norm and config.mask_token_id is None


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llada", {"block_type": "sequential"}, "block_type: 'sequential' is not implemented, only \"llama\""),
        ("llada", {"alibi": True}, "alibi: True is not implemented, only false"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias: True is not implemented"),
        ("llada", {"attention_layer_norm": True}, "attention_layer_norm: True is not implemented"),
        ("llada", {"activation_type": "swiglu"}, "activation_type: 'swiglu' is not implemented"),
        ("llada", {"n_kv_heads": 3}, "n_kv_heads: 3 does not divide 4 heads"),
        ("llada", {"d_model": ...}, "d_model: missing"),
        ("sdar", {"attention_bias": True}, "attention_bias: True is not implemented"),
        ("sdar", {"block_size": 0}, "block_size: expected an integer of at least 1"),
        ("sdar", {"mask_token_id": 510}, "mask_token_id: 510 is the end token too"),
        ("fastdllm_v2", {"bd_size": "32"}, "bd_size: expected an integer"),
        (
            "fastdllm_v2",
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": ..., "max_window_layers": 2},
            "use_sliding_window: True is not implemented, only false",
        ),
        ("llada2", {"score_function": "softmax"}, "score_function: 'softmax' is not implemented"),
        ("llada2", {"expert_capacity": 8}, "block_size: missing"),
        ("llada2_2", {"expert_capacity": 1}, "expert_capacity: expected an integer of at least 2 and at most 16"),
        ("llada2_2", {"expert_capacity": 17}, "expert_capacity: expected an integer of at least 2 and at most 16"),
        ("llada2_2", {"block_size": "32"}, "block_size: expected an integer"),
        ("llada2_2", {"split_token_id": 512}, "split_token_id: 512 is not an id of the 512 vocabulary entries"),
        ("llada2_2", {"split_token_id": ...}, "split_token_id: None is not an id"),
        ("llada2_2", {"delete_token_id": 501}, "delete_token_id: 501, 501, the mask and the end tokens are not all"),
        ("llada2_2", {"delete_token_id": 510}, "delete_token_id: 510, 501, the mask and the end tokens are not all"),
        (
            "llada2_2",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1}},
            "rope type 'yarn' is not implemented",
        ),
        ("llada2", {"use_qk_norm": False}, "use_qk_norm: False is not implemented, only true"),
        ("llada2", {"n_group": 3}, "n_group: 8 experts make no 3 groups"),
        ("llada2", {"topk_group": 5}, "topk_group: expected an integer of at least 1 and at most 4"),
        ("llada2", {"num_experts_per_tok": 5}, "num_experts_per_tok: 5 cannot be chosen among 4 experts"),
        ("llada2", {"partial_rotary_factor": 0.03}, "partial_rotary_factor: 0.03 of heads of 32 is no even number"),
        ("llada2", {"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' is not implemented"),
        ("sdar_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers: \[0\] is not implemented, only \[\]"),
        ("sdar_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not implemented, only 1"),
        ("sdar_moe", {"num_experts": 1}, "num_experts_per_tok: 2 cannot be chosen among 1 experts"),
        ("diffcoder", {"mlp_bias": True}, "mlp_bias: True is not implemented"),
    ],
)
def test_what_would_be_another_model_is_refused_by_key(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}") as caught:
        write(tmp_path, family, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "tree"),
    [
        ("added_tokens.json", {"<x>": 3, "|<MASK>|": 91}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"91": {"content": "|<MASK>|"}}}),
        ("tokenizer_config.json", {"mask_token": "<m>", "added_tokens_decoder": {"91": {"content": "<m>"}}}),
        ("tokenizer.json", {"added_tokens": [{"id": 4, "content": "<y>"}, {"id": 91, "content": "|<MASK>|"}]}),
    ],
)
def test_the_mask_token_is_found_in_the_tokenizers_files(tmp_path: Path, file: str, tree: dict[str, Any]) -> None:
    (tmp_path / file).write_text(json.dumps(tree))
    assert write(tmp_path, "fastdllm_v2").mask_token_id == 91


def test_a_mask_token_that_no_file_names_is_asked_of_the_run(tmp_path: Path) -> None:
    config = write(tmp_path, "llada2")
    assert config.mask_token_id is None and config.mask_of(7) == 7
    with pytest.raises(ConfigError, match=r"^decode\.mask_token_id: missing, .*llada2_moe checkpoint.*: set it to"):
        config.mask_of(None)
    (tmp_path / "added_tokens.json").write_text('{"<|mask|>": 512}')
    with pytest.raises(ConfigError, match="mask_token_id: 512 is not an id of the 512"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "tree"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "|<MASK>|"}, "x": 5, "²": {}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [7]}),
        ("tokenizer.json", {"added_tokens": [{"content": ["|<MASK>|"]}, 5, None]}),
    ],
)
def test_lists_of_tokens_that_make_no_sense_name_no_mask(tmp_path: Path, file: str, tree: dict[str, Any]) -> None:
    (tmp_path / file).write_text(json.dumps(tree))
    assert write(tmp_path, "fastdllm_v2").mask_token_id is None


def test_a_mask_token_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": [7]}')
    with pytest.raises(ConfigError, match=r"mask_token: expected a text, found \[7\]; download its files again"):
        write(tmp_path, "fastdllm_v2")


def test_end_tokens_are_those_of_generation_config_and_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [500, 505]}')
    config = write(tmp_path, "sdar")
    assert config.eos_token_id == 500 and config.stop_token_ids == (500, 505)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    config = write(tmp_path, "sdar", eos_token_id=[510, 500])
    assert config.stop_token_ids == (510, 500)


@pytest.mark.parametrize(("family", "turn_end"), [("llada", "<|eot_id|>"), ("llada2", "<|role_end|>")])
def test_the_end_of_a_turn_is_an_end_token_too(tmp_path: Path, family: str, turn_end: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 77, "content": turn_end}]}))
    assert write(tmp_path, family).stop_token_ids == (510, 77)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("family", ["llada", "sdar", "llada2", "fastdllm_v2", "sdar_moe", "diffcoder"])
def test_ranks_share_every_parameter(tmp_path: Path, family: str, tp_size: int) -> None:
    """More ranks than KV heads hold a copy of one each."""
    config = write(tmp_path, family)
    whole, *ranks = (
        load_weights("unused", config, tp_rank=rank, tp_size=size, dtype=torch.float32, load_format="dummy")
        for rank, size in [(0, 1), *((rank, tp_size) for rank in range(tp_size))]
    )
    copies = max(1, tp_size // config.num_kv_heads)
    for rule in rules_of(config):
        shares = [rank[rule.name] for rank in ranks]
        if rule.num_experts:
            assert torch.equal(torch.cat(shares), whole[rule.name]), rule.name
        elif rule.split is None:
            assert all(torch.equal(share, whole[rule.name]) for share in shares), rule.name
        elif ".qkv_proj." in rule.name:
            sizes = [config.num_heads * config.head_size // tp_size, *[share_of_kv(config, tp_size)] * 2]
            q, k, v = zip(*(share.split(sizes) for share in shares), strict=True)
            assert torch.equal(torch.cat((*q, *k[::copies], *v[::copies])), whole[rule.name]), rule.name
            assert all(torch.equal(k[n], k[n // copies * copies]) for n in range(tp_size))


def share_of_kv(config: ModelConfig, tp_size: int) -> int:
    return config.kv_heads_of_rank(tp_size) * config.head_size


def test_a_router_stays_in_float32(tmp_path: Path) -> None:
    config = write(tmp_path, "llada2")
    weights = load_weights(FAMILIES / "llada2" / "model_a", config, tp_rank=0, tp_size=1, dtype=torch.bfloat16)
    is_float32 = {name.rpartition(".")[2] for name, weight in weights.items() if weight.dtype == torch.float32}
    assert is_float32 == {"router", "expert_bias"}


def test_experts_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    config = load_model_config(FAMILIES / "llada2" / "model_a")
    source = SafetensorsFolder(FAMILIES / "llada2" / "model_a")
    names = [name for name in source.names() if "layers.2.mlp.experts." in name]
    assert len(names) == 3 * 8
    for name in names:
        tensors = {other: source.read(other).clone() for other in source.names()}
        tensors[name][:] = torch.nan
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"model\.safetensors: {name}: holds NaN"):
            load_weights(tmp_path, config, tp_rank=0, tp_size=1, dtype=torch.float32)


def test_experts_must_divide_over_the_ranks(tmp_path: Path) -> None:
    config = write(tmp_path, "llada2", num_experts=12, n_group=4, num_attention_heads=16, num_key_value_heads=16)
    with pytest.raises(ConfigError, match=r"size 8 does not divide 12 experts: set it to 1 or 2 or 4$"):
        load_weights("unused", config, tp_rank=0, tp_size=8, dtype=torch.float32, load_format="dummy")


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llada", ["q_proj", "ff_proj", "ff_out", "attn_out"]), ("llada2", ["query_key_value", "dense"])],
)
def test_lora_of_a_familys_names_is_merged(tmp_path: Path, family: str, targets: list[str]) -> None:
    """D2F-LLaDA names its targets as LLaDA does; ff_out is the down projection and the head."""
    config = load_model_config(FAMILIES / family / "model_a")
    shapes = checkpoint_shapes(config)
    modules = [name.removesuffix(".weight") for name in shapes if ".1." in name]
    tensors = {}
    for module in (module for module in modules if module.rpartition(".")[2] in targets):
        num_out, num_in = shapes[f"{module}.weight"]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(2, num_in)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(num_out, 2)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    base = DummySource(config, torch.float32, seed=0)
    merged = LoraSource(base, tmp_path, config)
    for module in modules:
        name = f"{module}.weight"
        if f"base_model.model.{module}.lora_A.weight" in tensors:
            b, a = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "BA")
            torch.testing.assert_close(merged.read(name), base.read(name) + 2 * b @ a)
        elif name in shapes:
            assert torch.equal(merged.read(name), base.read(name))


def test_a_fused_projection_is_cut_by_its_parts(tmp_path: Path) -> None:
    config = replace(load_model_config(FAMILIES / "llada2" / "model_a"), num_layers=1)
    source = DummySource(config, torch.float32, seed=0)
    fused = source.read("model.layers.0.attention.query_key_value.weight")
    query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    second = load_weights("unused", config, tp_rank=1, tp_size=2, dtype=torch.float32, load_format="dummy")
    rows = [
        *range(query // 2, query),
        *range(query + kv // 2, query + kv),
        *range(query + kv + kv // 2, query + 2 * kv),
    ]
    assert torch.equal(second["layers.0.qkv_proj.weight"], fused[rows])


def test_every_family_has_the_names_of_its_tensors() -> None:
    assert set(TENSOR_NAMES) == set(get_args(Family))
