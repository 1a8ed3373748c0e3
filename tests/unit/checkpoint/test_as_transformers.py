"""What is read of a folder is what transformers reads of it, or refused: a test for each line of docs/families.md."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_families import DIFFCODER, SDAR_MOE, published
from test_tokenizer import TEXT, text_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.checkpoint import ModelConfig, load_model_config, load_tokenizer, load_weights
from common.checkpoint.rules import checkpoint_shapes
from common.errors import ConfigError

transformers = pytest.importorskip("transformers", minversion="5")
try:
    PreTrainedConfig, LlamaConfig = transformers.PreTrainedConfig, transformers.LlamaConfig
except ImportError as missing:  # beside torch_npu without its libraries, as on the simulated device
    pytest.skip(f"transformers cannot be imported: {missing}", allow_module_level=True)
Tensors = dict[str, torch.Tensor]
Edit = Callable[[dict[str, Any]], None]


class Llada2Config(PreTrainedConfig):  # type: ignore[misc]
    """The published class's defaults that no tensor's shape tells."""

    def __init__(
        self, num_key_value_heads: int = 0, max_position_embeddings: int = 16384, rms_norm_eps: float = 1e-5,
        rope_theta: float = 1e4, partial_rotary_factor: float = 0.5, head_dim: int | None = None,
        hidden_size: int = 1024, num_attention_heads: int = 16, use_sliding_window: bool = False,
        tie_word_embeddings: bool = False, num_experts_per_tok: int = 2, num_shared_experts: int = 0,
        n_group: int = 8, topk_group: int = 4,
        routed_scaling_factor: float = 2.5, first_k_dense_replace: int = 0, rope_parameters: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        own = {key: value for key, value in locals().items() if key not in ("self", "more") and not key.startswith("_")}
        for key, value in own.items():
            setattr(self, key, value)
        self.head_dim = head_dim or hidden_size // num_attention_heads
        super().__init__(**more)


CLASSES: dict[str, tuple[dict[str, Any], Any]] = {
    "sdar": (published("sdar"), transformers.Qwen3Config),
    "sdar_moe": (SDAR_MOE, transformers.Qwen3MoeConfig),
    "fast_dllm_v2": (published("fastdllm_v2"), transformers.Qwen2Config),
    "diffcoder": (DIFFCODER, LlamaConfig),
    "llada2": (published("llada2"), Llada2Config),
}
NAMES = {
    "hidden_size": "hidden_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "vocab_size": "vocab_size", "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings", "tie_word_embeddings": "tie_word_embeddings",
}  # fmt: skip
MOE_NAMES = {
    "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "norm_topk_prob": "normalise",
    "moe_intermediate_size": "intermediate_size", "num_shared_experts": "num_shared_experts", "n_group": "num_groups",
    "topk_group": "top_groups", "routed_scaling_factor": "scaling", "first_k_dense_replace": "first_dense",
}  # fmt: skip


def write(folder: Path, tree: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tree))


def check_same(config: ModelConfig, theirs: Any) -> None:
    for name, own in NAMES.items():
        assert getattr(config, own) == getattr(theirs, name), name
    head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    rope = theirs.rope_parameters
    rope = rope.get("full_attention", rope)
    assert rope["rope_type"] == "default" or rope["factor"] == 1
    assert config.rope_theta == rope["rope_theta"] and config.head_size == head
    share = rope.get("partial_rotary_factor", 1.0)
    assert config.rotary_size == int(head * share)
    assert set(getattr(theirs, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    for name, own in MOE_NAMES.items():
        if config.moe is not None and hasattr(type(theirs)(), name):
            assert getattr(config.moe, own) == (getattr(theirs, name) or 0), name


def moved(*keys: str, into: str = "rope_parameters") -> Edit:
    def edit(tree: dict[str, Any]) -> None:
        rope = dict(tree[into]) if isinstance(tree.get(into), dict) else {}
        rope |= {key: tree.pop(key) for key in keys if key in tree}
        tree[into] = rope

    return edit


def changed(**values: Any) -> Edit:
    return lambda tree: tree.update(values)


def without(*keys: str) -> Edit:
    return lambda tree: [tree.pop(key, None) for key in keys]  # type: ignore[return-value,func-returns-value]


LINEAR_1 = {"rope_type": "linear", "factor": 1.0}
YARN_1 = {"type": "yarn", "factor": 1, "original_max_position_embeddings": 64}


ONE_SET = "rope_parameters: .* is not implemented, only one set for all layers"


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        (changed(), {}),
        (moved("rope_theta", "partial_rotary_factor"), {}),
        (moved("rope_theta", into="rope_scaling"), {}),
        (without("rope_theta"), {}),
        (without("partial_rotary_factor"), {}),
        (without("rms_norm_eps", "max_position_embeddings"), {}),
        (without("tie_word_embeddings", "hidden_act", "attention_bias", "use_sliding_window", "norm_topk_prob"), {}),
        (without("head_dim"), {}),
        (
            without("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "num_experts_per_tok"),
            {"llada2": "n_group: missing, which stands for 8: 8 experts make no 8 groups"},
        ),
        (
            without("num_shared_experts", "moe_intermediate_size", "num_experts"),
            {"llada2": "moe_intermediate_size: missing"},
        ),
        (changed(rope_scaling=LINEAR_1), {}),
        (changed(rope_parameters={"rope_theta": 3e4, **YARN_1}), {}),
        (changed(rope_parameters={"rope_type": "default", "rope_theta": 5e4}), {}),
        (
            changed(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5e4}}),
            dict.fromkeys(("sdar_moe", "diffcoder", "llada2"), ONE_SET),
        ),
        (changed(rope_scaling={}, rope_parameters=None), {}),
        (changed(use_sliding_window=False, sliding_window=64), {}),
        (changed(use_sliding_window=True, sliding_window=None), {}),
        (changed(dtype="float32", torch_dtype="bfloat16"), {}),
    ],
)
def test_a_key_counts_where_transformers_looks_for_it(
    tmp_path: Path, family: str, edit: Edit, refused: dict[str, str]
) -> None:
    tree, class_ = CLASSES[family]
    tree = json.loads(json.dumps(tree))
    edit(tree)
    write(tmp_path, tree)
    if family in refused:
        with pytest.raises(ConfigError, match=rf"config\.json: {refused[family]}"):
            load_model_config(tmp_path)
    else:
        check_same(load_model_config(tmp_path), class_.from_dict(tree))


def test_a_base_that_is_written_twice_and_differs_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = dict(CLASSES["sdar"][0], rope_theta=1e4)
    write(tmp_path, {**tree, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    load_model_config(tmp_path)
    assert not caplog.records
    write(tmp_path, {**tree, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}})
    assert load_model_config(tmp_path).rope_theta == 5e4
    (record,) = caplog.records
    assert "rope_parameters.rope_theta is read, and rope_theta outside of it" in record.getMessage()


EDITED = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim", "num_key_value_heads",
    "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "layer_types", "use_sliding_window",
    "sliding_window", "max_window_layers", "attention_bias", "hidden_act", "norm_topk_prob", "num_experts_per_tok",
    "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "num_shared_experts",
    "num_local_experts",
)  # fmt: skip
FLAGS = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "norm_topk_prob")
ROPES = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "linear", "yarn", "dynamic", None]),
        "type": st.sampled_from(["default", "linear"]),
        "rope_theta": st.sampled_from([1e4, 5e5, None, "1e4"]),
        "factor": st.sampled_from([1, 1.0, 2.0, None]),
        "partial_rotary_factor": st.sampled_from([1, 0.5, 0.25, None]),
        "original_max_position_embeddings": st.just(64),
        "attention_factor": st.sampled_from([1.0, 2.0]),
    },
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, 1, 2, 4, 32, 0.5, 1e-5, 1e4, 7, "silu", "4", "full_attention"]),
    st.lists(st.sampled_from(["full_attention", "sliding_attention"]), max_size=3), ROPES,
    ROPES.map(lambda rope: {"full_attention": rope}),
)  # fmt: skip


@fuzzed
@given(data=st.data(), family=st.sampled_from(sorted(CLASSES)))
def test_random_edits_load_to_the_same_numbers_or_end_in_a_sentence(
    tmp_path: Path, data: st.DataObject, family: str
) -> None:
    tree, class_ = CLASSES[family]
    tree = json.loads(json.dumps(tree))
    for key in data.draw(st.lists(st.sampled_from(EDITED), max_size=4)):
        match data.draw(st.sampled_from(["remove", "change", "move", "null"])):
            case "remove":
                tree.pop(key, None)
            case "move":
                moved(key, into=data.draw(st.sampled_from(["rope_parameters", "rope_scaling"])))(tree)
            case "null":
                tree[key] = None
            case _:
                tree[key] = data.draw(VALUES)
    write(tmp_path, tree)
    try:
        config = load_model_config(tmp_path)
    except ConfigError as error:
        assert "config.json: " in str(error) and str(error).isprintable()
        return
    for rope in (tree.get("rope_parameters"), tree.get("rope_scaling")):
        for name in ("rope_theta", "partial_rotary_factor"):
            if isinstance(rope, dict) and name in tree and rope.get(name, 0) is None:
                del rope[name]  # which says nothing here
    off = {key: False for key in FLAGS if key in tree and tree[key] is None}
    try:
        theirs = class_.from_dict({**tree, **off})
    except Exception:  # the types of their late classes are stricter than their code
        return
    check_same(config, theirs)


def test_llada_and_dream_have_their_own_defaults(tmp_path: Path) -> None:
    """Their classes are no part of transformers; the values are those of the published files."""
    write(tmp_path, {key: value for key, value in published("llada").items() if key not in LLADA_LEFT_OUT})
    config = load_model_config(tmp_path)
    assert config.rope_theta == 1e4 and config.rms_norm_eps == 1e-5 and config.max_position_embeddings == 1024
    assert config.tie_word_embeddings and config.num_kv_heads == config.num_heads == 4 and not config.rounds_rotary
    assert config.intermediate_size == 4 * config.hidden_size
    for key in ("rope", "block_type", "layer_norm_type", "activation_type"):
        write(tmp_path, {name: value for name, value in published("llada").items() if name != key})
        with pytest.raises(ConfigError, match=rf"config\.json: {key}: missing, which stands for .* is not implemented"):
            load_model_config(tmp_path)
    write(tmp_path, {**published("llada"), "embedding_size": None, "multi_query_attention": False})
    assert load_model_config(tmp_path).vocab_size == 512
    dream = {"model_type": "Dream", "vocab_size": 152064, "hidden_size": 64, "intermediate_size": 8, "eos_token_id": 1}
    write(tmp_path, {**dream, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": None})
    config = load_model_config(tmp_path)
    assert (config.mask_token_id, config.num_kv_heads, config.rope_theta) == (151666, 4, 1e4)


LLADA_LEFT_OUT = (
    "rope_theta", "rms_norm_eps", "max_sequence_length", "weight_tying", "n_kv_heads", "mlp_hidden_size",
    "rope_full_precision", "include_bias", "alibi", "scale_logits",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("sdar", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: rope type 'yarn' is not impl"),
        ("sdar", {"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor: 4.0 without a rope_type"),
        ("sdar", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: 0.5 is"),
        ("diffcoder", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not implemented, only 1"),
        (
            "sdar",
            {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
            "layer_types: .* only full_attention",
        ),
        ("sdar", {"rope_parameters": {"sliding_attention": {}}}, "rope_parameters: .* only one set for all layers"),
        (
            "sdar",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            "use_sliding_window: True is not implemented",
        ),
        ("sdar", {"head_dim": None}, "head_dim: null"),
        ("sdar", {"per_layer_config": {"0": {}}}, "per_layer_config: .* is not implemented, only null or {}"),
        ("sdar", {"transformers_weights": "other.safetensors"}, "transformers_weights: 'other.safetensors' is not"),
        ("llada", {"layer_norm_with_affine": False}, "layer_norm_with_affine: False is not implemented"),
        ("llada", {"rope": None}, "rope: None is not implemented, only true"),
        ("llada2", {"use_bias": ...}, "use_bias: missing, which stands for true: True is not implemented, only false"),
        ("llada2", {"norm_topk_prob": False}, "norm_topk_prob: False is not implemented, only true"),
        ("llada2", {"num_key_value_heads": ...}, "num_key_value_heads: .*expected an integer of at least 1"),
        (
            "llada2",
            {"rope_parameters": {"partial_rotary_factor": 2}},
            r"\S+factor: expected a number in 0\.\.1, found 2",
        ),
        ("sdar_moe", {"num_local_experts": 4}, "num_local_experts: 4 is not implemented, only 8"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_key_and_value(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    tree = {**(CLASSES[family][0] if family in CLASSES else published(family)), **changes}
    write(tmp_path, {key: value for key, value in tree.items() if value is not ...})
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}),
        ({"eos_token_id": [3, 4]}, None),
        ({"eos_token_id": 3}, {"eos_token_id": 5}),
    ],
)
def test_end_tokens_are_those_of_the_generation_config(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    write(tmp_path, {**published("sdar"), **config})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    source = "config.json" if generation is None else None
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path, config_file_name=source)
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    ours = load_model_config(tmp_path)
    assert list(ours.stop_token_ids) == ends and ours.eos_token_id == ends[0]


def test_masks_that_two_configs_name_differently_are_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"mask_token_id": 77}')
    write(tmp_path, {**published("sdar"), "mask_token_id": 78})
    with pytest.raises(ConfigError, match=r"generation_config\.json: mask_token_id: 77, but config\.json says 78"):
        load_model_config(tmp_path)
    write(tmp_path, {key: value for key, value in published("sdar").items() if key != "mask_token_id"})
    assert load_model_config(tmp_path).mask_token_id == 77


SIZES = {
    "vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rope_theta": 1e4, "eos_token_id": 1, "mask_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def qwen(folder: Path, tied: bool = False) -> Tensors:
    """A folder's config.json, for both sides, and all tensors of the model."""
    tree = {**SIZES, "model_type": "Fast_dLLM_Qwen", "tie_word_embeddings": tied}
    write(folder, tree)
    shapes = checkpoint_shapes(load_model_config(folder), [HEAD, EMBED])
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def check_weights(folder: Path) -> None:
    tree = json.loads((folder / "config.json").read_text())
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(folder, config=transformers.Qwen2Config.from_dict(tree))
    ours = load_weights(folder, load_model_config(folder), tp_rank=0, tp_size=1, dtype=torch.float32)
    assert torch.equal(ours["embed_tokens.weight"], theirs.model.embed_tokens.weight)
    assert torch.equal(ours["lm_head.weight"], theirs.lm_head.weight)
    assert torch.equal(ours["layers.0.down_proj.weight"], theirs.model.layers[0].mlp.down_proj.weight)


def save_shards(folder: Path, tensors: Tensors, mapped: dict[str, str] | None = None) -> None:
    parts = {f"model-0000{n + 1}-of-00002.safetensors": dict(list(tensors.items())[n::2]) for n in range(2)}
    for file, part in parts.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part} | (mapped or {})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.slow
def test_the_single_file_is_read_before_an_index_and_its_shards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = qwen(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_shards(tmp_path, {name: tensor + 1 for name, tensor in tensors.items()})
    with caplog.at_level(logging.WARNING):
        check_weights(tmp_path)
    assert "model.safetensors is read, and model.safetensors.index.json beside it is not" in caplog.text
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    check_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    check_weights(tmp_path)


def test_of_an_index_only_the_names_of_the_shards_count(tmp_path: Path) -> None:
    tensors = qwen(tmp_path)
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_shards(tmp_path, tensors, dict.fromkeys((HEAD, EMBED), file))
        check_weights(tmp_path)
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    for file in ("consolidated.safetensors", "model-00001-of-00003.safetensors", "adapter_model.safetensors"):
        save_file(other, tmp_path / file, metadata={"format": "pt"})
    for file in ("pytorch_model.bin", "model.fp16.safetensors"):
        (tmp_path / file).write_bytes(b"no weights at all")
    check_weights(tmp_path)


def test_shards_that_contradict_each_other_or_have_no_index_are_refused(tmp_path: Path) -> None:
    tensors = qwen(tmp_path)
    save_shards(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    save_file({HEAD: tensors[HEAD] + 1}, tmp_path / "more.safetensors")
    index.write_text(json.dumps({"weight_map": {**weight_map, HEAD: "more.safetensors"}}))
    with pytest.raises(
        ConfigError, match=r"more\.safetensors: lm_head\.weight: also in model-0000\d.*remove the shard"
    ):
        check_ours(tmp_path)
    index.unlink()
    with pytest.raises(ConfigError, match=r"nor model\.safetensors\.index\.json found; \S+ is not read without an ind"):
        check_ours(tmp_path)


def check_ours(folder: Path) -> None:
    load_weights(folder, load_model_config(folder), tp_rank=0, tp_size=1, dtype=torch.float32)


@pytest.mark.parametrize("left_out", [HEAD, EMBED, None])
@pytest.mark.parametrize("are_equal", [False, True])
def test_a_tied_model_may_keep_either_tensor_or_both(
    tmp_path: Path, left_out: str | None, are_equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = qwen(tmp_path, tied=True)
    if are_equal:
        tensors[HEAD] = tensors[EMBED].clone()
    kept = {name: tensor for name, tensor in tensors.items() if name != left_out}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="common"):
        check_weights(tmp_path)
    assert ("differs from model.embed_tokens.weight although" in caplog.text) is (left_out is None and not are_equal)


@pytest.mark.parametrize(("tied", "left_out"), [(False, (HEAD,)), (False, (EMBED,)), (True, (HEAD, EMBED))])
def test_what_transformers_would_make_up_is_refused(tmp_path: Path, tied: bool, left_out: tuple[str, ...]) -> None:
    tensors = qwen(tmp_path, tied)
    save_file({name: own for name, own in tensors.items() if name not in left_out}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=rf"model\.safetensors: {left_out[-1]}: missing; the checkpoint is incomplete"
    ):
        check_ours(tmp_path)


def test_an_adapter_beside_the_weights_is_asked_about(tmp_path: Path) -> None:
    save_file(qwen(tmp_path), tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(
        ConfigError, match=r"adapter_config\.json: a LoRA beside the model's own weights; set `lora_path`"
    ):
        check_ours(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"a LoRA, not a model: set `lora_path` to it and `model` .* \('org/base'\)"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "'compressed-tensors'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}, "NVFP4"),
        ({"bits": 4}, r"\{'bits': 4\}"),
        ("int8", "'int8'"),
    ],
)
def test_folders_quantized_by_others_are_refused_by_their_method(tmp_path: Path, settings: Any, method: str) -> None:
    for key in ("quantization_config", "compression_config"):
        write(tmp_path, {**published("sdar"), key: settings})
        sentence = rf"config\.json: {key}: {method}: weights quantized by this method are not read; use the unquantized"
        with pytest.raises(ConfigError, match=sentence):
            load_model_config(tmp_path)
        write(tmp_path, {**published("sdar"), key: None})
        load_model_config(tmp_path)


def test_a_folder_of_msmodelslim_needs_its_description(tmp_path: Path) -> None:
    write(tmp_path, {**published("sdar"), "quantization_config": {"quant_method": "ascend"}})
    with pytest.raises(
        ConfigError, match=r"quantization_config: ascend: no quant_model_description\.json is beside it"
    ):
        load_model_config(tmp_path)
    (tmp_path / "quant_model_description.json").write_text("{}")
    load_model_config(tmp_path)


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed"])
def test_packed_weights_without_a_word_in_the_config_are_named(tmp_path: Path, suffix: str) -> None:
    tensors, module = qwen(tmp_path), "model.layers.0.self_attn.q_proj"
    tensors[f"{module}.{suffix}"] = tensors.pop(f"{module}.weight").to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"q_proj\.weight: missing; {module}\.{suffix} in its place are quantized"):
        check_ours(tmp_path)


def test_a_bias_of_the_router_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    tree = {**published("llada2"), "moe_router_enable_expert_bias": True}
    write(tmp_path, tree)
    shapes = checkpoint_shapes(load_model_config(tmp_path))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    check_ours(tmp_path)
    write(tmp_path, {**tree, "moe_router_enable_expert_bias": False})
    with pytest.raises(ConfigError, match=r"mlp\.gate\.expert_bias: is there, but config\.json says moe_router_enable"):
        check_ours(tmp_path)


FLAGS_OFF = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    tree: dict[str, Any] = json.loads(tokenizer.to_str())
    return tree


def listed(*tokens: tuple[str, bool]) -> list[dict[str, Any]]:
    """Return these tokens as tokenizer.json lists them, from the first id after the vocabulary on."""
    return [
        {"id": 300 + n, "content": text, "special": special, **FLAGS_OFF} for n, (text, special) in enumerate(tokens)
    ]


def decoder(*tokens: tuple[str, bool]) -> dict[str, Any]:
    """Return these tokens as `added_tokens_decoder` of tokenizer_config.json."""
    return {str(token.pop("id")): token for token in listed(*tokens)}


X, Y = ("<x>", True), ("<y>", True)
PLAIN_X = ("<x>", False)
CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]] = {
    "special in the config alone": (listed(PLAIN_X), {"added_tokens_decoder": decoder(X)}, None, None),
    "special in tokenizer.json alone": (listed(X), {"added_tokens_decoder": decoder(PLAIN_X)}, None, None),
    "an end token that is not special": (listed(PLAIN_X), {"eos_token": "<x>"}, None, None),
    "the same with a decoder": (
        listed(PLAIN_X), {"eos_token": "<x>", "added_tokens_decoder": decoder(PLAIN_X)}, None, None
    ),
    "special_tokens_map over the config": (listed(X, Y), {"eos_token": "<x>"}, {"eos_token": "<y>"}, None),
    "special_tokens_map beside a decoder": (
        listed(X, Y), {"eos_token": "<x>", "added_tokens_decoder": decoder(X, Y)},
        {"eos_token": "<y>", "bos_token": "<y>"}, None,
    ),
    "added_tokens beside tokenizer.json": (listed(X), {}, None, {"<x>": 305, "<y>": 301}),
    "added_tokens beside a decoder": (listed(X), {"added_tokens_decoder": decoder(X)}, None, {"<z>": 301}),
    "extra special tokens": (listed(PLAIN_X), {"extra_special_tokens": ["<x>"]}, None, None),
    "additional special tokens": (listed(PLAIN_X), {"additional_special_tokens": ["<x>"]}, None, None),
    "extra ones in special_tokens_map": (listed(PLAIN_X), {}, {"additional_special_tokens": ["<x>"]}, None),
    "an end token of the vocabulary": (listed(X), {"eos_token": "de"}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("class_", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("case", CASES)
def test_added_tokens_are_read_by_the_same_precedence(
    tmp_path: Path, spec: dict[str, Any], case: str, class_: str
) -> None:
    tokens, settings, special, added = CASES[case]
    files = {"tokenizer.json": {**spec, "added_tokens": tokens}, "special_tokens_map.json": special}
    files |= {"tokenizer_config.json": {"tokenizer_class": class_, **settings}, "added_tokens.json": added}
    for file, tree in files.items():
        if tree is not None:
            (tmp_path / file).write_text(json.dumps(tree))
    theirs = getattr(transformers, class_).from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("<x>", "a<y>b", "<z>", "def", "<x><y>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    for role in ("eos", "bos"):
        token = getattr(theirs, f"{role}_token")
        if token != "<|endoftext|>":  # which a class adds where a folder has none
            assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_token_id"), role


@pytest.mark.parametrize(
    ("tokens", "message"), [((Y,), "id 300 is '<x>' and '<y>'"), ((Y, X), "'<x>' is id 300 and id 301")]
)
def test_ids_that_contradict_each_other_are_refused(
    tmp_path: Path, spec: dict[str, Any], tokens: tuple[tuple[str, bool], ...], message: str
) -> None:
    """The classes of transformers do not agree on them."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({**spec, "added_tokens": listed(X)}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder(*tokens)}))
    with pytest.raises(ConfigError, match=rf"added tokens are not readable \({message}\)"):
        load_tokenizer(tmp_path)


def test_vocabulary_files_beside_tokenizer_json_are_not_read(tmp_path: Path, spec: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    vocab = {text: 299 - id_ for text, id_ in spec["model"]["vocab"].items()}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("")
    theirs = transformers.Qwen2Tokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("def") == theirs.encode("def", add_special_tokens=False)


NAMED = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "named"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("config", {}),
        ("config", {"chat_template.jinja": "file"}),
        ("config", {"chat_template.json": '{"chat_template": "json"}'}),
        (NAMED, {}),
        (NAMED, {"chat_template.jinja": "file"}),
        ({"default": "mapped", "rag": "rag"}, {}),
        ("config", {"additional_chat_templates/default.jinja": "more", "chat_template.jinja": "file"}),
        ("config", {"additional_chat_templates/rag.jinja": "rag", "chat_template.jinja": "file"}),
        ("config", {"additional_chat_templates/rag.jinja": "rag"}),
        (NAMED[:1], {}),
        (None, {}),
    ],
)
def test_the_chat_template_is_the_one_that_transformers_takes(
    tmp_path: Path, spec: dict[str, Any], own: Any, files: dict[str, str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": own}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    try:
        template = theirs.get_chat_template()
    except ValueError:
        with pytest.raises(ConfigError, match="no default chat_template"):
            ours.chat_text(messages)
    else:
        assert text_of(ours, messages) == template
