"""A LoRA folder merged while loading equals the product written out; what cannot be merged is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import bounded
from safetensors.torch import save_file

from common.checkpoint import LoraSource, ModelConfig, load_weights
from common.checkpoint.rules import checkpoint_shapes
from common.checkpoint.sources import DummySource
from common.errors import ConfigError

CONFIG = ModelConfig(
    family="dream",
    vocab_size=51,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=4,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    mask_token_id=50,
    eos_token_id=48,
    stop_token_ids=(48,),
    tie_word_embeddings=False,
    shift=1,
    block_origin="prompt_end",
    block_size=None,
    qk_norm=False,
    attention_bias=True,
    rotary_size=4,
    rounds_rotary=True,
    moe=None,
)
SHAPES = checkpoint_shapes(CONFIG)
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
RANK = 3
Q0 = "model.layers.0.self_attn.q_proj"


def adapter(
    targets: list[str] = TARGETS, rank: int = RANK, prefix: str = "base_model.model."
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in SHAPES.items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in targets and name.endswith(".weight"):
            tensors[f"{prefix}{module}.lora_A.weight"] = torch.randn(rank, shape[1], generator=generator)
            tensors[f"{prefix}{module}.lora_B.weight"] = torch.randn(shape[0], rank, generator=generator)
    return tensors


def write_lora(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **settings: Any) -> str:
    tree = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "target_modules": TARGETS, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(tree))
    save_file(adapter() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return str(folder)


def load(lora_path: str | None, tp_rank: int = 0, tp_size: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    options: dict[str, Any] = {"load_format": "dummy", "lora_path": lora_path}
    return load_weights("unused", CONFIG, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **options)


def delta(module: str, scale: float) -> torch.Tensor:
    tensors = adapter()
    return (
        scale
        * tensors[f"base_model.model.{module}.lora_B.weight"]
        @ tensors[f"base_model.model.{module}.lora_A.weight"]
    )


def test_merged_weights_are_base_plus_scaled_product(tmp_path: Path) -> None:
    merged, base = load(write_lora(tmp_path)), load(None)
    expected = base["layers.0.qkv_proj.weight"].clone()
    expected[:16] += delta(Q0, 12 / RANK)
    expected[24:] += delta("model.layers.0.self_attn.v_proj", 12 / RANK)
    torch.testing.assert_close(merged["layers.0.qkv_proj.weight"], expected)
    down = base["layers.1.down_proj.weight"] + delta("model.layers.1.mlp.down_proj", 12 / RANK)
    torch.testing.assert_close(merged["layers.1.down_proj.weight"], down)
    untouched = ("embed_tokens.weight", "layers.0.gate_up_proj.weight", "lm_head.weight", "layers.0.qkv_proj.bias")
    assert all(torch.equal(merged[name], base[name]) for name in untouched)


def test_ranks_merge_only_their_slice(tmp_path: Path) -> None:
    path = write_lora(tmp_path)
    whole, ranks = load(path), [load(path, rank, 2) for rank in range(2)]
    for name in ("layers.0.o_proj.weight", "layers.1.down_proj.weight"):
        torch.testing.assert_close(torch.cat([rank[name] for rank in ranks], dim=1), whole[name])
    query_rows = [rank["layers.0.qkv_proj.weight"][:8] for rank in ranks]
    torch.testing.assert_close(torch.cat(query_rows), whole["layers.0.qkv_proj.weight"][:16])


def test_the_sum_is_rounded_once(tmp_path: Path) -> None:
    source = LoraSource(DummySource(CONFIG, torch.bfloat16, seed=0), write_lora(tmp_path), CONFIG)
    assert source.read(f"{Q0}.weight").dtype == torch.float32
    merged = load(str(tmp_path), dtype=torch.bfloat16)["layers.0.qkv_proj.weight"][:16]
    assert torch.equal(merged, source.read(f"{Q0}.weight").bfloat16())


def test_rslora_and_patterns_set_the_scale(tmp_path: Path) -> None:
    base = load(None)["layers.0.qkv_proj.weight"][:16]
    rslora = load(write_lora(tmp_path, use_rslora=True))["layers.0.qkv_proj.weight"][:16]
    torch.testing.assert_close(rslora, base + delta(Q0, 12 / RANK**0.5))
    patterns = {"alpha_pattern": {"layers.0.self_attn.q_proj": 30}, "rank_pattern": {"_proj": 9, r"\w+_proj": RANK}}
    patterned = load(write_lora(tmp_path, r=8, **patterns))["layers.0.qkv_proj.weight"][:16]
    torch.testing.assert_close(patterned, base + delta(Q0, 30 / RANK))


def test_targets_that_the_model_does_not_have_are_no_error(tmp_path: Path) -> None:
    expected = load(write_lora(tmp_path))["layers.0.o_proj.weight"]
    merged = load(write_lora(tmp_path, target_modules=[*TARGETS, "W_pack"]))["layers.0.o_proj.weight"]
    assert torch.equal(merged, expected)


def test_adapter_may_be_sharded_and_name_its_default_adapter(tmp_path: Path) -> None:
    expected = load(write_lora(tmp_path))
    tensors = {key.replace(".weight", ".default.weight"): value for key, value in adapter().items()}
    (tmp_path / "adapter_model.safetensors").unlink()
    weight_map = {}
    for number in range(2):
        part = dict(list(tensors.items())[number::2])
        save_file(part, tmp_path / f"adapter_model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"adapter_model-{number}.safetensors")
    (tmp_path / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    merged = load(str(tmp_path))
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "adapter_config.json: use_dora: not supported; merge"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: not supported"),
        ({"bias": "all"}, "bias: trained biases"),
        ({"arrow_config": {"top_k": 2}}, "adapter_config.json: arrow_config: not known; merge the adapter with PEFT"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: not supported; merge"),
        ({"layers_to_transform": [0]}, r"layers_to_transform: model\.layers\.1\.\S+ has tensors but is of no layer"),
        ({"layers_to_transform": 1}, r"layers_to_transform: model\.layers\.0\.\S+ has tensors but is of no layer"),
        ({"exclude_modules": ["o_proj"]}, r"exclude_modules: \S+o_proj has tensors but is excluded"),
        ({"exclude_modules": r".*\.o_proj"}, r"exclude_modules: \S+o_proj has tensors but is excluded"),
        ({"exclude_modules": "[z-a]"}, r"exclude_modules: '\[z-a\]' is no pattern"),
        ({"exclude_modules": 5}, "exclude_modules: expected names of modules, found 5"),
        ({"exclude_modules": [["q_proj"]]}, "exclude_modules: expected names of modules"),
        ({"layers_to_transform": "1"}, r"layers_to_transform: expected numbers of layers, found \['1'\]"),
        ({"layers_to_transform": {}}, "layers_to_transform: expected numbers of layers"),
        ({"layers_to_transform": [0, True]}, "layers_to_transform: expected numbers of layers"),
        ({"target_modules": "q_proj"}, "target_modules: .* has tensors but does not match 'q_proj'"),
        ({"target_modules": r".*\.(q|v|down)_proj"}, "o_proj has tensors but does not match"),
        ({"target_modules": "[z-a]"}, r"target_modules: '\[z-a\]' is no pattern"),
        ({"peft_type": "IA3"}, "'IA3' is not LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 changes the base weights"),
        ({"r": None}, r"r: expected an integer in 1\.\.65536, found None"),
        ({"r": 4.5}, "r: expected an integer .* found 4.5"),
        ({"r": 3.0}, "r: expected an integer .* found 3.0"),
        ({"r": True}, "r: expected an integer .* found True"),
        ({"r": 10**30}, "r: expected an integer .* found 1000"),
        ({"rank_pattern": {"q_proj": 0.5}}, "r: expected an integer .* found 0.5"),
        ({"lora_alpha": "32"}, "lora_alpha: expected a number above 0"),
        ({"lora_alpha": True}, "lora_alpha: expected a number above 0.* found True"),
        ({"lora_alpha": float("inf")}, "lora_alpha: expected a number above 0.* found inf"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a number above 0.* found nan"),
        ({"lora_alpha": 10**400}, "lora_alpha: expected a number above 0.* at most 1e[+]06"),
        ({"lora_alpha": -1e-3}, "lora_alpha: expected a number above 0"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "lora_alpha: expected a number above 0"),
        ({"use_rslora": "false"}, "use_rslora: expected true or false, found 'false'"),
        ({"peft_type": 5}, "peft_type: 5 is not LORA"),
        ({"peft_type": None}, "peft_type: None is not LORA"),
        ({"target_modules": [1]}, r"target_modules: expected names of modules, found \[1\]"),
        ({"target_modules": 5}, "target_modules: expected names of modules, found 5"),
        ({"target_modules": {"a": 1}}, "target_modules: expected names of modules"),
        ({"target_modules": ["q_proj"] * 10_001}, "target_modules: expected names of modules"),
        ({"rank_pattern": {f"{n}": 4 for n in range(10_001)}}, "rank_pattern: expected patterns with their values"),
        ({"rank_pattern": {f".*{n}": 4 for n in range(51)}}, "rank_pattern: '.*50' is no pattern of plain names"),
        ({"rank_pattern": {"a?" * 40 + "a" * 40: 4}}, "rank_pattern: .* is no pattern of plain names"),
        ({"rank_pattern": {"(a|a)" * 30: 4}}, "rank_pattern: .* is no pattern of plain names"),
        ({"alpha_pattern": {"(.*)*x": 4}}, "alpha_pattern: .* is no pattern of plain names"),
        ({"alpha_pattern": {"(\n": 4}}, r"alpha_pattern: '\(.n' is no pattern"),
        ({"alpha_pattern": {"[[a]": 4}}, r"alpha_pattern: '\[\[a\]' is no pattern of plain names"),
        ({"alpha_pattern": {"[z-a]": 4}}, r"alpha_pattern: '\[z-a\]' is no pattern .bad character range"),
        ({"rank_pattern": [1]}, "rank_pattern: expected patterns with their values"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: .* is no pattern"),
        ({"r": 4}, r"_proj\.lora_A\.weight: shape \[3, \d+\], but r .* ask for \[4, \d+\]"),
        ({"target_modules": [*TARGETS, "k_proj"]}, "'k_proj' has no tensors"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "down_proj has tensors but is not listed"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with bounded(5), pytest.raises(ConfigError, match=message) as caught:
        load(write_lora(tmp_path, **settings))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_patterns_that_write_out_names_are_read(tmp_path: Path) -> None:
    base = load(None)["layers.0.qkv_proj.weight"][:16]
    for pattern in (r"model\.layers\.(0|1)\.self_attn\..*", r"^.*layers.\d+.self_attn.[qv]_proj$", "q_proj"):
        merged = load(write_lora(tmp_path, alpha_pattern={pattern: 30}))["layers.0.qkv_proj.weight"][:16]
        torch.testing.assert_close(merged, base + delta(Q0, 30 / RANK))


@pytest.mark.parametrize(
    "settings",
    [
        {"fan_in_fan_out": True},
        {"bias": None, "modules_to_save": None, "use_dora": False, "rank_pattern": {}, "arrow_config": None},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q_proj|v_proj|o_proj|down_proj)"},
        {"target_modules": r"^(?:model|x)\.(?!y).*"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": ["k_proj"]},
        {"layers_to_transform": [], "exclude_modules": r".*\.k_proj"},
        {"layers_to_transform": None, "exclude_modules": "o_proj"},  # which as a pattern is no module's whole name
        {"init_lora_weights": "gaussian", "peft_version": "0.18.0", "task_type": "CAUSAL_LM", "inference_mode": True},
    ],
)
def test_settings_that_change_nothing_are_accepted(tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = load(write_lora(tmp_path))
    merged = load(write_lora(tmp_path, **settings))
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def test_an_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: holds no tensors"):
        load(write_lora(tmp_path, {}))


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_value_of_an_adapter_that_is_no_number_is_named(tmp_path: Path, side: str, value: float) -> None:
    tensors = adapter()
    tensors[f"base_model.model.{Q0}.lora_{side}.weight"][1, 2] = value
    with pytest.raises(ConfigError, match=rf"adapter_model\.safetensors: .*{Q0}.lora_{side}.weight: holds NaN"):
        load(write_lora(tmp_path, tensors))


def test_a_sum_that_is_no_number_names_the_adapter_too(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    lora = write_lora(tmp_path / "lora", {name: tensor * 1e30 for name, tensor in adapter().items()})
    with pytest.raises(ConfigError, match=r"/model\.safetensors with .*/lora/adapter_model\.safetensors: .* NaN"):
        load_weights(str(tmp_path), CONFIG, tp_rank=0, tp_size=1, dtype=torch.float32, lora_path=lora)


def test_an_adapter_of_integers_is_refused(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.int8) for name, tensor in adapter().items()}
    with pytest.raises(ConfigError, match=r"lora_[AB]\.weight: holds torch\.int8, not weights"):
        load(write_lora(tmp_path, tensors))


@pytest.mark.parametrize(
    "key", ["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", "base_model.model.lm_head.weight"]
)
def test_a_tensor_that_no_weight_takes_is_named(tmp_path: Path, key: str) -> None:
    path = write_lora(tmp_path, {**adapter(), key: torch.ones(RANK, 16)})
    with pytest.raises(ConfigError, match=rf"adapter_model\.safetensors: {key}: the model has no weight for it"):
        load(path)


@pytest.mark.parametrize("module", [f"base_model.model.{Q0}.lora_A.default", f"{Q0}.lora_A"])
def test_two_tensors_for_one_place_are_named(tmp_path: Path, module: str) -> None:
    first = f"base_model.model.{Q0}.lora_A.weight"
    path = write_lora(tmp_path, {**adapter(), f"{module}.weight": torch.ones_like(adapter()[first])})
    with pytest.raises(ConfigError, match="are for one weight; keep the tensors of one adapter") as refused:
        load(path)
    assert first in str(refused.value) and f"{module}.weight" in str(refused.value)


def test_missing_half_and_missing_files_are_named(tmp_path: Path) -> None:
    tensors = adapter()
    del tensors[f"base_model.model.{Q0}.lora_B.weight"]
    with pytest.raises(ConfigError, match=rf"{Q0}\.lora_B\.weight: missing"):
        load(write_lora(tmp_path, tensors))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"adapter_config\.json: no such file"):
        load(str(tmp_path))
    (tmp_path / "runs").mkdir()
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "runs" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"neither .* found; name one of its folders, such as runs"):
        load(str(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; .* set `lora_path`"):
        load(str(tmp_path / "nowhere"))
